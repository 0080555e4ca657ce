"""Training on a GPU: every kind of adapter, resuming, memory that runs out, and a limit that is planned and held."""

from __future__ import annotations

import json
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

from safetensors.torch import load_file  # noqa: E402

import inweave  # noqa: E402
from inweave.errors import MemoryBudgetError  # noqa: E402
from inweave.training.memory.estimate import CONTEXT  # noqa: E402
from inweave.training.session import check  # noqa: E402

NETWORKS = ("lora", "locon", "dora", "loha", "lokr")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def settings(folder: Path, cache: Path, **more: Any) -> Any:
    usual: dict[str, Any] = {
        "dataset": "inweave/pixel",
        "output": str(folder / "out"),
        "steps": 3,
        "seed": 1,
        "device": "cuda",
        "log_every": 1,
        "cache_dir": str(cache),
        "batch_size": 4,
        "save_dtype": "fp32",
        "lr_scheduler": "constant",
        "warmup": 0,
    }
    return inweave.TrainConfig.of(**{**usual, **more})


def tensors_of(path: Path) -> dict[str, Any]:
    return dict(load_file(path))


def apart(one: Path, two: Path) -> float:
    """The distance of two adapters, in parts of the first one's size."""
    first, second = tensors_of(one), tensors_of(two)
    assert first.keys() == second.keys()
    gap = sum(float((first[key] - second[key]).square().sum()) for key in first)
    return float((gap / sum(float(value.square().sum()) for value in first.values())) ** 0.5)


def differing(one: Path, two: Path) -> list[str]:
    """Tensors of two adapters that have not the same bits."""
    first, second = tensors_of(one), tensors_of(two)
    assert first.keys() == second.keys() and first
    return [name for name in first if not torch.equal(first[name], second[name])]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_trains_in_every_precision(network: str, precision: str, tmp_path: Path, cache: Path) -> None:
    report = inweave.train(
        settings(tmp_path, cache, network=network, precision=precision, steps=12, dropout=0.1, ema_decay=0.9)
    )
    assert report.skipped_steps == 0 and len(report.losses) == 12 and all(loss == loss for loss in report.losses)
    assert all(value.isfinite().all() for value in tensors_of(report.path).values())


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_gpu_trains_what_a_cpu_does(optimizer: str, tmp_path: Path, cache: Path) -> None:
    """Same noise, same batches: float32 on both, so only the order of additions differs."""
    common = {"precision": "fp32", "steps": 4, "optimizer": optimizer, "batch_size": 2, "learning_rate": 1e-4}
    on_gpu = inweave.train(settings(tmp_path / "gpu", cache, **common))
    on_cpu = inweave.train(settings(tmp_path / "cpu", cache, device="cpu", **common))
    assert on_gpu.losses == pytest.approx(on_cpu.losses, rel=2e-3)
    # Adam's first steps go by the sign of a gradient, and a gradient near zero has either
    assert apart(on_cpu.path, on_gpu.path) < 0.02


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradient_checkpointing_changes_nothing_but_memory(mode: str, tmp_path: Path, cache: Path) -> None:
    common = {"precision": "fp32", "steps": 3, "learning_rate": 1e-4}
    plain = inweave.train(settings(tmp_path / "plain", cache, **common))
    again = inweave.train(settings(tmp_path / "again", cache, gradient_checkpointing=mode, **common))
    assert again.losses[0] == pytest.approx(plain.losses[0], rel=1e-5)
    assert again.losses == pytest.approx(
        plain.losses, rel=5e-4
    )  # Adam's first steps go by signs of gradients near zero
    assert apart(plain.path, again.path) < 0.02


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_resumes_where_it_stopped(precision: str, tmp_path: Path, cache: Path) -> None:
    common = {
        "precision": precision,
        "optimizer": "adamw8bit",
        "ema_decay": 0.9,
        "dropout": 0.1,
        "gradient_accumulation": 2,
        "deterministic": True,
    }
    straight = inweave.train(settings(tmp_path / "straight", cache, steps=6, **common))
    first = inweave.train(settings(tmp_path / "twice", cache, steps=3, **common))
    rest = inweave.train(settings(tmp_path / "twice", cache, steps=6, resume="auto", **common))
    assert (first.step, rest.step, len(rest.losses)) == (3, 6, 3)
    assert rest.losses == straight.losses[3:] and not differing(straight.path, rest.path)


