"""Weights that are tensor subclasses: quantized (torchao, quanto) or sharded (DTensor, by FSDP2's `fully_shard`).

A subclass with a dispatch of its own keeps its numbers in other tensors: writing through it may be lost or refused.
A DTensor is read whole (a collective: all processes take part) and written by each process's part.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from inweave.errors import TargetError


def holds_others(tensor: Tensor) -> bool:
    """Return whether the numbers of a tensor are in other tensors, as those of quantized and sharded weights are."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which each process has a part."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)


def class_of(tensor: Tensor) -> str:
    """Return the class of a tensor as messages name it."""
    return f"{type(tensor).__module__.split('.')[0]}'s {type(tensor).__name__}"


def whole(tensor: Tensor) -> Tensor:
    """Return plain numbers: all parts of a sharded tensor, a quantized one dequantized; any other unchanged.

    Raises:
        TargetError: the class has no way to do so.
    """
    if not holds_others(tensor):
        return tensor
    if is_sharded(tensor):
        return cast("Tensor", cast("Any", tensor).full_tensor())
    try:
        plain = tensor.dequantize()
    except (RuntimeError, TypeError, AttributeError):
        plain = tensor
    if holds_others(plain):
        raise TargetError(f"stored as {class_of(tensor)}, whose numbers cannot be read")
    return plain


def shares(values: Tensor, like: Tensor) -> Tensor:
    """Return values, the same in every process, as sharded as ``like``; unchanged if that is not a DTensor."""
    if not is_sharded(like):
        return values
    from torch.distributed.tensor import DTensor, Replicate  # slow to import, and loaded where a DTensor exists

    mesh, placements = cast("Any", like).device_mesh, cast("Any", like).placements
    everywhere = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return cast("Tensor", everywhere.redistribute(placements=placements))


def sharding_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules to which `fully_shard` was applied."""
    return [m for m in model.modules() if any(kind.__name__ == "FSDPModule" for kind in type(m).__mro__)]


def reshard(model: nn.Module) -> None:
    """Put the parameters of `fully_shard` back into their shards: what is written to gathered ones is lost."""
    for module in sharding_modules(model):
        cast("Any", module).reshard()
