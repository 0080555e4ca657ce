"""LoRAs that fit a model only in part: refused, or applied in part and reported."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from inweave import pipeline
from inweave.errors import ConfigError
from inweave.formats.files import open_container, write_file
from inweave.models import embedded
from tests.serve.worker import Worker
from tests.support import tensor

PIXEL = embedded.loras()["pixel"]


def write_partial(path: Path) -> None:
    """Return a LoRA with the modules of `pixel` and one that the model does not have."""
    container = open_container(PIXEL)
    foreign = {
        "lora_unet_nowhere_1_x.lora_down.weight": tensor(np.ones((2, 4), np.float32)),
        "lora_unet_nowhere_1_x.lora_up.weight": tensor(np.ones((4, 2), np.float32)),
    }
    write_file(path, {**container.tensors, **foreign}, dict(container.metadata))


@pytest.fixture
def partial(worker: Worker) -> Iterator[Path]:
    path = worker.data / "loras" / "partial.safetensors"
    write_partial(path)
    worker.http.post("/v1/loras/refresh")
    yield path
    path.unlink()
    worker.http.post("/v1/loras/refresh")


def test_a_lora_that_fits_in_part_is_used_in_part_where_asked(worker: Worker, partial: Path) -> None:
    refused = worker.http.post("/v1/jobs", json={"prompt": "a red apple", "loras": ["partial"]})
    assert refused.status_code == 422 and refused.json()["error"]["report"]["placed"] == 300
    whole = worker.ended(worker.submit(seed=3, loras=["pixel"]))
    document = worker.ended(worker.submit(seed=3, loras=["partial"], on_mismatch="warn"))
    assert document["state"] == "done", document["error"]
    first, second = (
        Image.open(io.BytesIO(worker.http.get(each["result"]["images"][0]["url"]).content)).tobytes()
        for each in (whole, document)
    )
    assert first == second
    assert any("partial" in text and "300 of 302" in text for text in document["result"]["warnings"])
    lora = document["result"]["loras"][0]
    assert (lora["modules"], lora["modules_in_file"]) == (100, 101) and lora["modules_in_model"] > 100
    assert 0 < lora["apply_seconds"] < 60
    again = worker.ended(worker.submit(seed=3))
    assert again["result"]["loras"] == []


def test_the_pipeline_takes_what_fits_and_refuses_what_fits_nowhere(tmp_path: Path) -> None:
    pipe = pipeline("inweave/emoji")
    write_partial(tmp_path / "partial.safetensors")
    with pytest.raises(ConfigError, match="300 of 302"):
        pipe("a red apple", steps=1, seed=1, loras=[str(tmp_path / "partial.safetensors:0.5")])
    part = pipe("a red apple", steps=1, seed=1, loras=[str(tmp_path / "partial.safetensors:0.5")], on_mismatch="warn")
    expected = pipe("a red apple", steps=1, seed=1, loras=["pixel:0.5"])
    assert part.images[0].tobytes() == expected.images[0].tobytes() and "300 of 302" in part.warnings[0]
    write_file(tmp_path / "none.safetensors", {
        "lora_unet_nowhere_x.lora_down.weight": tensor(np.ones((2, 4), np.float32)),
        "lora_unet_nowhere_x.lora_up.weight": tensor(np.ones((4, 2), np.float32)),
    })  # fmt: skip
    with pytest.raises(ConfigError, match="0 of 2"):
        pipe("a red apple", steps=1, loras=[str(tmp_path / "none.safetensors")], on_mismatch="warn")
