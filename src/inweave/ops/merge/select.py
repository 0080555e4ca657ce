"""Which implementation merges: the kernel for the CUDA tensors it supports, the reference for all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from inweave.ops.common.select import has_kernels
from inweave.ops.merge import reference
from inweave.ops.merge.reference import WeightUpdate

if TYPE_CHECKING:
    from inweave.ops.merge.triton import PreparedMerge


def prepare_merge(updates: Sequence[WeightUpdate]) -> PreparedMerge:
    """Return a merge of CUDA weights of one dtype that can run many times, with its tables on the device."""
    from inweave.ops.merge import triton as kernel

    return kernel.PreparedMerge(updates)


def merge_products(updates: Sequence[WeightUpdate]) -> list[int]:
    """Merge all updates: one launch per (device, base dtype, factor dtype) on CUDA, one addmm each elsewhere.

    Return the indices of the updates with results beyond the limit of their dtype.
    """
    plain: list[int] = []
    grouped: dict[tuple[object, ...], list[int]] = {}
    for number, update in enumerate(updates):
        dtypes = {factor.dtype for product in update.products for factor in (product.up, product.down)}
        if has_kernels(update.base) and len(dtypes) <= 1 and _contiguous(update):
            key = (update.base.device, update.base.dtype, next(iter(dtypes), update.base.dtype))
            grouped.setdefault(key, []).append(number)
        else:
            plain.append(number)
    unbounded = [plain[each] for each in reference.merge_products([updates[number] for number in plain])]
    for group in grouped.values():
        unbounded += [group[each] for each in prepare_merge([updates[number] for number in group]).run()]
    return sorted(unbounded)


def _contiguous(update: WeightUpdate) -> bool:
    factors = [factor for product in update.products for factor in (product.up, product.down)]
    return all(tensor.is_contiguous() and tensor.dim() == 2 for tensor in (update.base, update.out, *factors))
