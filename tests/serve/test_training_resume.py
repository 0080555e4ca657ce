"""A train job whose process is killed resumes when it runs again, and ends with the same bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from inweave.serve.engine import training_job as training
from inweave.serve.engine.contract import RunnerSettings, RunRequest
from inweave.serve.jobs.job import Event


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "dataset"
    folder.mkdir()
    for color in ("red", "green"):
        Image.new("RGB", (64, 64), color).save(folder / f"{color}.png")
        (folder / f"{color}.txt").write_text(f"a {color} square")
    return folder


def run_job(dataset: Path, output: Path, emit: Callable[[Event], object], **settings: Any) -> dict[str, bytes]:
    """Run a train job as a model process does; return the bits of its adapter."""
    config = {"name": "t", "steps": 6, "rank": 2, "log_every": 1, "resolution": 64, "batch_size": 1, **settings}
    request = RunRequest(
        "job-1", "train", "inweave/emoji", config, paths={"dataset": str(dataset), "output": str(output)}
    )
    result = training.run_training(request, emit, lambda: False, RunnerSettings(device="cpu"))
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(result["adapter"]).items()}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.parametrize(
    "by_time", [False, pytest.param(True, marks=pytest.mark.full)], ids=["save_every", "checkpoints by time"]
)
def test_a_job_whose_process_is_killed_resumes(
    by_time: bool, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0 if by_time else 1e9)
    settings = {} if by_time else {"save_every": 2}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork has no other threads
    try:
        expected = run_job(dataset, tmp_path / "straight", lambda event: None, **settings)

        def die(event: Event) -> None:
            if event.type == "progress" and event.data["step"] == 5:
                os.kill(os.getpid(), signal.SIGKILL)

        child = os.fork()
        if child == 0:
            run_job(dataset, tmp_path / "killed", die, **settings)
            os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        events: list[Event] = []
        again = run_job(dataset, tmp_path / "killed", events.append, **settings)
    finally:
        torch.set_num_threads(threads)
    assert [event.data["text"] for event in events if event.type == "resumed"] == ["from step 4"]
    assert [event.data["step"] for event in events if event.type == "progress"] == [5, 6]
    assert again == expected and any(any(bits) for bits in expected.values())
    texts = [str(event.data) for event in events]
    assert not any(str(tmp_path) in text for text in texts), "events carry no folder of the machine"
