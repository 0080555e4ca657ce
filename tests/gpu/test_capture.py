"""Updates recorded as CUDA graphs have the bits of eager ones, and of a straight run where they are resumed.

All of it with `deterministic`: without it the fastest kernels of attention add gradients in any order.
"""

from __future__ import annotations

import gc
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

import transformers  # noqa: E402
from tests.gpu.test_training import apart, differing, settings  # noqa: E402

import inweave  # noqa: E402
from inweave.ops.attention import select  # noqa: E402
from inweave.training.execution.capture import StepGraphs  # noqa: E402
from inweave.training.session import prepare  # noqa: E402

#: transformers 5.17, older than inweave supports, makes a causal mask for CLIP while a graph is captured and none in
#: eager code, so that attention uses another kernel
same_masks = pytest.mark.skipif(
    tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 18),
    reason=f"transformers {transformers.__version__}: 5.18 or later has the same mask in both",
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def variant_name(more: dict[str, Any]) -> str:
    return "-".join(str(value) for value in more.values())


@pytest.mark.parametrize(
    "more",
    [
        {"precision": "fp32", "batch_size": 3},
        {"precision": "bf16", "gradient_accumulation": 2, "ema_decay": 0.9},
        {"precision": "fp16", "optimizer": "adamw8bit"},
        {"precision": "bf16", "optimizer": "adafactor", "gradient_accumulation": 2, "ema_decay": 0.9},
        {"precision": "fp16", "optimizer": "torch.optim.RAdam", "dropout": 0.1},
        {"precision": "bf16", "dropout": 0.1},
        {"precision": "bf16", "hidden_dropout": 0.1, "rank_dropout": 0.2},
        {"precision": "bf16", "gradient_checkpointing": "full", "dropout": 0.1},
        {"precision": "fp32", "gradient_checkpointing": "selective", "dropout": 0.1},
        pytest.param({"precision": "fp32", "train_text_encoders": True}, marks=same_masks),
        {"precision": "fp32", "network": "lokr"},
    ],
    ids=variant_name,
)
def test_recorded_updates_have_the_bits_of_eager_ones(more: dict[str, Any], tmp_path: Path, cache: Path) -> None:
    common = {"steps": 8, "learning_rate": 1e-4, "deterministic": True, **more}
    eager = inweave.train(settings(tmp_path / "eager", cache, graph="off", **common))
    records: list[Any] = []
    recorded = inweave.train(settings(tmp_path / "graph", cache, graph="on", **common), on_record=records.append)
    assert not [record for record in records if record.get("event") == "graph failed"], records
    assert recorded.losses == eager.losses and not differing(eager.path, recorded.path)


def test_200_recorded_steps_have_the_losses_of_200_eager_ones(tmp_path: Path, cache: Path) -> None:
    common = {"precision": "bf16", "steps": 200, "batch_size": 2, "learning_rate": 1e-3, "dropout": 0.1}
    eager, recorded = (
        inweave.train(settings(tmp_path / graph, cache, graph=graph, deterministic=True, **common))
        for graph in ("off", "on")
    )
    assert len(recorded.losses) == 200 and recorded.losses == eager.losses
    assert not differing(eager.path, recorded.path)


@pytest.mark.parametrize(
    "more",
    [
        {"precision": "bf16", "gradient_accumulation": 2, "dropout": 0.1, "ema_decay": 0.9},
        {"precision": "bf16", "gradient_checkpointing": "full"},
        {"precision": "fp16", "optimizer": "adamw8bit", "ema_decay": 0.9},
        {"precision": "bf16", "optimizer": "adafactor"},
        {"precision": "fp32", "dropout": 0.1},
    ],
    ids=variant_name,
)
def test_a_recorded_run_that_is_resumed_has_the_bits_of_a_straight_one(
    more: dict[str, Any], tmp_path: Path, cache: Path
) -> None:
    common = {"graph": "on", "deterministic": True, **more}
    straight = inweave.train(settings(tmp_path / "straight", cache, steps=12, **common))
    inweave.train(settings(tmp_path / "twice", cache, steps=5, **common))
    rest = inweave.train(settings(tmp_path / "twice", cache, steps=12, resume="auto", **common))
    assert rest.losses == straight.losses[5:] and not differing(straight.path, rest.path)


