"""TensorBoard and Weights & Biases get the numbers and the sample images of a run, as their own libraries read them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    IMAGES,
    EventAccumulator,
)

from inweave.errors import ConfigError
from inweave.training.output.log import TrainLog
from inweave.training.output.samples import SampleImage
from inweave.training.output.trackers import WandbRun, require_tracker, wandb_run
from tests.unit.training.tiny import config, log, tiny


def sampler(folder: Path) -> Any:
    """Two images at every step, of a color that tells the step."""

    def sample(step: int) -> list[SampleImage]:
        images = []
        for number in range(2):
            path = folder / f"t-{step:06d}-{number}.png"
            Image.new("RGB", (8, 6), (step * 20, number * 90, 7)).save(path)
            images.append(SampleImage(path))
        return images

    return sample


def test_tensorboard_shows_the_samples(tmp_path: Path) -> None:
    run = tiny(tmp_path, steps=4, tensorboard=True, sample_every=2)
    run.train(sample=sampler(tmp_path))
    events = EventAccumulator(str(tmp_path / "t-tensorboard"), size_guidance={IMAGES: 0}).Reload()
    assert sorted(events.Tags()["images"]) == ["sample/0", "sample/1"]
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]
    for number in range(2):
        images = events.Images(f"sample/{number}")
        assert [(image.step, image.width, image.height) for image in images] == [(2, 8, 6), (4, 8, 6)]
        for image in images:
            pixels = np.asarray(Image.open(io.BytesIO(image.encoded_image_string)))
            assert (pixels == (image.step * 20, number * 90, 7)).all()


def test_a_sample_that_was_moved_away_is_no_reason_to_stop(tmp_path: Path) -> None:
    journal = TrainLog(tmp_path / "t.jsonl", tensorboard=True)
    journal.write({"event": "sample", "step": 1, "path": str(tmp_path / "gone-0.png")})
    journal.close()
    assert log(tmp_path) == [{"event": "sample", "step": 1, "path": str(tmp_path / "gone-0.png")}]


def test_what_is_shown_of_a_configuration_names_no_place(tmp_path: Path) -> None:
    plain = config(tmp_path)
    assert wandb_run(plain) is None
    run = wandb_run(config(tmp_path, wandb=True, wandb_project="p"))
    assert run is not None and (run.project, run.name, run.id) == ("p", "t", None)
    assert str(tmp_path) not in json.dumps(dict(run.config)) and "rank" in run.config
    second = wandb_run(config(tmp_path, wandb=True, wandb_run_name="second try"))
    assert second is not None and (second.project, second.name) == ("inweave", "second try")


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"wandb: .*pip install 'inweave\[wandb\]', or set wandb = false"):
        require_tracker("wandb")
    with pytest.raises(ConfigError, match=r"inweave\[wandb\]"):
        TrainLog(tmp_path / "t.jsonl", wandb=WandbRun("p", "n"))


def test_weights_and_biases_reads_a_run_and_its_second_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tiny(tmp_path, steps=2, wandb=True, sample_every=2).train(sample=sampler(tmp_path))
    tiny(tmp_path, steps=4, wandb=True, resume="auto").train()
    (event,) = (record for record in log(tmp_path) if record.get("event") == "wandb")
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and all(folder.name.endswith(event["id"]) for folder in folders)
    assert len(list(folders[0].glob("files/media/images/sample/*.png"))) == 2
    assert all(list(folder.glob("run-*.wandb")) for folder in folders)
