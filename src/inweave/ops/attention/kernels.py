"""The attention kernels of libraries, with one signature; formulas and shapes are in `reference`.

All inputs and results of a kernel have the memory layout (batch, sequence, heads, size): cuDNN's backward pass reads
out of bounds if the gradient of the output has this layout and the queries do not. It is also the layout of the layers
around attention, so a copy is rare. Queries, keys and values may be columns of a wider matrix, the result of one
product.

Deterministic backward passes are a property of the call: the libraries read torch's global switch when they are called,
so it is set only during the call. Flash and the efficient kernel respect it; cuDNN has a separate backward pass
(`fixed_order`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils.deterministic
from torch import Tensor

from inweave.ops.attention import reference
from inweave.ops.attention.fixed_order import fixed_order_backward

_ATEN = torch.ops.aten
_PADDED_ROWS = 32  # the efficient kernel's statistics have a multiple of this many rows

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


class Kernel(NamedTuple):
    """``forward(q, k, v, causal, scale) -> out, lse``; ``backward(g, q, k, v, out, lse, causal, scale) -> dq, dk, dv``.

    ``repeats_only``: only for deterministic runs, because a call takes longer on the host.
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool, float], Pair]
    backward: Callable[..., Triple]
    repeats_only: bool = False


def sequence_first(tensor: Tensor) -> Tensor:
    """Return (batch, heads, sequence, size) with the memory of a contiguous (batch, sequence, heads, size)."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def strided_rows(tensor: Tensor) -> Tensor:
    """Return the same layout, but rows of a sequence may be further apart: columns of a wider matrix are not copied."""
    _, heads, _, size = tensor.shape
    batch_stride, head_stride, row_stride, stride = tensor.stride()
    columns = stride == 1 and head_stride == size and row_stride >= heads * size and row_stride % 8 == 0
    whole = tensor.shape[0] == 1 or batch_stride == tensor.shape[2] * row_stride
    return tensor if columns and whole else sequence_first(tensor)


def aligned_rows(tensor: Tensor) -> Tensor:
    """Return the same layout at an address that is aligned to 16 bytes."""
    return strided_rows(tensor if tensor.data_ptr() % 16 == 0 else tensor.clone())


def _no_random(tensor: Tensor) -> Tensor:
    """Return a placeholder for a generator's state, which only dropout reads: uninitialized, so without a launch."""
    return torch.empty((), dtype=torch.int64, device=tensor.device)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Pair:
    out, lse, *_ = _ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.squeeze(-1)


def _cudnn_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Triple:
    none = _no_random(q)
    rows, keys = q.shape[2], k.shape[2]
    grads: Triple = _ATEN._scaled_dot_product_cudnn_attention_backward(
        g, q, k, v, out, lse.unsqueeze(-1), none, none, None, None, None, rows, keys, 0.0, causal, scale=scale
    )
    return grads


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Pair:
    out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _flash_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Triple:
    none = _no_random(q)
    grads: Triple = _ATEN._scaled_dot_product_flash_attention_backward(
        g, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, none, none, scale=scale
    )
    return grads


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Pair:
    out, lse, *_ = _ATEN._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[:, :, : q.shape[2]]


def _efficient_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Triple:
    none, missing = _no_random(q), -q.shape[2] % _PADDED_ROWS
    padded = torch.nn.functional.pad(lse, (0, missing), value=float("inf")) if missing else lse
    dq, dk, dv, _ = _ATEN._scaled_dot_product_efficient_attention_backward(
        g, q, k, v, None, out, padded, none, none, 0.0, [True, True, True, False], causal, scale=scale
    )
    return dq, dk, dv


#: by name; of equally fast kernels the first is used
KERNELS = {
    "cudnn": Kernel(_cudnn_forward, _cudnn_backward),
    "flash": Kernel(_flash_forward, _flash_backward),
    "efficient": Kernel(_efficient_forward, _efficient_backward),
    "cudnn-fixed-order": Kernel(_cudnn_forward, fixed_order_backward, repeats_only=True),
}
#: the formula in plain torch: for other devices, and to compare the kernels with
PLAIN = Kernel(reference.forward, reference.backward)
#: every kernel that can be selected
ALL = {**KERNELS, "plain": PLAIN}


@contextmanager
def deterministic_calls(on: bool) -> Iterator[None]:
    """Make the kernels called in the block repeat their bits, if ``on``."""
    if not on:
        yield
        return
    switch: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill, switch.fill_uninitialized_memory = switch.fill_uninitialized_memory, False  # results are fully written
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        switch.fill_uninitialized_memory = fill
