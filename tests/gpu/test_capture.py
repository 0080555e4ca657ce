"""Updates recorded as CUDA graphs train what eager ones do, and resume like them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from tests.gpu.test_training import apart, settings  # noqa: E402

import inweave  # noqa: E402
from inweave.training.capture import StepGraphs  # noqa: E402
from inweave.training.session import prepare  # noqa: E402


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(
    "more",
    [
        {"precision": "fp32"},
        {"precision": "bf16", "gradient_accumulation": 2, "ema_decay": 0.9},
        {"precision": "fp16", "optimizer": "adamw8bit"},
        {"precision": "fp32", "dropout": 0.1},
        {"precision": "fp32", "gradient_checkpointing": "full"},
        {"precision": "fp32", "gradient_checkpointing": "selective", "dropout": 0.1},
        {"precision": "fp32", "train_text_encoders": True},
        {"precision": "fp32", "network": "lokr"},
        {"precision": "fp32", "batch_size": 3},
    ],
    ids=lambda more: "-".join(str(value) for value in more.values()),
)
def test_recorded_updates_train_what_eager_ones_do(more: dict[str, Any], tmp_path: Path, cache: Path) -> None:
    common = {"steps": 12, "learning_rate": 1e-4, **more}
    eager = inweave.train(settings(tmp_path / "eager", cache, graph="off", **common))
    records: list[Any] = []
    recorded = inweave.train(settings(tmp_path / "graph", cache, graph="on", **common), on_record=records.append)
    assert not [record for record in records if record.get("event") == "graph failed"], records
    assert recorded.losses == pytest.approx(eager.losses, rel=5e-3)
    assert apart(eager.path, recorded.path) < 0.03


def test_a_recorded_run_resumes_like_a_straight_one(tmp_path: Path, cache: Path) -> None:
    common = {"precision": "bf16", "graph": "on", "dropout": 0.1, "gradient_accumulation": 2}
    straight = inweave.train(settings(tmp_path / "straight", cache, steps=12, **common))
    inweave.train(settings(tmp_path / "twice", cache, steps=5, **common))
    rest = inweave.train(settings(tmp_path / "twice", cache, steps=12, resume="auto", **common))
    assert rest.losses == pytest.approx(straight.losses[5:], rel=5e-3)
    assert apart(straight.path, rest.path) < 0.03


def test_updates_are_replayed(tmp_path: Path, cache: Path) -> None:
    run, _ = prepare(settings(tmp_path, cache, graph="on", steps=20))
    result = run.train()
    assert result.step == 20 and len(run.step.graphs) >= 2 and run.step.graphs.problem is None


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
