"""Shapes of the results of the operators on joined heads, for tracing and for the meta device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

Three = tuple[Tensor, Tensor, Tensor]


def join_heads(first: Tensor, second: Tensor | None, *rest: Any) -> Tensor:
    """Allocate the joined sequence (batch, rows of all parts, heads, size)."""
    batch, rows, heads, size = first.shape
    return first.new_empty((batch, rows + (0 if second is None else second.shape[1]), heads, size))


def join_heads_backward(dy: Tensor, first: Tensor, second: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    """Allocate the gradients of both parts; a gradient that is not requested is empty."""
    of_first, of_second = rest[-2:]
    return (
        dy.new_empty(first.shape if of_first else (0,)),
        dy.new_empty(second.shape if second is not None and of_second else (0,)),
    )


def join_projections(first: Tensor, second: Tensor | None, *rest: Any) -> Three:
    """Allocate queries, keys and values (batch, rows of all parts, heads, size)."""
    batch, rows, _, heads, size = first.shape
    shape = (batch, rows + (0 if second is None else second.shape[1]), heads, size)
    return first.new_empty(shape), first.new_empty(shape), first.new_empty(shape)


def join_projections_backward(dq: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Allocate the gradients of both parts (batch, rows, 3, heads, size); one that is not requested is empty."""
    rows, *needed = rest[-3:]
    batch, _, heads, size = dq.shape
    dfirst, dsecond = (
        dq.new_empty((batch, count, 3, heads, size) if of_part and count is not None else (0,))
        for count, of_part in zip((*rows, None)[:2], needed, strict=True)
    )
    return dfirst, dsecond
