"""Compare the shape of a change with that of a weight: only flattened shapes, never the number of axes.

A 2-D LoRA on a 1x1 convolution and a 4-D one on a Linear are both legal; a LoKr's kernel may be in either factor.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from inweave.adapter import Factors, Full, Lora, OftIn, TokenRows
from inweave.targets.index import Component, Spelling, Use
from inweave.targets.links import Shape

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


def delta_shape(factors: Factors) -> Shape:
    shape = factors.shape()
    return shape[::-1] if factors.transposed and len(shape) == 2 else shape


def fitted(factors: Factors, shape: Shape) -> Factors | None:
    """Return the factors as they apply to a weight of ``shape``, or None. Only flattened shapes are compared."""
    if matches(factors, shape):
        return factors
    if factors.transposed and matches(replace(factors, transposed=False), shape):
        return replace(
            factors, transposed=False
        )  # fan_in_fan_out is recorded for the whole model; this layer is a Linear
    return None


def matches(factors: Factors, shape: Shape) -> bool:
    got = delta_shape(factors)
    if isinstance(factors, Full):
        return math.prod(got) == math.prod(shape) and (
            len(got) <= 1 or len(shape) <= 1 or got[0] == shape[0] or 1 in (got[0], shape[0])
        )
    if isinstance(factors, TokenRows):
        return len(shape) == 2 and shape[1] == got[1] and max(factors.indices, default=0) < shape[0]
    if not shape:
        return False
    if len(shape) == 1:  # a vector receives (IA)^3 scaling only
        return got in ((shape[0], -1), (shape[0],))
    rows, columns = shape[0], math.prod(shape[1:])
    channels = shape[1]
    have = math.prod(got[1:]) if -1 not in got[1:] else -1
    if got[0] not in (-1, rows):
        return False
    if isinstance(factors, OftIn) and factors.share:
        return columns % factors.block_size == 0
    if factors.magnitude is not None:
        size = rows if factors.magnitude.axis == "out" else channels
        if factors.transposed:
            size = channels if factors.magnitude.axis == "out" else rows
        if factors.magnitude.tensor.numel != size:
            return False
    return have == -1 or have == columns or (factors.kind == "ia3" and have == channels)


def either_way(factors: Factors, shape: Shape, part: str) -> Factors:
    """Try a layer also as an embedding, read transposed: candle-lora does not record which one it is."""
    table = re.search(r"emb|wte|wpe|shared", part) is not None
    if table and not matches(factors, shape) and matches(replace(factors, transposed=True), shape):
        return replace(factors, transposed=True)
    return factors


def widened(factors: Factors, shape: Shape, uses: tuple[Use, ...]) -> Shape | None:
    """Return the shape that a control adapter or a `reshape_weight` pads the base to, if that makes it fit."""
    if factors.widen is not None:
        large = factors.widen
        ok = len(large) == len(shape) and all(a >= b for a, b in zip(large, shape, strict=True))
        return large if ok and matches(factors, large) else None
    if len(uses) == 1 and uses[0].part in _INPUT_LAYERS and isinstance(factors, Lora) and len(shape) >= 2:
        channels = math.prod(factors.shape()[1:]) // math.prod(shape[2:])
        large = (shape[0], channels, *shape[2:])
        return large if channels == 2 * shape[1] and matches(factors, large) else None
    return None


def shape_text(shape: Shape) -> str:
    return "[" + ", ".join("any" if size == -1 else str(size) for size in shape) + "]"
