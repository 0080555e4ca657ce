"""Joined heads as one operator each way, for eager code and compiled regions, with gradients of the parts alone.

Saved for the backward pass: the parts themselves, which are outputs of projections and may be views of one tensor.
Without a norm nothing is saved. Trained weights get the same formula in torch's own operations, which have their
gradients. Parts that are neither normalized nor rotated are joined by torch: their gradients are views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inweave.ops.common.gradients import are_frozen
from inweave.ops.common.operators import register_operator
from inweave.ops.common.select import implementation, on_device_of
from inweave.ops.rotary import meta, reference

_PACKAGE = "inweave.ops.rotary"
_ARGUMENTS = "Tensor first, Tensor? second, Tensor? weight, Tensor? second_weight, float? eps, Tensor? cos, Tensor? sin"


def join_heads(
    parts: Sequence[Tensor],
    *,
    weights: Sequence[Tensor | None] | None = None,
    eps: float | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Join one or two (batch, rows, heads, size) into one sequence (batch, rows of all, heads, size).

    ``eps``: of an RMS norm of every head, with one of ``weights`` (size) or None per part; no norm if None.
    ``rotary``: cosines and sines, each (rows of all, size), of a rotation of the pairs (2i, 2i+1).
    """
    scales: Sequence[Tensor | None] = [None] * len(parts) if weights is None else weights
    check(parts, scales, rotary)
    cos, sin = (None, None) if rotary is None else (table.to(parts[0].device) for table in rotary)
    if eps is None and cos is None:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)
    if not are_frozen(*scales, cos, sin) or len({weight is None for weight in scales}) > 1:
        return reference.join_heads(parts, scales, eps, cos, sin)
    second, second_weight = (parts[1], scales[1]) if len(parts) == 2 else (None, None)
    y: Tensor = torch.ops.inweave.join_heads(parts[0], second, scales[0], second_weight, eps, cos, sin)
    return y


def check(parts: Sequence[Tensor], weights: Sequence[Tensor | None], rotary: Sequence[Tensor] | None) -> None:
    """Raise ValueError for tensors that do not match: a kernel would read out of bounds."""
    if not 1 <= len(parts) <= 2:
        raise ValueError(f"{len(parts)} parts of a sequence: one or two can be joined")
    first = parts[0]
    for part in parts[1:]:
        if (part.shape[0], *part.shape[2:], part.dtype) != (first.shape[0], *first.shape[2:], first.dtype):
            raise ValueError(
                f"parts of one sequence differ in more than their rows: {tuple(first.shape)} {first.dtype} and "
                f"{tuple(part.shape)} {part.dtype}"
            )
    size, rows = first.shape[-1], sum(part.shape[1] for part in parts)
    for weight in weights:
        if weight is not None and (weight.shape != (size,) or weight.dtype != first.dtype):
            raise ValueError(
                f"the weight of a norm is {tuple(weight.shape)} {weight.dtype}, of heads of {size} numbers in "
                f"{first.dtype}"
            )
    for table in rotary or ():
        if table.shape != (rows, size) or size % 2:
            raise ValueError(
                f"cosines or sines are {tuple(table.shape)}, of {rows} rows and heads of {size} numbers: one each is "
                "needed, and pairs of numbers"
            )


def _forward(
    first: Tensor,
    second: Tensor | None,
    weight: Tensor | None,
    second_weight: Tensor | None,
    eps: float | None,
    cos: Tensor | None,
    sin: Tensor | None,
) -> Tensor:
    work = implementation(_PACKAGE, first)
    parts, weights = ([first], [weight]) if second is None else ([first, second], [weight, second_weight])
    with on_device_of(first):
        y: Tensor = work.join_heads(parts, weights, eps, *dense(cos, sin))
    return y


def _backward(
    dy: Tensor,
    first: Tensor,
    second: Tensor | None,
    weight: Tensor | None,
    second_weight: Tensor | None,
    eps: float | None,
    cos: Tensor | None,
    sin: Tensor | None,
    of_first: bool,
    of_second: bool,
) -> tuple[Tensor, Tensor]:
    work = implementation(_PACKAGE, dy)
    parts, weights = ([first], [weight]) if second is None else ([first, second], [weight, second_weight])
    dfirst, dsecond = meta.join_heads_backward(dy, first, second, of_first, of_second)
    grads = [dfirst if of_first else None, dsecond if of_second else None][: len(parts)]
    with on_device_of(dy):
        work.join_heads_backward(dy, parts, weights, eps, *dense(cos, sin), grads)
    return dfirst, dsecond


def dense(*tables: Tensor | None) -> list[Tensor | None]:
    """Return the tables in contiguous memory."""
    return [None if table is None else table.contiguous() for table in tables]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    first, second, weight, second_weight, ctx.eps, cos, sin = inputs
    ctx.rows = [part.shape[1] for part in (first, second) if part is not None]
    parts = (None, None) if ctx.eps is None else (first, second)
    ctx.save_for_backward(*parts, weight, second_weight, cos, sin)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    of_first, of_second = ctx.needs_input_grad[:2]
    if dy is None:
        return (None,) * 7
    first, second, weight, second_weight, cos, sin = ctx.saved_tensors
    if ctx.eps is None:  # the backward pass only reads their shapes
        first, second = (*torch.split(dy, ctx.rows, 1), None)[:2]
    dfirst, dsecond = torch.ops.inweave.join_heads_backward(
        dy, first, second, weight, second_weight, ctx.eps, cos, sin, of_first, of_second
    )
    return dfirst if of_first else None, dsecond if of_second else None, *[None] * 5


register_operator(f"join_heads({_ARGUMENTS}) -> Tensor", _forward, meta.join_heads, save=_save, gradients=_gradients)
register_operator(
    f"join_heads_backward(Tensor dy, {_ARGUMENTS}, bool of_first, bool of_second) -> (Tensor, Tensor)",
    _backward,
    meta.join_heads_backward,
)
