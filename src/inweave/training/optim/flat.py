"""All trained parameters in one float32 buffer, their gradients in another.

    values = | a . . | b . | 0 | c . . . | 0 |         parameters a, b of one learning rate, c of another
    grads  = the same layout                           p.data and p.grad are views of the two

A segment starts at a multiple of 64 values (256 bytes, which suits every wide load); parameters of one learning-rate
multiplier lie together and each such run starts at a multiple of 256, so every block of 256 has one multiplier.
What lies between segments is 0 and stays 0: a zero with a zero gradient is a fixed point of every optimizer.

So norms, clipping, AdamW and averages are a handful of launches however many parameters there are, at addresses that
never change.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from inweave.errors import ConfigError, FormatError
from inweave.ops.adam8bit import BLOCK

_ALIGN = 64


class Segment(NamedTuple):
    """Where a parameter lies in the flat buffers."""

    place: slice
    shape: torch.Size


class FlatParameters:
    """Owns the storage of ``named``; move the model to its device first, and do not move it afterwards.

    ``groups``       parameter name -> multiplier of the learning rate; those not named have 1
    ``device``       where the parameters go; they stay where they are unless told
    ``values``       (size,) float32, size a multiple of 256
    ``grads``        the same for gradients: backward passes add to it, `zero_grads` clears it
    ``multipliers``  (size / 256,) float32: the multiplier of each block of 256
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        groups: Mapping[str, float] | None = None,
        device: torch.device | None = None,
    ) -> None:
        groups = groups or {}
        _check(named, groups)
        self.segments: dict[str, Segment] = {}
        multipliers: list[float] = []
        runs: list[tuple[slice, float]] = []
        size = 0
        for multiplier in dict.fromkeys(float(groups.get(name, 1.0)) for name in named):
            for name, parameter in named.items():
                if groups.get(name, 1.0) == multiplier:
                    self.segments[name] = Segment(slice(size, size + parameter.numel()), parameter.shape)
                    size = _up(size + parameter.numel(), _ALIGN)
            size = _up(size, BLOCK)
            runs.append((slice(len(multipliers) * BLOCK, size), multiplier))
            multipliers += [multiplier] * (size // BLOCK - len(multipliers))
        device = device or next(iter(named.values())).device
        self.values = torch.zeros(size, device=device)
        self.grads = torch.zeros(size, device=device)
        self.multipliers = torch.tensor(multipliers, dtype=torch.float32, device=device)
        #: no block has another multiplier than 1
        self.uniform = all(multiplier == 1.0 for multiplier in multipliers)
        #: (where, multiplier) of the parameters that have one together
        self.runs = runs
        #: the multiplier of each parameter
        self.factors = {name: float(groups.get(name, 1.0)) for name in self.segments}
        self.parameters: dict[str, nn.Parameter] = {name: named[name] for name in self.segments}
        self._grads = {name: self.grads[place].view(shape) for name, (place, shape) in self.segments.items()}
        for name, (place, shape) in self.segments.items():
            view = self.values[place].view(shape)
            view.copy_(named[name].detach())
            named[name].data = view
        self._attach()

    @property
    def layout(self) -> torch.Tensor:
        """(32,) uint8: a digest of names, places and shapes; flat states saved under another one do not fit."""
        rows = [(name, place.start, list(shape)) for name, (place, shape) in self.segments.items()]
        return torch.tensor(list(hashlib.sha256(json.dumps(rows).encode()).digest()), dtype=torch.uint8)

    def zero_grads(self) -> None:
        """Clear all gradients, also where somebody set `p.grad` to None or to another tensor."""
        self.grads.zero_()
        self._attach()

    def state(self) -> dict[str, torch.Tensor]:
        """The parameters by name, as views: the next step changes them."""
        return {name: self.values[place].view(shape) for name, (place, shape) in self.segments.items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take all values from `state`'s answer, bit for bit where they are float32."""
        fits(state, {name: tuple(shape) for name, (_, shape) in self.segments.items()}, "the trained parameters")
        for name, view in self.state().items():
            view.copy_(state[name])

    def _attach(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter.grad is not self._grads[name]:
                parameter.grad = self._grads[name]


def fits(state: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[int, ...]], what: str) -> None:
    """Refuse a saved state that has other names or shapes than ``wanted``, before anything is overwritten."""
    if missing := sorted(wanted.keys() - state.keys()):
        raise FormatError(f"the saved state lacks {missing[0]!r} ({len(missing)} missing) of {what}")
    if unknown := sorted(state.keys() - wanted.keys()):
        raise FormatError(f"the saved state has {unknown[0]!r} ({len(unknown)} unknown), which is none of {what}")
    for name, shape in wanted.items():
        if tuple(state[name].shape) != shape:
            raise FormatError(f"{what}: {name!r} has shape {shape}, the saved state has {tuple(state[name].shape)}")


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _check(named: Mapping[str, nn.Parameter], groups: Mapping[str, float]) -> None:
    problems = []
    if not named:
        problems.append("nothing to train: there is no parameter")
    if unknown := sorted(groups.keys() - named.keys()):
        problems.append(f"a learning-rate multiplier is given for {unknown[0]!r}, which is not trained")
    for name, factor in groups.items():
        if not (math.isfinite(factor) and factor >= 0):
            problems.append(f"the learning-rate multiplier of {name!r} must be a number from 0 on, got {factor!r}")
    seen: dict[int, str] = {}
    for name, parameter in named.items():
        if (other := seen.setdefault(id(parameter), name)) != name:
            problems.append(f"{name!r} and {other!r} are one parameter; train it under one name")
        if not parameter.is_floating_point():
            problems.append(f"{name!r} is {parameter.dtype}; only floating-point parameters can be trained")
    if len(devices := sorted({str(parameter.device) for parameter in named.values()})) > 1:
        problems.append(f"all trained parameters must be on one device, got {', '.join(devices)}")
    if problems:
        raise ConfigError(problems)