def test_a_resumed_run_keeps_its_kernels_where_the_machine_has_forgotten_them(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {"precision": "bf16", "graph": "on", "deterministic": True, "batch_size": 1}
    straight = inweave.train(settings(tmp_path / "straight", cache, steps=8, **common))
    run, _ = prepare(settings(tmp_path / "twice", cache, steps=4, **common))
    run.train()
    assert run.step.attention
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr(select, "_chosen", {})
    monkeypatch.setattr(select, "_fastest", lambda *_: pytest.fail("measured a second time"))
    again, _ = prepare(settings(tmp_path / "twice", cache, steps=8, resume="auto", **common))
    rest = again.train()
    assert again.step.attention == run.step.attention
    assert rest.losses == straight.losses[4:] and not differing(straight.path, rest.path)


def test_updates_are_replayed(tmp_path: Path, cache: Path) -> None:
    run, _ = prepare(settings(tmp_path, cache, graph="on", steps=20))
    result = run.train()
    assert result.step == 20 and len(run.step.graphs) >= 2 and run.step.graphs.problem is None


def test_backward_passes_are_replayed_where_the_optimizer_runs_eagerly(tmp_path: Path, cache: Path) -> None:
    run, _ = prepare(settings(tmp_path, cache, optimizer="adafactor", precision="bf16", steps=20, batch_size=24))
    texts: list[Any] = []
    result = run.train(on_record=texts.append)
    assert result.step == 20 and len(run.step.graphs) == 1 and run.step.graphs.problem is None
    assert any("the optimizer runs eagerly" in str(text) for text in texts)


def test_a_run_that_is_long_enough_is_recorded_by_itself(tmp_path: Path, cache: Path) -> None:
    for steps, recorded in ((19, False), (20, True)):
        run, _ = prepare(settings(tmp_path / str(steps), cache, steps=steps, batch_size=24))
        assert len(run.task.order.sizes) == 1 and run.step.graphs.enabled is recorded


@pytest.mark.parametrize("can_split", [True, False])
def test_memory_that_runs_out_while_a_graph_is_recorded(can_split: bool) -> None:
    """Work that can be split is recorded in smaller parts; other work runs eagerly from then on."""
    graphs, total, size = StepGraphs(torch.device("cuda"), enabled=True), torch.zeros((), device="cuda"), 1 << 20

    def work() -> None:
        total.add_(torch.ones(size, dtype=torch.uint8, device="cuda").max())

    graphs.run("all", work, can_split=can_split)
    torch.cuda.synchronize()
    gc.collect()  # what earlier tests left behind would be freed for the allocation that has to fail
    torch.cuda.empty_cache()
    size = 1 << 30
    memory = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 28)) / memory)
    try:
        with pytest.raises(torch.OutOfMemoryError):  # the second one from eager execution, where it does not fit either
            graphs.run("all", work, can_split=can_split)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert graphs.enabled is can_split and (graphs.problem is None) is can_split and len(graphs) == 0
    size = 1 << 20
    for _ in range(3):
        graphs.run("half", work, can_split=can_split)
    assert len(graphs) == can_split and float(total) == 4
    assert torch.rand(3, device="cuda").isfinite().all()  # the generator is not left in the middle of a recording


def test_two_processes_record_what_one_does_with_two_micro_batches(tmp_path: Path, cache: Path) -> None:
    """Both on this GPU, where NCCL refuses to join them and gloo does not; gradients are summed between two graphs."""
    common = {"precision": "fp32", "steps": 8, "graph": "on", "deterministic": True, "learning_rate": 1e-4}
    single = inweave.train(settings(tmp_path / "single", cache, gradient_accumulation=2, **common))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = settings(tmp_path / "both", cache, **common).model_dump(mode="json", exclude_unset=True)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank), str(port), json.dumps(config)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    reports = [json.loads(each.communicate(timeout=240)[0].splitlines()[-1]) for each in started]
    assert [report["graphs"] >= 2 and report["problem"] is None for report in reports] == [True, True], reports
    assert reports[0]["losses"] == pytest.approx(single.losses, rel=1e-5)
    assert apart(single.path, Path(reports[0]["path"])) < 0.02


PROCESS = """
import json, sys, torch, inweave
from inweave.training.distributed.world import World
from inweave.training.session import prepare
rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{sys.argv[2]}", world_size=2, rank=rank)
run, _ = prepare(inweave.TrainConfig.of(**json.loads(sys.argv[3])), World(2, rank, 0))
result = run.train()
graphs = run.step.graphs
print(json.dumps({"losses": result.losses, "path": str(result.path), "graphs": len(graphs), "problem": graphs.problem}))
torch.distributed.destroy_process_group()
"""


def test_work_that_asks_the_device_runs_eagerly_and_says_so() -> None:
    graphs = StepGraphs(torch.device("cuda"), enabled=True)
    total = torch.zeros((), device="cuda")

    def work() -> None:
        total.add_(1)
        total.add_(float(total > 0))

    for _ in range(4):
        graphs.run("work", work)
    assert graphs.problem is not None and not graphs.enabled
    assert float(total) == 8
    assert torch.rand(3, device="cuda").isfinite().all()  # the generator is not left in the middle of a recording
