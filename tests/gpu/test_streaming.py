"""Blocks streamed to a GPU: the bits of resident ones, eager and recorded, and the memory and speed that it is for."""

from __future__ import annotations

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
from inweave.training.session import prepare  # noqa: E402
from inweave.weights.streaming.copies import lock_pages  # noqa: E402
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
