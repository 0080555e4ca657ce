"""Swaps by compiled programs, with the reference merge in place of the kernel: results, and what a swap costs the host.

The calls of a swap are counted, so that the figure is the same on every machine: none per tensor that did not change.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import inweave
from inweave.errors import MergeStateError, TargetError
from inweave.ops.merge import reference
from inweave.ops.merge.reference import Product, WeightUpdate
from inweave.weights import factors, program, weaver, writer
from inweave.weights.source import DictSource
from tests.support import random, write

CPU = torch.device("cpu")


class ReferenceMerge:
    """What `PreparedMerge` does, without a GPU; like a kernel, it leaves no version."""

    def __init__(self, updates: Sequence[WeightUpdate]) -> None:
        self._updates = list(updates)

    def rescale(self, scales: np.ndarray) -> None:
        numbers = iter(scales)
        self._updates = [
            WeightUpdate(u.base, u.out, tuple(Product(p.up, p.down, float(next(numbers))) for p in u.products))
            for u in self._updates
        ]

    def moved(self, old: torch.Tensor, new: torch.Tensor) -> ReferenceMerge:
        def there(factor: torch.Tensor) -> torch.Tensor:
            return new.as_strided(factor.shape, factor.stride(), factor.storage_offset() - old.storage_offset())

        return ReferenceMerge([
            WeightUpdate(u.base, u.out, tuple(Product(there(p.up), there(p.down), p.scale) for p in u.products))
            for u in self._updates
        ])  # fmt: skip

    def start(self) -> None:
        outs = [update.out.clone() for update in self._updates]
        pairs = zip(self._updates, outs, strict=True)
        self._flags = reference.merge_products([WeightUpdate(u.base, out, u.products) for u, out in pairs])
        for update, out in zip(self._updates, outs, strict=True):
            update.out.detach().view(torch.uint8).numpy()[:] = out.view(torch.uint8).numpy()

    def finish(self) -> list[int]:
        return self._flags


class Ring:
    """Reads spans of a file into memory."""

    def send_file(self, file: BinaryIO, offset: int, length: int) -> torch.Tensor:
        file.seek(offset)
        return torch.frombuffer(bytearray(file.read(length)), dtype=torch.uint8)


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weaver, "cuda_device", lambda tensors: CPU)
    monkeypatch.setattr(writer, "_kernel_takes", lambda tensor, items: all(map(is_product, items)))
    monkeypatch.setattr(program, "prepare_merge", ReferenceMerge)
    monkeypatch.setattr(factors, "ring_for", lambda device: Ring())


def is_product(item: Any) -> bool:
    from inweave.weights.merge import is_product

    return is_product(item.placement)


class Net(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 6) for _ in range(count))
        self.other = nn.Linear(4, 6)


def lora(folder: Path, count: int, seed: int, other: bool = False) -> Path:
    names = [f"blocks.{number}" for number in range(count)] + ["other"] * other
    tensors = {}
    for number, name in enumerate(names):
        tensors[f"unet.{name}.lora_down.weight"] = random(seed + number, 2, 4)
        tensors[f"unet.{name}.lora_up.weight"] = random(seed + 99 + number, 6, 2)
    return write(folder / f"l{seed}.safetensors", tensors)


def state(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


launch = {ReferenceMerge.start.__code__, ReferenceMerge.rescale.__code__}


def calls_of(work: Callable[[], object]) -> int:
    """Return how many functions work calls, those written in C included."""
    count, inside = 0, 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count, inside
        if frame.f_code in launch:  # the merge itself does not count
            inside += (event == "call") - (event == "return")
        count += event in ("call", "c_call") and not inside

    gc.collect()  # its callbacks do not count
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_every_swap_equals_a_merged_source_and_the_base_comes_back(tmp_path: Path) -> None:
    net = Net(3)
    base = state(net)
    files = [lora(tmp_path, 3, seed) for seed in (1, 200, 400)] + [lora(tmp_path, 2, 600, other=True)]
    live = inweave.Weaver(net)
    one, two, three, four = files
    stacks: list[list[tuple[Path, float]]] = [
        [(one, 1.0)], [(two, 1.0)], [(two, 0.5)], [(four, 0.5)], [], [(three, 1.0)], [(one, 0.5), (four, 1.0)],
        [(two, 0.2), (three, -1.0)], [(one, 0.5), (four, 1.0)], [], [(four, 1.0)], [(one, 1.0)], [], [(two, 2.0)],
    ]  # fmt: skip
    for stack in stacks:
        written = live.apply(stack)
        source = inweave.MergedSource(DictSource(base), stack)
        for name, value in net.state_dict().items():
            torch.testing.assert_close(value, source.get(name), rtol=1e-6, atol=1e-6)
            if not stack or not source.changes(name):
                assert torch.equal(value, base[name])
        assert live.woven == bool(stack) and bool(written) and live.apply(stack) == 0
    assert len(live._programs) >= 6


def test_changes_from_outside_are_noticed_between_swaps(tmp_path: Path) -> None:
    net = Net(3)
    base = state(net)
    files = [lora(tmp_path, 3, seed) for seed in (1, 200)]
    live = inweave.Weaver(net)
    for file in (*files, *files):
        live.apply([(file, 1.0)])
    with torch.no_grad():
        net.blocks[1].weight.add_(1)  # type: ignore[union-attr, operator]
    for stack in ([(files[0], 1.0)], [(files[1], 1.0)], []):
        with pytest.raises(MergeStateError, match=r"blocks\.1\.weight: modified outside"):
            live.apply(stack)
    assert live.restore() == 3
    assert all(torch.equal(value, base[name]) for name, value in net.state_dict().items())
    live.apply([(files[0], 1.0)])
    live.apply([])
    with torch.no_grad():
        net.blocks[1].weight.add_(1)  # type: ignore[union-attr, operator]
    changed = state(net)
    for file in files:
        live.apply([(file, 1.0)])
    live.apply([])
    assert all(torch.equal(value, changed[name]) for name, value in net.state_dict().items())
    with torch.no_grad():
        net.blocks[2].weight.add_(1)  # type: ignore[union-attr, operator]
    changed = state(net)
    assert live.restore() == 0  # nothing is merged in
    live.apply([(files[1], 1.0)])
    live.apply([])
    assert all(torch.equal(value, changed[name]) for name, value in net.state_dict().items())


def test_an_overflow_puts_the_stack_before_back(tmp_path: Path) -> None:
    net = Net(3).half()
    base = state(net)
    files = [lora(tmp_path, 3, seed) for seed in (1, 200)]
    live = inweave.Weaver(net)
    live.apply([(files[0], 1.0)])
    before = state(net)
    for stack in ([(files[1], 1e12)], [(files[0], 1e12)], [(files[0], 1.0), (files[1], 1e12)]):
        with pytest.raises(TargetError, match=r"would overflow F16"):
            live.apply(stack)
        for name, value in net.state_dict().items():
            torch.testing.assert_close(value, before[name])
    live.apply([])
    assert all(torch.equal(value, base[name]) for name, value in net.state_dict().items())


def swap_costs(folder: Path, count: int) -> dict[str, int]:
    """Return the calls of every kind of swap in a model of some layers, all of which were made before."""
    files = [lora(folder, count, seed) for seed in (1, 200, 400)]
    live = inweave.Weaver(Net(count))
    one, two, _ = ([(file, 1.0)] for file in files)
    many, again = ([(file, strength) for file in files] for strength in (0.1, 0.2))
    for stack in (one, two, [], many, [], one, two, [], one):
        live.apply(stack)
    steps = {
        "another": two, "a strength": [(files[1], 0.5)], "the base": [], "from the base": one, "none": [],
        "a stack": again,
    }  # fmt: skip
    return {name: calls_of(partial(live.apply, stack)) for name, stack in steps.items()}


def test_a_swap_costs_the_host_nothing_per_tensor(tmp_path: Path) -> None:
    for _ in range(3):  # in a large process a collection of garbage may add calls to one of them
        few, many = (swap_costs(tmp_path, count) for count in (20, 60))
        if few == many:
            break
    assert few == many and max(many.values()) < 600, (few, many)


def build_cost(folder: Path, count: int) -> int:
    """Return the calls of merging two adapters into a base while it is read."""
    net = Net(count)
    base = DictSource({name: value.detach() for name, value in net.state_dict().items()})
    index = inweave.index_of({"unet": net})
    plans = [inweave.resolve(inweave.load(lora(folder, count, seed)), index) for seed in (1, 200)]
    source = inweave.MergedSource(base, [(plan, 1.0) for plan in plans], component="unet")
    return calls_of(lambda: [source.get(name) for name in source.names()])


def test_merging_while_reading_costs_the_host_the_same_for_every_tensor(tmp_path: Path) -> None:
    few, many = build_cost(tmp_path, 20), build_cost(tmp_path, 80)
    assert many < 4.2 * few, (few, many)


def test_other_models_in_the_process_cost_a_swap_nothing(tmp_path: Path) -> None:
    expected = swap_costs(tmp_path, 20)
    others = [inweave.Weaver(Net(2)) for _ in range(30)]
    file = lora(tmp_path, 2, 600)
    for other in others:
        other.apply([(file, 1.0)])
        other.apply([])
    for _ in range(3):  # in a large process a collection of garbage may add calls to one of them
        with_others = swap_costs(tmp_path, 20)
        if with_others == expected:
            break
    assert with_others == expected


def test_a_file_rewritten_in_place_with_its_size_and_time_is_read_again(tmp_path: Path) -> None:
    import os

    net = Net(2)
    file, other = lora(tmp_path, 2, 1), lora(tmp_path, 2, 200)
    live = inweave.Weaver(net)
    live.apply([(file, 1.0)])
    status = file.stat()
    with file.open("r+b") as target:
        target.write(other.read_bytes())
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size and file.stat().st_mtime_ns == status.st_mtime_ns
    live.apply([(file, 1.0)])
    got = state(net)
    live.apply([(other, 1.0)])
    assert all(torch.equal(value, got[name]) for name, value in net.state_dict().items())
