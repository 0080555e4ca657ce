"""`--vram`: the plan is reported, measured, and changes no result that need not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("diffusers")

from inweave.models.embedded import style_folder
from tests.e2e.test_train_command import bits, invoked
from tests.support import sized


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def on_emoji(output: Path, cache: Path, *more: object) -> tuple[object, ...]:
    return (
        "--model", "inweave/emoji", "--dataset", style_folder("pixel"), "--output", output, "--rank", 2, "--seed", 3,
        "--set", "device=cpu", "--set", "lr_scheduler=constant", "--set", "warmup=0", "--set", f"cache_dir={cache}",
        "--set", 'targets=["to_q"]', "--set", "save_dtype=fp32", *more,
    )  # fmt: skip


def needed(output: Path, cache: Path, *more: object) -> dict[str, Any]:
    report = json.loads(invoked(*on_emoji(output, cache, "--steps", 2, "--check", "--json", *more)))
    return dict(report["estimate"]) | {"config": report["config"]}


def journal(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "lora.jsonl").read_text().splitlines()]


def test_a_limit_is_met_with_smaller_batches_and_reported(tmp_path: Path, cache: Path) -> None:
    """Less than batches of two need with everything loaded: the encoders leave and batches of four are cut in two."""
    limit = needed(tmp_path, cache, "-b", 2)["total_bytes"] - 1024
    plan = needed(tmp_path, cache, "-b", 4, "--vram", f"{limit / 2**20:.4f}MiB")
    assert plan["config"]["batch_size"] == 4 and plan["total_bytes"] <= limit
    assert plan["seconds"] > 0 and any("batches of 4 are computed 2 at a time" in reason for reason in plan["choices"])

    sampled = ("--set", "sample_every=2", "--set", "sample_prompts=red apple", "--set", "sample_steps=1")
    planned = tmp_path / "planned"
    report = invoked(*on_emoji(planned, cache, "--steps", 2, "-b", 4, "--vram", f"{limit / 2**20:.4f}MiB", *sampled))
    assert (
        "memory: batches of 4 are computed 2 at a time" in report
        and "GiB of activation memory; the estimate was" in report
    )
    measured = [record for record in journal(planned) if "measured_bytes" in record]
    assert len(measured) == 1 and measured[0]["expected_bytes"] == plan["activation_bytes"]
    assert measured[0]["measured_bytes"] == pytest.approx(plan["activation_bytes"], rel=0.15)
    assert [record["event"] for record in journal(planned) if str(record.get("event")).startswith("sample")] == [
        "sample"
    ]

    if not sized(0, 1):  # what a split changes: tests/unit/training/test_split.py
        return
    unlimited = tmp_path / "unlimited"
    invoked(*on_emoji(unlimited, cache, "--steps", 2, "-b", 4))
    theirs, ours = (load_file(folder / "lora.safetensors") for folder in (unlimited, planned))
    assert theirs.keys() == ours.keys() and any(not torch.equal(ours[name], theirs[name]) for name in ours)
    for name, tensor in theirs.items():  # a limit changes rounding only
        assert torch.allclose(ours[name].float(), tensor.float(), rtol=1e-2, atol=1e-4), name

    # more memory on another day: the run resumes with the plan it started with
    report = invoked(*on_emoji(planned, cache, "--steps", 3, "-b", 4, "--vram", "64GiB", "--resume", "auto"))
    assert "batches stay split into 2 parts" in report
    straight = tmp_path / "straight"
    invoked(*on_emoji(straight, cache, "--steps", 3, "-b", 4, "--vram", f"{limit / 2**20:.4f}MiB"))
    assert bits(planned / "lora.safetensors") == bits(straight / "lora.safetensors")


def test_what_cannot_fit_is_refused_before_anything_is_written(tmp_path: Path, cache: Path) -> None:
    report = invoked(*on_emoji(tmp_path / "out", cache, "--steps", 2, "--vram", "1032MiB"), code=1)
    assert "is not enough" in report and "raise the limit" in report
    assert not (tmp_path / "out").exists()


def test_a_limit_is_refused_where_the_dataset_decides_the_batches(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "set.toml"
    file.write_text(f'[[datasets]]\nbatch_size = 4\n[[datasets.subsets]]\nimage_dir = "{style_folder("pixel")}"\n')
    arguments = [value if value != style_folder("pixel") else file for value in on_emoji(tmp_path / "out", cache)]
    report = invoked(*arguments, "--steps", 2, "--vram", "8GiB", code=2)
    assert "the dataset file sets batch_size 4" in report


def test_the_check_counts_what_the_run_does(tmp_path: Path, cache: Path) -> None:
    """Held-out images are not trained on, several processes share the batches, larger images take more memory."""
    whole = needed(tmp_path, cache, "-b", 2)
    assert whole["steps"] == 2
    epochs = on_emoji(tmp_path, cache, "-b", 2, "--check", "--json", "--set", "epochs=2")
    plain, held_out, shared = (
        json.loads(invoked(*epochs, *more))["dataset"]["total_steps"]
        for more in ((), ("--set", "validation_split=0.5"), ("--gpus", 2))
    )
    assert (plain, held_out, shared) == (24, 12, 12)
    large = needed(tmp_path, cache, "-b", 2, "--set", "resolution=256", "--set", "upscale=true")
    assert large["activation_bytes"] > 3 * whole["activation_bytes"]
    report = invoked(*on_emoji(tmp_path, cache, "--steps", 2, "--check", "--set", "masked_loss=true"), code=2)
    assert "no image has a mask" in report
