"""One scratch buffer serves every tensor of a merge, so no allocator is left holding what was freed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inweave.formats.read import read
from inweave.targets.index import ModelIndex, component_from_names
from inweave.targets.resolve import resolve
from inweave.weights import scratch as scratch_module
from inweave.weights.build import build
from inweave.weights.merged import MergedSource
from inweave.weights.scratch import MAP_FROM, Scratch, host_buffer
from inweave.weights.source import FileSource
from inweave.weights.weaver import Weaver
from tests.support import random

LAYERS, OUT, IN, RANK = 5, 1024, 1280, 4
SMALL = 64 * 1024


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for number in range(LAYERS):
            self.add_module(f"layer{number}", nn.Linear(IN, OUT, bias=False, dtype=dtype))


class Allocations(TorchDispatchMode):
    """The sizes of all storages that operations allocate: outputs that share no storage with an input."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and _storage(tensor) not in inputs:
                self.sizes.append(tensor.untyped_storage().nbytes())
        return out


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def source_of(folder: Path, dtype: torch.dtype) -> MergedSource:
    """A file of equal layers with a LoRA of two entries on each."""
    torch.manual_seed(0)
    weights = {f"layer{i}.weight": torch.randn(OUT, IN).to(dtype) for i in range(LAYERS)}
    save_file(weights, folder / "base.safetensors")
    index = ModelIndex({"unet": component_from_names("unet", {n: tuple(w.shape) for n, w in weights.items()})})
    plans = []
    for seed in (0, 50):
        factors = {}
        for i in range(LAYERS):
            factors[f"unet.layer{i}.lora_down.weight"] = random(seed + i, RANK, IN)
            factors[f"unet.layer{i}.lora_up.weight"] = random(seed + i, OUT, RANK)
        plans.append(resolve(read(factors), index))
    return MergedSource(FileSource(folder / "base.safetensors"), [(plan, 0.5) for plan in plans])


@pytest.mark.parametrize(
    ("stored", "dtype", "results"),
    [
        (torch.bfloat16, torch.bfloat16, 0),  # the memory the file was read into is the result
        (torch.float32, torch.float32, 0),
        (torch.float32, torch.float16, LAYERS),  # rounded into memory of its own
        (torch.float16, torch.float32, LAYERS),
    ],
)
def test_merging_allocates_results_and_one_scratch_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, dtype: torch.dtype, results: int
) -> None:
    buffers: list[int] = []

    def amount(size: int) -> torch.Tensor:
        buffers.append(size)
        return host_buffer(size)

    source = source_of(tmp_path, stored)
    with torch.device("meta"):
        net = Net(dtype)
    monkeypatch.setattr(scratch_module, "host_buffer", amount)
    with Allocations() as allocations:
        build(net, source)
    reads = OUT * IN * stored.itemsize  # of which those below MAP_FROM come from torch
    large = [size for size in allocations.sizes if size > SMALL and size != buffers[0]]
    unmapped = LAYERS if reads < MAP_FROM else 0
    assert sorted(large) == sorted([reads] * unmapped + [OUT * IN * dtype.itemsize] * results)
    factors = 2 * RANK * (OUT + IN) * 4
    total = 0 if torch.float32 in (stored, dtype) else OUT * IN * 4
    assert buffers == [total + factors]


def test_a_model_of_another_precision_is_woven_through_one_scratch(tmp_path: Path) -> None:
    source = source_of(tmp_path, torch.bfloat16)
    net = Net(torch.bfloat16)
    weaver = Weaver(net, keep="device")
    stack = [(plan, 0.5) for plan in source._plans]
    weaver.apply(stack)
    weaver.apply([])  # originals are saved by now
    with Allocations() as allocations:
        weaver.apply(stack)
    assert not [size for size in allocations.sizes if size > SMALL]


def test_a_scratch_grows_is_reused_and_released() -> None:
    scratch, cpu = Scratch(), torch.device("cpu")
    scratch.reset(cpu, 2 * MAP_FROM)
    first = scratch.take((3, 5), torch.float32, cpu)
    second = scratch.take((7,), torch.float64, cpu)
    assert first.is_contiguous()
    assert second.data_ptr() - first.data_ptr() == 64
    assert second.data_ptr() % 64 == 0
    scratch.reset(cpu, MAP_FROM)
    assert scratch.take((3, 5), torch.float32, cpu).data_ptr() == first.data_ptr()
    assert scratch.nbytes == 2 * MAP_FROM
    scratch.release()
    assert scratch.nbytes == 0
    first.fill_(1.0)  # what is still referred to stays valid


def test_large_host_buffers_are_maps_of_their_own() -> None:
    buffer = host_buffer(MAP_FROM)
    assert buffer.numel() == MAP_FROM
    assert not buffer.any()
    buffer.fill_(7)
    assert buffer.data_ptr() % 4096 == 0