def test_text_encoders_are_trained_too(tmp_path: Path, cache: Path) -> None:
    report = inweave.train(
        settings(tmp_path, cache, train_text_encoders=True, precision="bf16", validation_split=0.2, steps=4)
    )
    assert len(report.validation) >= 1 and any(key.startswith("lora_te") for key in tensors_of(report.path))


def in_subprocess(config: Any, share: float = 1.0) -> dict[str, Any]:
    """The run in a process of its own, where nothing else was ever allocated; ``share``: of the GPU it may take."""
    script = (
        "import json, sys, torch, inweave\n"
        f"torch.cuda.set_per_process_memory_fraction({share})\n"
        "records = []\n"
        "done = inweave.train(inweave.TrainConfig.of(**json.loads(sys.argv[1])), on_record=records.append)\n"
        "peak, free = torch.cuda.max_memory_reserved(), torch.cuda.mem_get_info()[0]\n"
        "torch.empty(free // 2, dtype=torch.uint8, device='cuda') if sys.argv[2] == 'lifted' else None\n"
        "print(json.dumps({'path': str(done.path), 'losses': done.losses, 'records': records, 'peak': peak}))\n"
    )
    lifted = "lifted" if config.vram else ""
    fields = config.model_dump(mode="json", exclude_unset=True)
    result = subprocess.run(
        [sys.executable, "-c", script, json.dumps(fields), lifted], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return dict(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize(("graph", "steps"), [("off", 2), ("on", 6)])
def test_a_batch_that_does_not_fit_is_split_into_micro_batches(
    graph: str, steps: int, tmp_path: Path, cache: Path
) -> None:
    """A real shortage: a part of what the batch as a whole needs."""
    common = {"precision": "fp32", "batch_size": 16, "steps": steps, "graph": graph, "learning_rate": 1e-4}
    whole = in_subprocess(settings(tmp_path / "whole", cache, **common))
    share = 0.6 * whole["peak"] / torch.cuda.get_device_properties(0).total_memory
    cut = in_subprocess(settings(tmp_path / "cut", cache, **common), share)
    assert any(
        "out of memory; from now on micro-batches are split into" in str(record.get("text"))
        for record in cut["records"]
    )
    events = {str(record.get("event")) for record in cut["records"]}
    assert ("graph" in events) == (graph == "on") and "graph failed" not in events, "the parts are recorded"
    assert cut["losses"] == pytest.approx(whole["losses"], rel=1e-3)
    assert apart(Path(whole["path"]), Path(cut["path"])) < 0.02


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_memory_limit_is_planned_enforced_measured_and_removed(precision: str, tmp_path: Path, cache: Path) -> None:
    _, _, needs = check(settings(tmp_path, cache, batch_size=4, precision=precision))
    limit = needs["total_bytes"] - 1024
    config = settings(
        tmp_path, cache, precision=precision, vram=f"{limit / 2**20:.4f}MiB", batch_size=8, sample_every=2,
        sample_prompts=["cat face"],
    )  # fmt: skip
    report = in_subprocess(config)
    records = report["records"]
    assert len(report["losses"]) == 3 and all(loss == loss for loss in report["losses"])
    changes = ("batches of 8 are computed", "gradient_checkpointing")  # whichever is faster here
    assert any(change in str(record.get("text")) for record in records for change in changes)
    measured = next(record for record in records if "measured_bytes" in record)
    assert measured["measured_bytes"] == pytest.approx(measured["expected_bytes"], rel=0.15)
    assert report["peak"] <= limit - CONTEXT
    assert [record["event"] for record in records if str(record.get("event")).startswith("sample")] == ["sample"], (
        records
    )


def test_out_of_memory_is_explained(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(MemoryBudgetError, match="is not enough"):
        inweave.train(settings(tmp_path, cache, vram="1032MiB"))


def test_a_language_model_is_trained(tmp_path: Path) -> None:
    from tests.unit.training.tasks.test_language import SONG, write_language_model

    folder = write_language_model("llama", tmp_path / "llama")
    (tmp_path / "song.txt").write_text("\n".join(SONG))
    for precision in ("bf16", "fp16"):
        report = inweave.train(
            inweave.TrainConfig.of(
                model=str(folder), dataset=str(tmp_path / "song.txt"), output=str(tmp_path / precision), steps=8,
                batch_size=2, device="cuda", precision=precision, learning_rate=1e-2, lr_scheduler="constant", warmup=0,
                seed=2, vram="2GiB",
            )
        )  # fmt: skip
        assert report.skipped_steps == 0 and report.losses[-1] < report.losses[0]
