"""Blocks streamed to a GPU: the bits of resident ones, eager and recorded, and the memory and speed that it is for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from tests.gpu.test_training import differing, settings  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import inweave  # noqa: E402
from inweave.ops.tensors.graphs import GraphPool  # noqa: E402
from inweave.training.session import prepare  # noqa: E402
from inweave.weights.streaming import activations  # noqa: E402
from inweave.weights.streaming.activations import HostActivations  # noqa: E402
from inweave.weights.streaming.copies import CudaCopies, lock_pages  # noqa: E402
from inweave.weights.streaming.stream import BlockStream, listed_blocks  # noqa: E402

CUDA, WIDTH, DEPTH = torch.device("cuda"), 2048, 8


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(
    "more",
    [
        {"precision": "fp32", "graph": "off"},
        {"precision": "bf16", "graph": "off", "gradient_checkpointing": "full"},
        {"precision": "bf16", "graph": "on"},
        {"precision": "bf16", "graph": "on", "gradient_checkpointing": "full", "gradient_accumulation": 2},
        {"precision": "bf16", "graph": "on", "gradient_checkpointing": "selective", "dropout": 0.1},
        {"precision": "bf16", "graph": "on", "quantize": "int8", "gradient_checkpointing": "full"},
        {"precision": "bf16", "graph": "on", "quantize": "nf4"},
    ],
    ids=lambda more: "-".join(map(str, more.values())),
)
def test_a_streamed_run_has_the_bits_of_a_resident_one(more: dict[str, Any], tmp_path: Path, cache: Path) -> None:
    """With validation and samples between replays, which use the slots for other blocks."""
    common: dict[str, Any] = {
        "steps": 8, "deterministic": True, "compile": "off", "validation_split": 0.1, "validate_every": 3,
        "sample_every": 4, "sample_prompts": ["a cat"], "sample_steps": 2, **more,
    }  # fmt: skip
    resident = inweave.train(settings(tmp_path / "resident", cache, offload="off", **common))
    records: list[Any] = []
    config = settings(tmp_path / "streamed", cache, offload="blocks", **common)
    streamed = inweave.train(config, on_record=records.append)
    failed = [record for record in records if record.get("event") in ("graph failed", "sample failed")]
    assert not failed, failed
    assert streamed.losses == resident.losses and streamed.validation == resident.validation
    assert not differing(resident.path, streamed.path)


@pytest.mark.parametrize(
    "more",
    [
        {"graph": "off", "gradient_checkpointing": "full"},
        {"graph": "on", "gradient_checkpointing": "full", "gradient_accumulation": 2},
        {"graph": "on", "gradient_checkpointing": "full", "offload": "blocks"},
        {"graph": "on", "gradient_checkpointing": "selective", "quantize": "int8", "offload": "blocks"},
    ],
    ids=lambda more: "-".join(map(str, more.values())),
)
def test_inputs_of_blocks_in_host_memory_change_no_bit(
    more: dict[str, Any], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With validation between replays, whose passes begin anew."""
    monkeypatch.setattr(activations, "SMALLEST", 1 << 12)
    common: dict[str, Any] = {
        "steps": 8, "precision": "bf16", "deterministic": True, "compile": "off", "validation_split": 0.1,
        "validate_every": 3, **more,
    }  # fmt: skip
    there = inweave.train(settings(tmp_path / "there", cache, **common))
    records: list[Any] = []
    config = settings(tmp_path / "moved", cache, offload_activations="on", **common)
    moved = inweave.train(config, on_record=records.append)
    assert not [record for record in records if record.get("event") == "graph failed"]
    assert moved.losses == there.losses and moved.validation == there.validation
    assert not differing(there.path, moved.path)


def test_a_recorded_streamed_run_is_replayed(tmp_path: Path, cache: Path) -> None:
    run, _ = prepare(settings(tmp_path, cache, graph="on", steps=20, offload="blocks"))
    result = run.train()
    assert result.step == 20 and len(run.step.graphs) >= 2 and run.step.graphs.problem is None
    task: Any = run.task
    assert task.stream.copied_bytes < 6 * 2 * task.stream.streamed_bytes, "replays copy without Python"


