"""Fill a model from a source, strictly.

The model may be on the meta device: its tensors are replaced by the source's, in the model's dtype. On a GPU, weights
that receive plain LoRA pairs are read unmerged and merged in place by one launch. Missing tensors, unused tensors and
shape mismatches are collected and raised together. Weights tied in the model stay tied; an adapter on one of them is
refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from typing import get_args

import torch
from torch import nn

from inweave.arguments import expect
from inweave.errors import ConfigError, TargetError
from inweave.ops.tensors.device import choose_device, named_dtype
from inweave.ops.tensors.subclasses import class_of, holds_others
from inweave.weights.construction import Constructed
from inweave.weights.gc_pause import collector_waits
from inweave.weights.hold import Quantized, hold_weights
from inweave.weights.merged import MergedSource
from inweave.weights.networks import Slot
from inweave.weights.networks import slots as network_slots
from inweave.weights.scratch import trim_heap
from inweave.weights.source import WeightSource, streamed


def build(
    model: nn.Module,
    source: WeightSource,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    ignore: Collection[str] = (),
    quantized: Quantized = "off",
    progress: Callable[[int], object] | None = None,
    arrived: Callable[[str], object] | None = None,
    mapped: bool = True,
) -> nn.Module:
    """Give every parameter and persistent buffer of ``model`` its tensor from ``source``.

    On the meta device, tensors that no source has are computed by their constructors (`weights.construction`).

    Args:
        model: Any torch module; it may be on the meta device.
        source: Where the weights come from: a `FileSource`, a `DictSource`, a `MergedSource`.
        device: Where the tensors go.
        dtype: Overrides the model's own dtype for floating-point tensors.
        ignore: Names of tensors of the source that the model may leave unused.
        quantized: "keep" leaves weights of linear layers and convolutions that the source stores quantized like that
            (`weights.hold`); "off" unpacks them.
        progress: Called with the stored bytes of each tensor when it is in place.
        arrived: Called with the name of each tensor when it is in place, on the host. It may replace the tensor, whose
            memory is free then: tensors are read into memory of their own, and never mapped.
        mapped: Whether tensors on the host may be views of mapped files, whose pages are read when they are used. A
            file that is cut meanwhile would end the process then.

    Returns:
        The model itself.

    Raises:
        TargetError: Tensors are missing, unused or of another shape, an adapter changes a tied weight, or a tensor on
            the meta device is in no checkpoint and cannot be computed.
        ConfigError: An argument has a wrong type.
    """
    if not isinstance(model, nn.Module) or not isinstance(source, WeightSource):
        names = f"{type(model).__name__} and {type(source).__name__}"
        raise ConfigError(f"expected a torch module and a weight source such as FileSource, got {names}")
    if not isinstance(ignore, Collection) or isinstance(ignore, str):
        raise ConfigError(f"ignore: expected names of tensors, got {type(ignore).__name__}")
    expect("device", device, torch.device, str)
    expect("dtype", dtype, torch.dtype, str, type(None))
    if quantized not in get_args(Quantized):
        raise ConfigError(f"quantized must be one of {', '.join(get_args(Quantized))}, got {quantized!r}")
    dtype = named_dtype(dtype) if dtype is not None else None
    slots = network_slots(model)
    target = choose_device(device)
    done: dict[int, torch.Tensor] = {}  # those of several names: no other tensor is kept by this function
    places = Counter(id(slot.tensor) for slot in slots.values())
    later: dict[str, torch.Tensor] = {}
    owned = arrived is not None or not mapped
    with torch.no_grad(), collector_waits():
        if quantized == "keep":
            _check(slots, source, ignore)
            constructed = Constructed(model)  # before any layer has another class
            count = None if progress is None else lambda name: progress(stored_bytes(source, name))
            stored = hold_weights(model, source, target, dtype, count)
            slots = {name: slot for name, slot in slots.items() if name not in set(stored)}
            ignore = {*ignore, *stored}
        early = _read_ahead(slots, source, target, dtype, ignore, progress)
        _check(slots, source, ignore)
        if quantized == "off":
            constructed = Constructed(model)
        names = source.names()
        changed = _changed_names(slots, source) if isinstance(source, MergedSource) else {}
        for name, (owner, leaf, old) in slots.items():
            if id(old) in done:
                new = done[id(old)]  # tied: one tensor under two names
            else:
                target_dtype = _target_dtype(old, dtype)
                known = changed.get(id(old)) or (name if name in names else _source_name(name, slots, source))
                if _on_gpu(target) and isinstance(source, MergedSource) and source.deferrable(known, target_dtype):
                    new = later[known] = early[known] if known in early else source.plain(known, device=device)
                elif known in early and not (isinstance(source, MergedSource) and source.changes(known)):
                    new = early[known]
                else:
                    new = source.get(known, dtype=target_dtype, device=device, owned=owned)
                if isinstance(old, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=False)
                if places[id(old)] > 1:
                    done[id(old)] = new
                if progress is not None and known not in early:
                    progress(stored_bytes(source, known))
            if isinstance(new, nn.Parameter):
                owner._parameters[leaf] = new
            else:
                owner._buffers[leaf] = new
            size = new.nbytes
            del new
            if arrived is not None:
                arrived(name)
            if owned:
                trim_heap(size)
        if isinstance(source, MergedSource):
            if later:
                source.weave(later)
            source.release()
        constructed.put(model, target)
        if owned:
            trim_heap()
    return model


def stored_bytes(source: WeightSource, name: str) -> int:
    """Return the number of bytes that a tensor takes in its source."""
    spec = source.spec(name)
    return math.prod(spec.shape) * spec.dtype.itemsize


def _read_ahead(
    slots: dict[str, Slot],
    source: WeightSource,
    device: torch.device,
    dtype: torch.dtype | None,
    ignore: Collection[str],
    progress: Callable[[int], object] | None,
) -> dict[str, torch.Tensor]:
    """Return the tensors that come straight from a file, on the GPU: read in the order of the file, without waiting
    for another thread that resolves the stack; adapters are merged in there.
    """
    early: dict[str, torch.Tensor] = {}
    merged = source if isinstance(source, MergedSource) else None
    base = source if merged is None else merged.base
    settled, in_order = merged is None or merged.settled, hasattr(base, "stream")
    if not _on_gpu(device) or (settled and not in_order):
        return early
    if settled:
        _check(slots, source, ignore)
    names, reads = base.names(), dict[int, tuple[str, torch.dtype]]()
    for name, (_, _, old) in slots.items():
        target = _target_dtype(old, dtype)
        if name not in names or id(old) in reads:
            continue
        if not settled:
            usable = base.spec(name).dtype == target
        else:
            usable = merged is None or not merged.changes(name) or merged.deferrable(name, target)
        if usable:
            reads[id(old)] = name, target
    targets = dict(reads.values())
    for name, tensor in streamed(base, targets, device):
        early[name] = tensor.to(targets[name])
        if progress is not None:
            progress(tensor.nbytes)
        if not settled and merged is not None and merged.settled:
            settled = True
            _check(slots, source, ignore)
            if not in_order:
                break
    return early


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _target_dtype(old: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and old.is_floating_point() else old.dtype


def _source_name(name: str, slots: dict[str, Slot], source: WeightSource) -> str:
    """Return the name itself, or for a tied tensor any of its names that the source has."""
    names = source.names()
    if name in names:
        return name
    return next(other for other, slot in slots.items() if slot[2] is slots[name][2] and other in names)


def _changed_names(slots: dict[str, Slot], source: MergedSource) -> dict[int, str]:
    """Map the id of a tensor with several names to the one that an adapter changes; raise `TargetError` if it is
    tied.
    """
    names: dict[int, list[str]] = {}
    for name, slot in slots.items():
        names.setdefault(id(slot.tensor), []).append(name)
    chosen: dict[int, str] = {}
    for tensor, group in names.items():
        changed = [name for name in group if source.changes(name)] if len(group) > 1 else []
        if not changed:
            continue
        places = {(id(slots[name].module), slots[name].leaf) for name in group}
        if len(places) > 1 or len(changed) > 1:
            others = ", ".join(name for name in group if name != changed[0])
            raise TargetError(
                f"{changed[0]}: tied to {others} in this model, which would change with it; build the model with "
                "a tensor for each, or leave this module out of the adapter"
            )
        chosen[tensor] = changed[0]  # a module under two names
    return chosen


def _check(slots: dict[str, Slot], source: WeightSource, ignore: Collection[str]) -> None:
    names = set(source.names())
    by_tensor: dict[int, list[str]] = {}
    for name, (_, _, tensor) in slots.items():
        by_tensor.setdefault(id(tensor), []).append(name)
    problems = [
        f"missing: {tied[0]} {list(slots[tied[0]][2].shape)}"
        for tied in by_tensor.values()
        if not any(name in names for name in tied)
    ]
    problems += [f"unused: {name}" for name in sorted(names - slots.keys() - set(ignore))]
    problems += [
        f"class: {name} is {class_of(slot.tensor)} in the model; build it first, then quantize or shard it"
        for name, slot in slots.items()
        if holds_others(slot.tensor)
    ]
    for name in slots.keys() & names:
        have, want = source.spec(name).shape, tuple(slots[name][2].shape)
        if have != want:
            problems.append(f"shape: {name} is {list(have)} in the source, {list(want)} in the model")
    if problems:
        listing = "\n  ".join(sorted(problems))
        raise TargetError(f"the source does not fit the model ({len(problems)} problems):\n  {listing}")
