"""All trained parameters in one float32 buffer, their gradients in another.

    values = | a . . | b . | 0 | c . . . | 0 |         parameters a, b of one learning rate, c of another
    grads  = the same layout                           p.data and p.grad are views of the two

A segment starts at a multiple of 64 values (256 bytes, which suits every wide load); parameters that share a
learning-rate multiplier are contiguous, and each such run starts at a multiple of 256, so every block of 256 has one
multiplier. The padding between segments is 0 and stays 0: a zero with a zero gradient is a fixed point of every
optimizer.

`rounded` is a copy of all values in another dtype, made by one kernel, also at addresses that never change. It is not
updated when the values change: call it again.

Norms, clipping, AdamW and EMA are therefore a handful of kernel launches for any number of parameters, at addresses
that never change.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from inweave.errors import ConfigError, FormatError
from inweave.ops.adam8bit import BLOCK

_ALIGN = 64
#: rows of 256 values that temporaries hold at once: 16 MiB of float32, which stays in a large GPU's L2 cache
ROWS = 1 << 14


class Segment(NamedTuple):
    """The place of a parameter in the flat buffers."""

    place: slice
    shape: torch.Size


class FlatParameters:
    """Owns the storage of ``parameters``; move the model to its device first, and do not move it afterwards.

    ``groups``       parameter name -> learning-rate multiplier; 1 for parameters that are not listed
    ``device``       where the parameters go; without it they stay on their device
    ``values``       (size,) float32, size a multiple of 256
    ``grads``        the same for gradients: backward passes add to it, `zero_grads` clears it
    ``multipliers``  (size / 256,) float32: the multiplier of each block of 256
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: Mapping[str, float] | None = None,
        device: torch.device | None = None,
    ) -> None:
        groups = groups or {}
        _check(parameters, groups)
        self.segments: dict[str, Segment] = {}
        multipliers: list[float] = []
        runs: list[tuple[slice, float]] = []
        size = 0
        for multiplier in dict.fromkeys(float(groups.get(name, 1.0)) for name in parameters):
            for name, parameter in parameters.items():
                if groups.get(name, 1.0) == multiplier:
                    self.segments[name] = Segment(slice(size, size + parameter.numel()), parameter.shape)
                    size = _up(size + parameter.numel(), _ALIGN)
            size = _up(size, BLOCK)
            runs.append((slice(len(multipliers) * BLOCK, size), multiplier))
            multipliers += [multiplier] * (size // BLOCK - len(multipliers))
        device = device or next(iter(parameters.values())).device
        self.values = torch.zeros(size, device=device)
        self.grads = torch.zeros(size, device=device)
        self.multipliers = torch.tensor(multipliers, dtype=torch.float32, device=device)
        #: every multiplier is 1
        self.uniform = all(multiplier == 1.0 for multiplier in multipliers)
        #: (slice, multiplier) of each contiguous run of parameters with the same multiplier
        self.runs = runs
        #: the multiplier of each parameter
        self.factors = {name: float(groups.get(name, 1.0)) for name in self.segments}
        self.parameters: dict[str, nn.Parameter] = {name: parameters[name] for name in self.segments}
        self._rounded: dict[torch.dtype, torch.Tensor] = {}
        self._grads = {name: self.grads[place].view(shape) for name, (place, shape) in self.segments.items()}
        for name, (place, shape) in self.segments.items():
            view = self.values[place].view(shape)
            view.copy_(parameters[name].detach())
            parameters[name].data = view
        self._attach()

    @property
    def layout(self) -> torch.Tensor:
        """(32,) uint8: a digest of names, places and shapes; flat states saved under another one do not fit."""
        rows = [(name, place.start, list(shape)) for name, (place, shape) in self.segments.items()]
        return torch.tensor(list(hashlib.sha256(json.dumps(rows).encode()).digest()), dtype=torch.uint8)

    def zero_grads(self) -> None:
        """Clear all gradients, even if `p.grad` was set to None or to another tensor."""
        self.grads.zero_()
        self._attach()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients by name: views of `grads` with separate version counters for autograd."""
        return {name: view.data for name, view in self._grads.items()}

    @torch.no_grad()
    def rounded(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all current values rounded to ``dtype``; every call writes the same buffer."""
        if dtype not in self._rounded:
            self._rounded[dtype] = torch.zeros_like(self.values, dtype=dtype)
        return self._rounded[dtype].copy_(self.values)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the parameters by name, as views: the next step changes them."""
        return {name: self.values[place].view(shape) for name, (place, shape) in self.segments.items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy all values from what `state` returned, bit for bit if they are float32."""
        check_state(state, {name: tuple(shape) for name, (_, shape) in self.segments.items()}, "the trained parameters")
        for name, value in state.items():
            if not value.is_floating_point():
                raise FormatError(f"the trained parameters: {name!r} is {value.dtype}, which cannot be trained")
        for name, view in self.state().items():
            view.copy_(state[name])

    def _attach(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter.grad is not self._grads[name]:
                parameter.grad = self._grads[name]


def check_state(state: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], what: str) -> None:
    """Raise FormatError if names or shapes of a saved state differ from ``shapes``, before anything is overwritten."""
    if missing := sorted(shapes.keys() - state.keys()):
        raise FormatError(f"the saved state lacks {missing[0]!r} ({len(missing)} missing) of {what}")
    if unknown := sorted(state.keys() - shapes.keys()):
        raise FormatError(
            f"the saved state has {unknown[0]!r} ({len(unknown)} unknown), which does not belong to {what}"
        )
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            raise FormatError(f"{what}: {name!r} has shape {shape}, the saved state has {tuple(state[name].shape)}")


@torch.no_grad()
def restore(own: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], what: str) -> None:
    """Copy a saved state over the live tensors of ``own``; all or nothing."""
    check_state(saved, {name: tuple(tensor.shape) for name, tensor in own.items()}, what)
    if "layout" in own and not torch.equal(own["layout"], saved["layout"].cpu()):
        raise FormatError(f"{what}: the saved state belongs to other parameters (their names, shapes or order differ)")
    for name, tensor in own.items():
        if tensor.dtype != saved[name].dtype:
            raise FormatError(f"{what}: {name!r} is {tensor.dtype}, the saved state has {saved[name].dtype}")
    for name, tensor in own.items():
        tensor.copy_(saved[name])


