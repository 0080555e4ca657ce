"""The denoiser's frozen weights in fewer bits (`quantize`): formats are in `inweave.ops.quantized`.

    fp8                      the linear layers of attention and feed-forward parts, which see every token, if both sides
                             are large enough for faster products
    the others               the linear layers and convolutions of the repeated blocks; embeddings, the first and the
                             last projection stay exact

A denoiser is quantized while it is in host memory, layer by layer, before adapters are attached: the device never holds
it in 16 bits. Each weight is stored once. The adapter is relative to the quantized weights, and files do not change.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from inweave.errors import ConfigError
from inweave.layers import LoraLayer
from inweave.layers.hosts import ParameterHost, unhosted
from inweave.models.roles import projections, token_layers
from inweave.ops.quantized import FORMATS, QuantizedLayer, QuantizedLinear, joint_weight
from inweave.ops.tensors.device import DTYPES
from inweave.weights.scratch import trim_heap

_IN_BLOCK = re.compile(r"(^|\.)\d+\.")


def format_problems(denoiser: nn.Module, format: str, device: torch.device) -> list[str]:
    """Return why a denoiser cannot be quantized on a device; it needs no weights."""
    kind = FORMATS[format]
    problems = kind.device_problems(device)
    if not _chosen(denoiser, kind):
        problems.append(
            f"no layer of {type(denoiser).__name__} is large enough to be "
            f"{'faster' if kind.for_speed else 'worth it'}; leave it out"
        )
    return problems


def refuse_format(denoiser: nn.Module, format: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if a denoiser cannot be quantized for inference; it needs no weights."""
    if format not in FORMATS:
        raise ConfigError(f"quantize: expected off, keep, {', '.join(FORMATS)}, got {format!r}")
    problems = format_problems(denoiser, format, device)
    if dtype not in {DTYPES[each] for each in FORMATS[format].precisions}:
        problems.append(f"the products of 8-bit numbers are bf16, not {str(dtype).removeprefix('torch.')}; use bf16")
    if problems:
        raise ConfigError([f"quantize = {format!r}: {problem}" for problem in problems])


def quantized_names(denoiser: nn.Module, format: str) -> set[str]:
    """Return the layers that are quantized in a format, or would be."""
    kind = FORMATS[format]
    bases = ((name, _base(module)) for name, module in denoiser.named_modules())
    own = {name for name, base in bases if isinstance(base, QuantizedLayer) and base.quantized.format() == format}
    return own | _chosen(denoiser, kind).keys()


def quantize_denoiser(model: Any, format: str, device: torch.device, store: torch.device | None = None) -> str:
    """Quantize a loaded model's denoiser in place; returns a note for the log.

    ``device``: where to compute; ``store``: where the quantized weights go, by default where the weights are.
    """
    model.release_weaver()  # it holds the original weights
    return quantize_layers(model.denoiser, format, device, store)


def quantize_layers(denoiser: nn.Module, format: str, device: torch.device, store: torch.device | None = None) -> str:
    """Quantize a denoiser in place; returns a note for the log.

    Raises:
        MergeStateError: adapters are merged, so that the weights to go back to are not those that get quantized.
    """
    for module in denoiser.modules():
        if isinstance(module, LoraLayer):
            module.require_unmerged("quantize the weight")
    quantizer = Quantizer(denoiser, format, device, store)
    for name in quantizer.names:
        quantizer.arrived(f"{name}.weight")
    return quantizer.note()


