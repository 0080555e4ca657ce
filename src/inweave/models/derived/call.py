"""The derived call of a denoiser: how it is made, and what of it is kept for a text and for a size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inweave.errors import FormatError
from inweave.models.derived.arguments import Argument, leaves, rebuilt
from inweave.models.derived.layout import Layout
from inweave.models.derived.recording import Recording
from inweave.models.families.declared import Prediction

#: the denoiser's time from the scheduler's t, of 0 to n
TIMES: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "t": lambda t, n: t,
    "t / n": lambda t, n: t / n,
    "1 - t / n": lambda t, n: 1 - t / n,
    "(n - t) / n": lambda t, n: (n - t) / n,
    "n - t": lambda t, n: n - t,
}


@dataclass(frozen=True, slots=True)
class Time:
    """The argument that holds the time of a step."""

    name: str
    rule: str
    factor: float
    steps: int
    dtype: torch.dtype
    rows: bool  # one number per row, or one for all

    def __call__(self, t: Tensor, rows: int) -> Tensor:
        """Return the argument for times ``t`` of the scheduler, one or as many as rows."""
        time = TIMES[self.rule](t, self.steps)
        time = (time if self.factor == 1.0 else time * self.factor).to(self.dtype)
        return time.expand(rows) if self.rows else time

    def __str__(self) -> str:
        rule = self.rule.replace("n", f"{self.steps:g}")
        return rule if self.factor == 1.0 else f"({rule}) * {self.factor:g}"


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of the denoiser's output: the first or the last entries along an axis."""

    axis: int
    last: bool

    def __call__(self, output: Tensor, count: int) -> Tensor:
        return output.narrow(self.axis, output.shape[self.axis] - count if self.last else 0, count)

    def __str__(self) -> str:
        return f"the {'last' if self.last else 'first'} of axis {self.axis} of the output"


@dataclass(frozen=True, slots=True)
class Derivation:
    """How a denoiser is called; everything that a family needs to know of its pipeline."""

    pipeline: str
    prediction: Prediction
    latents: str  # the argument that holds them
    listed: bool  # a list of rows instead of a tensor
    layout: Layout
    output: Layout
    sign: int
    cut: Cut | None  # of the output, if it has a variance or the text as well
    time: Time
    arguments: Mapping[str, Argument]
    template: Mapping[str, Any]  # how the arguments are nested
    strength: float  # of guidance, where there is none
    reference: tuple[int, int]  # the width and height at which texts are recorded
    chooses: bool  # whether the pipeline makes other sizes than it is asked for
    shifts: bool  # whether latents are shifted as the autoencoder's configuration says
    patch: int = 8  # the width and height of latents are multiples of this

    def call(
        self, denoiser: Any, latents: Tensor, t: Tensor, values: Mapping[str, Any], sized: Mapping[str, Any]
    ) -> Tensor:
        """Return the prediction in the shape of the latents.

        ``values``: the arguments from the text and guidance of the batch; ``sized``: those that depend on the size.
        """
        packed = self.layout.pack(latents)
        entries: dict[str, Any] = {name: each.value for name, each in self.arguments.items() if each.kind == "constant"}
        rows = len(latents)
        sized_only = {name: value for name, value in sized.items() if self.arguments[name].kind == "size"}
        for name, value in (entries | sized_only).items():
            argument = self.arguments[name]
            entries[name] = argument.join([_on(value, latents.device)] * rows)
        entries |= values
        for name, argument in self.arguments.items():
            if argument.grows is not None:
                entries[name] = argument.grown(values[name], sized[name].shape[1])
        entries[self.latents] = list(packed.unbind()) if self.listed else packed
        entries[self.time.name] = self.time(t, rows)
        output = unwrapped(denoiser(**rebuilt(self.template, entries)))
        shape = latents.shape[1], latents.shape[2], latents.shape[3]
        output = output if self.cut is None else self.cut(output, self.output.shape_of(shape)[self.cut.axis - 1])
        prediction = self.output.unpack(output, shape)
        return prediction if self.sign > 0 else -prediction

    def lines(self) -> list[str]:
        """Return what was derived, one line each."""
        by_kind = {kind: [n for n, each in self.arguments.items() if each.kind == kind] for kind in ("text", "size")}
        sign = "" if self.sign > 0 else ", with the other sign"
        cut = f", {self.cut}" if self.cut is not None else ""
        return [
            f"latents    {self.latents}: {self.layout}{' (a list of rows)' if self.listed else ''}",
            f"time       {self.time.name}: {self.time}",
            f"prediction {self.prediction}: {self.output}{cut}{sign}",
            f"text       {', '.join(by_kind['text'])}",
            *([f"size       {', '.join(by_kind['size'])}"] if by_kind["size"] else []),
            *([] if self.shifts else ["shift      not applied, whatever the autoencoder's configuration says"]),
            *(["sizes      the pipeline makes those it chooses itself; others are refused"] if self.chooses else []),
        ]


def unwrapped(output: Any) -> Tensor:
    """Return the prediction in the output of a denoiser as one tensor; a list of rows is stacked."""
    first = output[0] if isinstance(output, tuple) else output if torch.is_tensor(output) else output.sample
    if isinstance(first, list):
        first = torch.stack(first)
    if not torch.is_tensor(first):
        raise FormatError(f"the output of the denoiser is {type(first).__name__}, not a tensor")
    return first


def text_values(derivation: Derivation, recording: Recording) -> dict[str, Tensor]:
    """Return the arguments that depend on the text, of a recorded call for one text, as tensors of one row."""
    values = leaves(recording.calls[0])
    rows = {}
    for name, argument in derivation.arguments.items():
        if argument.kind == "text":
            listed, value = argument.rows == "listed", values[name]
            if value is None and argument.rows == "masked":
                value = torch.ones(values[argument.of].shape[:2], dtype=argument.dtype)
            value = value[0] if listed else value
            if type(value) is int:
                rows[name] = torch.tensor([value])
            else:  # without an axis of rows, if a list or a whole batch has it once
                rows[name] = value[None] if listed or argument.rows == "shared" else value.movedim(argument.axis, 0)
    return rows


def size_values(derivation: Derivation, recording: Recording) -> dict[str, Any]:
    """Return the arguments that depend on the size, of a recorded call for one row."""
    values = leaves(recording.calls[0])
    arguments = derivation.arguments.items()
    return {name: values[name] for name, each in arguments if each.kind == "size" or each.grows is not None}


def joined(derivation: Derivation, rows: list[dict[str, Tensor]], guidance: float) -> dict[str, Any]:
    """Return the arguments of a batch from the text of its rows and the strength of guidance."""
    values: dict[str, Any] = {}
    for name, argument in derivation.arguments.items():
        if argument.kind == "text":
            parts: list[Any] = [row[name].movedim(0, argument.axis) for row in rows]
            if argument.rows == "shared":
                parts = [int(part) if part.dim() == 1 else part[0] for part in parts]
            if argument.rows == "listed":  # numbers are kept as tensors of one row
                parts = [
                    part.tolist() if part.dim() == 1 and not part.is_floating_point() else [part[0]] for part in parts
                ]
            values[name] = argument.join(parts)
        elif argument.kind == "guidance":
            values[name] = torch.full((len(rows) if argument.rows == "joined" else 1,), guidance * argument.value)
    return values


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if torch.is_tensor(value) else value
