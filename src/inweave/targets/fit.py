"""Compare the shape of a change with that of a weight: only flattened shapes, never the number of axes.

A 2-D LoRA on a 1x1 convolution and a 4-D one on a Linear are both legal; a LoKr's kernel may be in either factor.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from inweave.adapter import Entry, Factors
from inweave.targets.index import Component, ModelIndex, Spelling, Use
from inweave.targets.links import Shape

#: a file of two vectors could state any size: the widest published layer, Flux Fill's first, has six times the inputs
MOST_WIDENED = 16
#: the denoiser's first layer, which control adapters may widen
_INPUT_LAYERS = ("x_embedder.weight", "conv_in.weight", "pos_embed.proj.weight", "patch_embedding.weight")


def uses_of(spelling: Spelling, param: str) -> tuple[Use, ...] | None:
    """Return the uses of a parameter; a norm's only one may be called weight or scale, depending on the naming."""
    other = {"weight": "scale", "scale": "weight"}.get(param, param)
    return spelling.get(param) or spelling.get(other)


def stacked_shape(component: Component, uses: tuple[Use, ...]) -> Shape:
    shapes = [component.parts[use.part] for use in uses]
    if len(shapes) == 1:
        return shapes[0]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def fitted(factors: Factors, shape: Shape) -> Factors | None:
    """Return the factors as they apply to a weight of ``shape``, or None. Only flattened shapes are compared."""
    if (large := factors.widen) is not None and shape and (large[0], math.prod(large)) != (shape[0], math.prod(shape)):
        return None  # `widened` decides
    if factors.fits(shape):
        return factors if large in (None, shape) else replace(factors, widen=None)
    magnitude = factors.magnitude
    if magnitude is not None and magnitude.axis == "in" and magnitude.tensor.numel == 1:
        one_output = replace(factors, magnitude=replace(magnitude, axis="out"))  # (1, 1): (out, 1) or (1, in)
        if one_output.fits(shape):
            return one_output
    if factors.transposed and replace(factors, transposed=False).fits(shape):
        return replace(
            factors, transposed=False
        )  # fan_in_fan_out is recorded for the whole model; this layer is a Linear
    grouped = factors.within_groups(shape)
    return grouped if grouped is not None and grouped.fits(shape) else None


def either_way(factors: Factors, shape: Shape, part: str) -> Factors:
    """Try a layer also as an embedding, read transposed: candle-lora does not record which one it is."""
    table = re.search(r"emb|wte|wpe|shared", part) is not None
    if table and not factors.fits(shape) and replace(factors, transposed=True).fits(shape):
        return replace(factors, transposed=True)
    return factors


def widened(factors: Factors, shape: Shape, uses: tuple[Use, ...]) -> Shape | None:
    """Return the shape that a control adapter or a `reshape_weight` pads the base to, if that makes it fit."""
    if factors.widen is not None:
        large = factors.widen
        ok = (
            len(large) == len(shape)
            and all(a >= b for a, b in zip(large, shape, strict=True))
            and math.prod(large) <= MOST_WIDENED * math.prod(shape)
        )
        return large if ok and factors.fits(large) else None
    if len(uses) == 1 and uses[0].part in _INPUT_LAYERS and factors.widens_inputs and len(shape) >= 2:
        channels = math.prod(factors.shape()[1:]) // math.prod(shape[2:])
        large = (shape[0], channels, *shape[2:])
        return large if channels == 2 * shape[1] and factors.fits(large) else None
    return None


def widens_unasked(entry: Entry, index: ModelIndex) -> bool:
    """Return whether readers widen the base for an entry by themselves, where it needs a wider one at all."""
    factors, component, name = entry.factors, index.components.get(entry.ref.component), entry.ref.name
    if factors.widen is None:
        return True
    spelling = (component.by_diffusers.get(name) or component.by_original.get(name)) if component else None
    uses = uses_of(spelling, entry.param) if spelling else None
    if component is None or not uses:
        return False
    return widened(replace(factors, widen=None), stacked_shape(component, uses), uses) == factors.widen


def misfit(factors: Factors, shape: Shape) -> str:
    """Return why the factors do not fit a weight of ``shape``."""
    if factors.magnitude is not None and replace(factors, magnitude=None).fits(shape):
        count, side = factors.magnitude.tensor.numel, factors.magnitude.axis
        return f"the base has {list(shape)}, the magnitude has {count:,} numbers, one per {side}put"
    if factors.widen is not None:
        return f"the base has {list(shape)}, and reshape_weight widens it to {list(factors.widen)}"
    if (inputs := factors.weight_inputs) is not None and shape[1:2] != (inputs,):
        return f"the base has {list(shape)}, the adapter multiplies a weight of {inputs:,} inputs"
    return f"the base has {list(shape)}, the adapter changes {shape_text(factors.stored_shape())}"


def shape_text(shape: Shape) -> str:
    return "[" + ", ".join("any" if size == -1 else str(size) for size in shape) + "]"