class Quantizer:
    """Quantizes layers of a denoiser as their weights arrive, queries, keys and values of an attention as one matrix.

    So a denoiser that is being read (`inweave.weights.build`) is never whole in 16 bits. ``device``: where to compute;
    ``store``: where the quantized weights go, by default where the weights are.
    """

    def __init__(
        self, denoiser: nn.Module, format: str, device: torch.device, store: torch.device | None = None
    ) -> None:
        self._format, self._device, self._store = format, device, store
        self._kind = FORMATS[format]
        self._all, self._chosen = _candidates(denoiser, self._kind), _chosen(denoiser, self._kind)
        self._groups = {name: group for group in projections(self._chosen) for name in group}
        self._here: set[str] = set()
        self._errors: list[float] = []

    @property
    def names(self) -> list[str]:
        """The layers that are quantized."""
        return [*self._chosen]

    def arrived(self, name: str) -> None:
        """Quantize a weight that is in place, with those of its group once all of them are; leave other tensors."""
        module, _, leaf = name.rpartition(".")
        names = self._groups.get(module, ())
        if leaf != "weight" or not names:
            return
        self._here.add(module)
        if not self._here.issuperset(names):
            return
        group: list[Any] = [self._chosen[each] for each in names]
        alike = len({(layer.weight.shape, layer.weight.dtype, layer.weight.device) for layer in group}) == 1
        for part in [group] if alike else [[layer] for layer in group]:
            is_blank = part[0].weight.is_meta
            wide = sum(4 * layer.weight.numel() for layer in part)
            error = self._kind.quantize(*part, device=self._device, store=self._store)
            trim_heap(4 * wide)  # several copies in float32
            if not is_blank:
                self._errors.append(error)

    def note(self) -> str:
        """Return what is quantized, for the log."""
        rest = "" if len(self._chosen) == len(self._all) else "; the others are small"
        where = "that see every token" if self._kind.for_speed else "of the blocks"
        work = f"multiplied in 8 bits ({self._format})" if self._kind.for_speed else f"stored in {self._format}"
        error = sum(self._errors) / len(self._errors) if self._errors else 0.0
        mean = f"; their weights differ by {error:.1%} on average" if self._errors else ""
        layered = "linear layers" if all(isinstance(each, nn.Linear) for each in self._all.values()) else "layers"
        return f"{len(self._chosen)} of the {len(self._all)} {layered} {where} are {work}{rest}{mean}"


def join_groups(denoiser: nn.Module) -> None:
    """Put projections of one input, which were quantized as one matrix and then moved, side by side again."""
    layers = {
        name: base for name, module in denoiser.named_modules() if isinstance(base := _base(module), QuantizedLinear)
    }
    for names in projections(layers):
        group = [layers[name] for name in names]
        shapes = {(type(each), tuple((part.shape, part.dtype) for part in each.quantized)) for each in group}
        by_rows = all(len(part) == layer.out_features for layer in group for part in layer.quantized)
        if by_rows and len(group) > 1 and len(shapes) == 1 and joint_weight(group) is None:
            kind: Any = type(group[0])
            whole = kind.weights(*map(torch.cat, zip(*(layer.quantized for layer in group), strict=True)))
            for layer, part in zip(group, whole.split(len(group)), strict=True):
                layer.put(part)


def _candidates(denoiser: nn.Module, format: type[QuantizedLinear]) -> dict[str, nn.Linear | nn.Conv2d]:
    """Return the layers to choose from, also convolutions for formats that only store; modules that read the weights
    of their children keep those.
    """
    readers = [each for each in denoiser.modules() if isinstance(each, nn.MultiheadAttention | ParameterHost)]
    read = {id(child) for each in readers for child in unhosted(each).children()}
    modules = token_layers(denoiser) if format.for_speed else dict(denoiser.named_modules())
    kinds = nn.Linear if format.for_speed or format.convolution is None else nn.Linear | nn.Conv2d
    return {
        name: base
        for name, module in modules.items()
        if isinstance(base := _base(module), kinds)
        and id(base) not in read
        and (format.for_speed or _IN_BLOCK.search(name))
    }


def _chosen(denoiser: nn.Module, format: type[QuantizedLinear]) -> dict[str, nn.Linear | nn.Conv2d]:
    return {name: layer for name, layer in _candidates(denoiser, format).items() if format.fits(layer)}


def _base(module: nn.Module) -> nn.Module:
    return module.base if isinstance(module, LoraLayer) else module
