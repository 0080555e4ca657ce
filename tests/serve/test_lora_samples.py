"""Images that show a LoRA: a sample made on demand with and without it, and the samples of a training run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageChops

from inweave.models import embedded
from inweave.serve.jobs.training_runs import add_preview, preview_path
from tests.serve.worker import SMALL, Worker

PIXEL = embedded.loras()["pixel"]
REQUEST: dict[str, Any] = {**SMALL, "prompt": "a cat", "seed": 1, "steps": 4, "gallery": False}


def made(worker: Worker, **fields: Any) -> str:
    """Return a job that is done."""
    job = worker.submit(**{**REQUEST, **fields})
    assert worker.ended(job)["state"] == "done"
    return job


def opened(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content)).convert("RGB")


def test_a_sample_is_kept_from_two_jobs_and_goes_with_its_file(worker: Worker) -> None:
    content = PIXEL.read_bytes()
    assert worker.http.post("/v1/loras", params={"name": "sampled"}, content=content).status_code == 201
    assert worker.http.get("/v1/loras/sampled").json()["sample"] is None
    assert worker.http.get("/v1/loras/sampled/sample").status_code == 404
    with_lora, without = made(worker, prompt="a cat <lora:sampled:0.8>"), made(worker)
    body = {"with": with_lora, "without": without}
    answer = worker.http.post("/v1/loras/sampled/sample", json=body)
    assert answer.status_code == 201, answer.text
    facts = worker.http.get("/v1/loras/sampled").json()["sample"]
    assert facts == answer.json()
    assert facts | {"version": ""} == {
        "prompt": "a cat", "seed": 1, "model": "inweave/emoji", "strength": 0.8, "version": "",
        "width": 64, "height": 64,
    }  # fmt: skip
    listed = worker.http.get("/v1/loras", params={"query": "sampled"}).json()["loras"]
    assert [each["sample"] for each in listed] == [facts]
    images = [worker.http.get("/v1/loras/sampled/sample", params=query) for query in ({}, {"without": True})]
    assert all(each.headers["content-type"] == "image/webp" for each in images)
    assert ImageChops.difference(*(opened(each.content) for each in images)).getbbox() is not None
    # each shows what its job made
    for job, image in zip((with_lora, without), images, strict=True):
        original = opened(worker.http.get(f"/v1/jobs/{job}/files/0.png").content)
        apart = np.asarray(ImageChops.difference(original, opened(image.content)))
        assert apart.mean() < 12, "a WebP of this image"
    assert worker.http.delete("/v1/loras/sampled").status_code == 200
    assert worker.http.post("/v1/loras", params={"name": "sampled"}, content=content).status_code == 201
    assert worker.http.get("/v1/loras/sampled").json()["sample"] is None, "of the file before"
    worker.http.delete("/v1/loras/sampled")


def test_jobs_that_do_not_show_the_difference_are_refused(worker: Worker) -> None:
    with_lora, without = made(worker, prompt="a cat <lora:pixel:0.8>"), made(worker)
    refused = {
        "another LoRA": ({"with": made(worker, prompt="a cat <lora:ink:1>"), "without": without}, 400, "alone"),
        "two LoRAs": (
            {"with": made(worker, prompt="a cat <lora:ink:1> <lora:pixel:1>"), "without": without}, 400, "alone",
        ),
        "with twice": ({"with": with_lora, "without": with_lora}, 400, "made with a LoRA"),
        "another seed": ({"with": with_lora, "without": made(worker, seed=2)}, 400, "differ in more"),
        "another prompt": ({"with": with_lora, "without": made(worker, prompt="a dog")}, 400, "differ in more"),
        "unknown": ({"with": with_lora, "without": "job-nosuch"}, 404, "job-nosuch"),
        "more fields": ({"with": with_lora, "without": without, "image": "x"}, 400, "image"),
    }  # fmt: skip
    for name, (body, status, text) in refused.items():
        answer = worker.http.post("/v1/loras/pixel/sample", json=body)
        assert answer.status_code == status and text in answer.text, (name, answer.text)
    assert worker.http.get("/v1/loras/pixel").json()["sample"] is None


def test_an_adapter_of_a_run_gets_the_sample_closest_to_its_step_as_preview(tmp_path: Path) -> None:
    run, library = tmp_path / "run", tmp_path / "library"
    for folder in (run / "samples", library):
        folder.mkdir(parents=True)
    for step in (5, 10, 20):
        for index in (0, 1):
            (run / "samples" / f"my-style-{step:06}-{index}.png").write_bytes(f"{step} {index}".encode())
    (run / "samples" / "my-style-2-000020-0.png").write_bytes(b"another run's")
    for stem, expected in {"my-style-000011": "10 0", "my-style-000020": "20 0", "my-style": "20 0"}.items():
        copy = library / f"{stem}.safetensors"
        add_preview(run / f"{stem}.safetensors", copy)
        assert preview_path(copy).read_text() == expected, stem
    preview_path(library / "my-style.safetensors").write_text("the user's own")
    add_preview(run / "my-style.safetensors", library / "my-style.safetensors")
    assert preview_path(library / "my-style.safetensors").read_text() == "the user's own"
    add_preview(tmp_path / "elsewhere" / "other.safetensors", library / "other.safetensors")
    assert not preview_path(library / "other.safetensors").exists()
