"""Which implementation merges: the kernel for the CUDA tensors it supports, the reference for all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from inweave.ops.merge import reference
from inweave.ops.merge.work import Target


class Launch(Protocol):
    """A merge that is ready to run, as often as needed and at any scales."""

    def run(self) -> list[int]: ...

    def rescale(self, scales: np.ndarray) -> None: ...

    def moved(self, old: torch.Tensor, new: torch.Tensor) -> Launch: ...


def prepared(targets: Sequence[Target]) -> Launch:
    """A launch over CUDA targets of one dtype, with its tables on the device."""
    from inweave.ops.merge import triton as kernel

    return kernel.Launch(targets)


def merge_products(targets: Sequence[Target]) -> list[int]:
    """Merge all targets: one launch per (device, base dtype, factor dtype) on CUDA, one addmm each elsewhere.

    Returns the numbers of the targets with results beyond the limit of their dtype.
    """
    plain: list[int] = []
    grouped: dict[tuple[object, ...], list[int]] = {}
    for number, target in enumerate(targets):
        dtypes = {product.up.dtype for product in target.products} | {product.down.dtype for product in target.products}
        if target.base.is_cuda and len(dtypes) <= 1 and _contiguous(target):
            key = (target.base.device, target.base.dtype, next(iter(dtypes), target.base.dtype))
            grouped.setdefault(key, []).append(number)
        else:
            plain.append(number)
    unbounded = [plain[each] for each in reference.merge_products([targets[number] for number in plain])]
    if grouped:
        from inweave.ops.merge import triton as kernel

        for group in grouped.values():
            unbounded += [group[each] for each in kernel.merge_products([targets[number] for number in group])]
    return sorted(unbounded)


def _contiguous(target: Target) -> bool:
    tensors = [target.base, target.out, *(t for p in target.products for t in (p.up, p.down))]
    return all(tensor.is_contiguous() and tensor.dim() == 2 for tensor in tensors)
