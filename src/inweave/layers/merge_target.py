"""The tensor that a merge writes: a layer's weight, or what accelerate's offloading keeps in its place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from inweave.errors import TargetError
from inweave.ops.kinds import LayerKind
from inweave.ops.kinds.offloaded import ON_DISK, in_memory, weight_maps
from inweave.ops.tensors.subclasses import class_of, holds_others, is_sharded


def merge_target(
    holders: Sequence[nn.Module], label: str, kind: LayerKind, shape: tuple[int, tuple[int, ...]], *, tied: bool
) -> torch.Tensor | None:
    """Return the tensor, or None if no hook of the ``holders`` (a layer and its base) keeps that of a meta weight.

    Raises:
        TargetError: the weight's class, place or shape does not let a merge write it; ``shape``: (out, into).
    """
    weight = holders[0].weight
    assert isinstance(weight, torch.Tensor)
    if holds_others(weight) and not is_sharded(weight):
        raise TargetError(
            f"{label}: its weight is stored as {class_of(weight)}, into which no adapter can be merged; "
            "leave the adapter unmerged, or merge it into the unquantized model and quantize that"
        )
    if is_sharded(weight) and tied:
        raise TargetError(f"{label}: its weight is tied and sharded; merge first, then fully_shard")
    if kind.shape(weight) != shape:
        raise TargetError(
            f"{label}: its weight has the shape {list(weight.shape)} now: packed, or a part of it as FSDP shows it; "
            "merge before the weight is converted"
        )
    if not weight.is_meta:
        return weight.detach()
    for each in holders:
        for weights, key in weight_maps(each, "weight"):
            if (stored := in_memory(weights, key)) is None:
                raise TargetError(f"{label}: its weight is {ON_DISK}")
            if tied:
                raise TargetError(f"{label}: its weight is tied and offloaded; merge first, then offload")
            return stored
    return None
