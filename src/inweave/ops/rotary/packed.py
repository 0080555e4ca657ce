"""Queries, keys and values of one product, as joined heads: their gradients are written into one matrix.

    part      (batch, rows, 3, heads, size): the result of one product for one stream
    queries, keys    `join_heads` of their columns, with separate weights
    values           joined unchanged

With three operators, the three gradients would have to be copied into one matrix for the backward pass of the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inweave.ops.common.gradients import are_frozen
from inweave.ops.common.operators import register_operator
from inweave.ops.common.select import implementation, on_device_of
from inweave.ops.rotary import meta
from inweave.ops.rotary.autograd import check, dense, join_heads
from inweave.ops.rotary.meta import Three

_PACKAGE = "inweave.ops.rotary"
_WEIGHTS = "Tensor? query_weight, Tensor? key_weight, Tensor? second_query_weight, Tensor? second_key_weight"
_SETTINGS = "float? eps, Tensor? cos, Tensor? sin"

Weights = Sequence[Tensor | None]


def join_projections(
    parts: Sequence[Tensor],
    *,
    weights: Sequence[Weights] | None = None,
    eps: float | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
) -> Three:
    """Return queries, keys and values (batch, rows of all parts, heads, size) of one or two parts.

    ``weights``: of queries and of keys, for every part; the rest as for `join_heads`.
    """
    pairs: Sequence[Weights] = [(None, None)] * len(parts) if weights is None else weights
    flat = [weight for pair in pairs for weight in pair]
    check([part[:, :, 0] for part in parts], flat, rotary)
    cos, sin = (None, None) if rotary is None else (table.to(parts[0].device) for table in rotary)
    if not are_frozen(*flat, cos, sin) or len({weight is None for weight in flat}) > 1:
        q, k, v = zip(*(part.unbind(2) for part in parts), strict=True)
        queries, keys = zip(*pairs, strict=True)
        return (
            join_heads(q, weights=queries, eps=eps, rotary=rotary),
            join_heads(k, weights=keys, eps=eps, rotary=rotary),
            join_heads(v),
        )
    second = parts[1] if len(parts) == 2 else None
    result: Three = torch.ops.inweave.join_projections(parts[0], second, *(*flat, None, None)[:4], eps, cos, sin)
    return result


def _forward(first: Tensor, second: Tensor | None, *rest: Any) -> Three:
    *weights, eps, cos, sin = rest
    parts = [first] if second is None else [first, second]
    tables = dense(cos, sin)
    work = implementation(_PACKAGE, first)
    with on_device_of(first):
        q, k = (
            work.join_heads([part[:, :, at] for part in parts], weights[at::2][: len(parts)], eps, *tables)
            for at in range(2)
        )
        v = work.join_heads([part[:, :, 2] for part in parts], [None] * len(parts), None, None, None)
    return q, k, v


def _backward(
    dq: Tensor, dk: Tensor, dv: Tensor, first: Tensor | None, second: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    *weights, eps, cos, sin, rows, of_first, of_second = rest
    buffers = meta.join_projections_backward(dq, *rest)
    needed = [of_first, of_second][: len(rows)]
    shapes = torch.split(dv, rows, 1)  # placeholders for parts of which only the shape is read
    tables = dense(cos, sin)
    work = implementation(_PACKAGE, dq)
    with on_device_of(dq):
        for at, dy in enumerate((dq, dk, dv)):
            grads = [grad[:, :, at] if of_part else None for grad, of_part in zip(buffers, needed, strict=False)]
            normed = at < 2 and eps is not None
            parts = [part[:, :, at] for part in (first, second) if part is not None] if normed else shapes
            scales = weights[at::2][: len(rows)] if normed else [None] * len(rows)
            work.join_heads_backward(
                dy, parts, scales, eps if normed else None, *(tables if at < 2 else (None, None)), grads
            )
    return buffers


def _save(ctx: Any, inputs: tuple[Any, ...], output: Three) -> None:
    first, second, *weights, ctx.eps, cos, sin = inputs
    ctx.rows = [part.shape[1] for part in (first, second) if part is not None]
    parts = (None, None) if ctx.eps is None else (first, second)
    ctx.save_for_backward(*parts, *weights, cos, sin)


def _gradients(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    of_first, of_second = ctx.needs_input_grad[:2]
    *tensors, cos, sin = ctx.saved_tensors
    dfirst, dsecond = torch.ops.inweave.join_projections_backward(
        dq, dk, dv, *tensors, ctx.eps, cos, sin, ctx.rows, of_first, of_second
    )
    return dfirst if of_first else None, dsecond if of_second else None, *[None] * 7


register_operator(
    f"join_projections(Tensor first, Tensor? second, {_WEIGHTS}, {_SETTINGS}) -> (Tensor, Tensor, Tensor)",
    _forward,
    meta.join_projections,
    save=_save,
    gradients=_gradients,
)
register_operator(
    f"join_projections_backward(Tensor dq, Tensor dk, Tensor dv, Tensor? first, Tensor? second, {_WEIGHTS},"
    f" {_SETTINGS}, int[] rows, bool of_first, bool of_second) -> (Tensor, Tensor)",
    _backward,
    meta.join_projections_backward,
)