class Wide(nn.Module):
    """Blocks whose copies take about as long as their products."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(depth)
        )
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False) if torch.is_grad_enabled() else x + block(x)
        return x


def wide() -> Wide:
    torch.manual_seed(0)
    network = Wide().to(torch.bfloat16)
    for block in network.blocks:
        block.requires_grad_(False)
    network.scale.data = network.scale.data.to(CUDA)
    return network


def test_slots_are_all_that_is_on_the_device() -> None:
    network = wide()
    before = torch.cuda.memory_allocated()
    stream = BlockStream(network, listed_blocks(network), CUDA)
    stream.start()
    assert stream.slot_bytes * DEPTH == 2 * stream.streamed_bytes
    assert torch.cuda.memory_allocated() - before < 1.1 * stream.slot_bytes
    assert all(memory.host.is_pinned() for memory in stream._memories)
    stream.stop()
    assert all(parameter.device.type == "cpu" for parameter in network.blocks.parameters())


@pytest.mark.parametrize("slots", [2, 3, DEPTH])
def test_replays_after_other_passes_copy_what_they_need(slots: int) -> None:
    """A recorded pass does not trust the slots: passes without gradients run between its replays."""
    reference, network = wide().to(CUDA), wide()
    x = torch.randn(4096, WIDTH, device=CUDA, dtype=torch.bfloat16)
    stream = BlockStream(network, listed_blocks(network), CUDA, slots=slots)
    stream.start()
    network.scale.grad = torch.zeros_like(network.scale)
    loss = torch.zeros((), device=CUDA)

    def work() -> None:
        value = network(x).float().square().mean()
        value.backward()
        loss.copy_(value.detach())

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    expected = reference(x).float().square().mean()
    expected.backward()
    for _ in range(3):
        network.scale.grad.zero_()
        graph.replay()
        with torch.no_grad():
            assert torch.equal(network(x), reference(x))
        assert torch.equal(loss, expected.detach()) and torch.equal(network.scale.grad, reference.scale.grad)  # type: ignore[arg-type]


class LateCopies(CudaCopies):
    """Copies that take long, into device memory that holds NaN from their first possible moment to their end.

    Whatever reads a slot too early, or is overwritten while it is read, or gets memory that a copy still uses, is NaN.
    """

    def send(self, target: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event | None) -> torch.cuda.Event:
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            if target.is_cuda:
                target.fill_(255 if target.dtype == torch.uint8 else float("nan"))
            torch.cuda._sleep(3_000_000)  # 1.5 ms
        return super().send(target, source, None)


class Busy(nn.Module):
    """Blocks that allocate and free memory of the size of their inputs, and work that takes long, or does not."""

    def __init__(self, wait: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.wait = wait
        self.checkpoint: Any = partial(checkpoint, use_reentrant=False)

    def block(self, number: int, x: torch.Tensor) -> torch.Tensor:
        if self.wait:
            torch.cuda._sleep(self.wait)
        garbage = [torch.full_like(x, float("nan")) for _ in range(3)]  # takes whatever memory is free
        del garbage
        return x + torch.tanh(self.blocks[number](x * self.scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(DEPTH):
            x = self.checkpoint(partial(self.block, number), x) if torch.is_grad_enabled() else self.block(number, x)
        return x


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("wait", [0, 6_000_000], ids=["late copies", "late work"])
@pytest.mark.parametrize("what", ["blocks", "inputs", "both"])
def test_no_timing_of_copies_changes_a_result(what: str, wait: int, recorded: bool) -> None:
    """Streams are ordered by events alone: copies far behind the work, and work far behind the copies."""
    torch.manual_seed(0)
    network = Busy(wait).to(CUDA)
    x = torch.randn(4096, WIDTH, device=CUDA)

    def step() -> list[torch.Tensor]:
        network.scale.grad = torch.zeros_like(network.scale)
        loss = network(x * 1).square().mean()
        loss.backward()
        return [loss.detach().clone(), network.scale.grad.clone()]

    expected = step()
    if what != "inputs":
        network.blocks.to("cpu")
        stream = BlockStream(network, list(network.blocks), CUDA, fixed=[network.scale], copies=LateCopies(CUDA))
        stream.start()
    if what != "blocks":
        owner = HostActivations(CUDA, LateCopies(CUDA))
        network.checkpoint = owner.around(network.checkpoint)
        owner.watch(network)
    if not recorded:
        for _ in range(3):
            assert all(torch.equal(*pair) for pair in zip(step(), expected, strict=True))
            with torch.no_grad():
                assert network(x).isfinite().all()
    else:
        pool, results = GraphPool(CUDA), [torch.zeros_like(each) for each in expected]

        def work() -> None:
            for place, value in zip(results, step(), strict=True):
                place.copy_(value)

        pool.run(work)
        graph = pool.record(work)
        for _ in range(3):
            graph.replay()
            assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
            with torch.no_grad():
                assert network(x).isfinite().all()
    if what != "inputs":
        stream.stop()


def test_inputs_of_blocks_leave_the_device() -> None:
    """The peak of a pass has the inputs of a few blocks, not of all."""

    def peak(owner: HostActivations | None) -> int:
        network = Busy(0).to(CUDA)
        if owner is not None:
            network.checkpoint = owner.around(network.checkpoint)
        x = torch.randn(16384, WIDTH, device=CUDA)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        network(x * 1).square().mean().backward()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated()) - before

    size = 16384 * WIDTH * 4
    owner = HostActivations(CUDA)
    assert peak(None) - peak(owner) > (DEPTH - 4) * size
    assert owner.host_bytes == DEPTH * size and all(each.is_pinned() for each in owner._free[size])


def test_a_step_that_fails_while_it_is_recorded_leaves_streams_usable() -> None:
    """Its events must not be waited for: they belong to a recording that is over."""
    network = Busy(0).to(CUDA)
    x = torch.randn(4096, WIDTH, device=CUDA)
    expected = network(x * 1).square().mean()
    expected.backward()
    gradient = network.scale.grad
    network.blocks.to("cpu")
    stream = BlockStream(network, list(network.blocks), CUDA, fixed=[network.scale])
    stream.start()
    owner = HostActivations(CUDA)
    network.checkpoint = owner.around(network.checkpoint)
    owner.watch(network)
    pool = GraphPool(CUDA)

    def broken() -> None:
        float(network(x * 1).square().mean())  # reads a number from the device

    with pytest.raises(Exception, match=r".+"):
        pool.record(broken)
    pool.release()
    network.scale.grad = None
    loss = network(x * 1).square().mean()
    loss.backward()
    assert torch.equal(loss, expected) and torch.equal(network.scale.grad, gradient)  # type: ignore[arg-type]


def test_copies_run_beside_the_work() -> None:
    """A recorded pass takes about the longer of the two, not their sum."""
    network = wide()
    x = torch.randn(16384, WIDTH, device=CUDA, dtype=torch.bfloat16)
    resident = wide().to(CUDA)
    stream = BlockStream(network, listed_blocks(network), CUDA)
    stream.start()

    def seconds(model: nn.Module) -> float:
        with torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                model(x)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                model(x)
        times = []
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return min(times)

    place = torch.empty(stream.streamed_bytes, dtype=torch.uint8)
    unlock = lock_pages(place, CUDA)
    target = torch.empty_like(place, device=CUDA)
    target.copy_(place, non_blocking=True)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    target.copy_(place, non_blocking=True)
    end.record()
    end.synchronize()
    copying, computing, both = start.elapsed_time(end) / 1e3, seconds(resident), seconds(network)
    unlock()
    assert both < 1.25 * max(copying, computing) + 2 / DEPTH * copying
