"""Attention as one operator, and the mode that replaces torch's own attention with it.

    with MeasuredAttention():            inside, `scaled_dot_product_attention` on a GPU is `attention`
        loss = model(...)

Eager code and `torch.compile` both see the mode; it acts where the model calls attention, so compiled regions contain
the operator itself. Its kernel is chosen when it runs (`select`), never while it is traced. Modes belong to a thread:
code that recomputes in the backward pass must enter the mode again (`training.memory.checkpointing`).

Calls that no measured kernel supports stay torch's: a mask, dropout, grouped heads, head sizes that are not multiples
of 8 or exceed 256; and float32, except for deterministic runs, where its one fast kernel repeats its bits on request.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from inweave.ops.attention import meta
from inweave.ops.attention.kernels import aligned_rows, deterministic_calls, sequence_first, strided_rows
from inweave.ops.attention.select import kernel_for
from inweave.ops.common.operators import register_operator

_MAX_HEAD = 256


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, deterministic: bool) -> tuple[Tensor, Tensor]:
    q, k, v = aligned_rows(q), aligned_rows(k), aligned_rows(v)
    out, lse = kernel_for(q, k, causal, deterministic).forward(q, k, v, causal, scale)
    return sequence_first(out), lse.contiguous()


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, out = sequence_first(grad), sequence_first(out)
    q, k, v = aligned_rows(q), aligned_rows(k), aligned_rows(v)
    kernel = kernel_for(q, k, causal, deterministic)
    with deterministic_calls(deterministic):
        dq, dk, dv = kernel.backward(grad, q, k, v, out, lse, causal, scale)
    return sequence_first(dq), sequence_first(dk), sequence_first(dv)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.causal, ctx.scale, ctx.deterministic = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, _lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    q, k, v, out, lse = ctx.saved_tensors
    settings = (ctx.causal, ctx.scale, ctx.deterministic)
    grad = sequence_first(grad)  # here, as in `attention`: it may be columns of a wider gradient
    return (*torch.ops.inweave.attention_backward(grad, q, k, v, out, lse, *settings), None, None, None)


register_operator(
    "attention(Tensor q, Tensor k, Tensor v, bool causal, float scale, bool deterministic) -> (Tensor, Tensor)",
    _forward,
    meta.attention,
    save=_save,
    gradients=_gradients,
)
register_operator(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool causal, float scale,"
    " bool deterministic) -> (Tensor, Tensor, Tensor)",
    _backward,
    meta.attention_backward,
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, deterministic: bool = False
) -> Tensor:
    """Return softmax(scale * q k^T) v of (batch, heads, sequence, size), by the fastest kernel for the shape.

    ``scale``: 1 / sqrt(size) by default. ``deterministic``: gradients have the same bits every time, at the cost of
    speed: the fastest kernels add partial sums in the order in which they finish.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    # outside of the operator, so that a compiler lets their producers write them in this order
    q, k, v = strided_rows(q), strided_rows(k), strided_rows(v)
    out: Tensor = torch.ops.inweave.attention(q, k, v, causal, scale, deterministic)[0]
    return out


class MeasuredAttention(TorchFunctionMode):
    """A context in which torch's attention is `attention`, for calls that it supports."""

    def __init__(self, *, deterministic: bool = False, device_type: str = "cuda") -> None:
        super().__init__()
        self.deterministic, self.device_type = deterministic, device_type

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if function is functional.scaled_dot_product_attention:
            return self._attention(*args, **options)
        return function(*args, **options)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is None and dropout_p == 0.0 and self._supports(query, key, value):
            return attention(query, key, value, causal=is_causal, scale=scale, deterministic=self.deterministic)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def _supports(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        size = query.shape[-1]
        dtypes = (torch.bfloat16, torch.float16, *((torch.float32,) if self.deterministic else ()))
        return (
            query.device.type == self.device_type
            and query.dim() == key.dim() == value.dim() == 4
            and query.dtype == key.dtype == value.dtype
            and (query.dtype in dtypes or self.device_type == "cpu")
            and key.shape == value.shape
            and query.shape[:2] == key.shape[:2]
            and size == key.shape[-1]
            and size % 8 == 0
            and size <= _MAX_HEAD
        )