@contextmanager
@torch.no_grad()
def hold(flat: FlatParameters, component: str) -> Iterator[None]:
    """Keep the parameters of components with this prefix unchanged, in spite of momentum and weight decay."""
    places = [place for name, (place, _) in flat.segments.items() if name.startswith(component)]
    values = [flat.values[place].clone() for place in places]
    for place in places:
        flat.grads[place].zero_()
    yield
    for place, value in zip(places, values, strict=True):
        flat.values[place].copy_(value)


@contextmanager
def collect_gradients(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Add the gradients of a backward pass to the leaves' `.grad` when the block ends, by a few kernels for all.

    Otherwise there would be a kernel per parameter, hundreds in a step of compiled blocks.
    """
    totals = [(leaf, leaf.grad) for leaf in leaves if leaf.grad is not None]
    added: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for leaf, _ in totals:
            leaf.grad = None
        yield
        added = [(total, leaf.grad) for leaf, total in totals if leaf.grad is not None]
    finally:
        for leaf, total in totals:
            leaf.grad = total
    if added:
        with torch.no_grad():
            torch._foreach_add_(*map(list, zip(*added, strict=True)))


@contextmanager
def preserve_values(flat: FlatParameters) -> Iterator[None]:
    """Restore the bits of the parameters after the block."""
    original = flat.values.clone()
    try:
        yield
    finally:
        flat.values.copy_(original)


def row_chunks(*flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the same rows of several flat buffers, as matrices of 256 columns, a few megabytes at a time."""
    return zip(*(torch.split(tensor.view(-1, BLOCK), ROWS) for tensor in flat), strict=True)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _check(parameters: Mapping[str, nn.Parameter], groups: Mapping[str, float]) -> None:
    problems = []
    if not parameters:
        problems.append("nothing to train: there is no parameter")
    if unknown := sorted(groups.keys() - parameters.keys()):
        problems.append(f"there is a learning-rate multiplier for {unknown[0]!r}, which is not trained")
    for name, factor in groups.items():
        if not (math.isfinite(factor) and factor >= 0):
            problems.append(f"the learning-rate multiplier of {name!r} must be 0 or more, got {factor!r}")
    seen: dict[int, str] = {}
    for name, parameter in parameters.items():
        if (other := seen.setdefault(id(parameter), name)) != name:
            problems.append(f"{name!r} and {other!r} are the same parameter; train it under one name")
        if not parameter.is_floating_point():
            problems.append(f"{name!r} is {parameter.dtype}; only floating-point parameters can be trained")
    if len(devices := sorted({str(parameter.device) for parameter in parameters.values()})) > 1:
        problems.append(f"all trained parameters must be on one device, got {', '.join(devices)}")
    if problems:
        raise ConfigError(problems)
