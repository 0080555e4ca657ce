"""Operations of a piece of work, counted from shapes, on the meta device or for real.

    product (m, k) (k, n)            2 m k n
    convolution                      2 (places of the output) (elements of the weight), per image
    attention q (s, d), k, v (t, e)  2 s t (d + e), per head

A transposed convolution applies its weight at the places of its input. Everything else is cheap beside them. The
formulas are those of `torch.utils.flop_counter`, whose import loads Triton's compiler: 70 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten


class WorkCounter(TorchDispatchMode):
    """Counts additions and multiplications, operations that make a tensor (not views), and attention scores."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self.launches = 0
        self.scores: set[int] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        formula = _FORMULAS.get(operation.overloadpacket)
        if formula is not None:
            self.operations += formula(result, *args)
        if operation is _aten._scaled_dot_product_flash_attention.default:
            query, key, *_ = args
            self.scores.add(query.shape[:3].numel() * key.shape[2])
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        outputs = (t for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        self.launches += any(tensor.untyped_storage()._cdata not in known for tensor in outputs)
        return result


def _product(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *_: Any) -> int:
    return 2 * x.numel() * y.shape[-1]


def _added_product(out: torch.Tensor, addend: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *_: Any) -> int:
    return _product(out, x, y)


def _convolution(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, *_: Any,
) -> int:  # fmt: skip
    return 2 * len(x) * prod((x if transposed else out).shape[2:]) * weight.numel()


def _attention(out: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> int:
    return 2 * query.shape[:3].numel() * key.shape[2] * (query.shape[3] + value.shape[3])


_FORMULAS: Mapping[Any, Callable[..., int]] = {
    **dict.fromkeys((_aten.mm, _aten.bmm, _aten._scaled_mm), _product),
    **dict.fromkeys((_aten.addmm, _aten.baddbmm), _added_product),
    _aten.convolution: _convolution,
    **dict.fromkeys(
        (
            _aten._scaled_dot_product_flash_attention,
            _aten._scaled_dot_product_efficient_attention,
            _aten._scaled_dot_product_cudnn_attention,
        ),
        _attention,
    ),
}
