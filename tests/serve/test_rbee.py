"""The contract of rbee's SD worker: operations, events, flags."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from inweave.cli.serve import _device, _variant
from inweave.errors import ConfigError
from inweave.serve.api.rbee.events import contract_fields, device_label
from inweave.serve.jobs.image_request import ImageRequest
from tests.serve.worker import Worker


def picture(color: str = "blue", size: tuple[int, int] = (64, 64)) -> str:
    content = io.BytesIO()
    Image.new("RGB", size, color).save(content, format="PNG")
    return base64.b64encode(content.getvalue()).decode()


BODIES: dict[str, dict[str, Any]] = {
    "image_generation": {"width": 64, "height": 64},
    "image_transform": {"input_image": picture()},
    "image_inpaint": {"init_image": picture(), "mask_image": picture("white")},
}


@pytest.mark.parametrize("operation", BODIES)
def test_an_operation_ends_with_its_events(worker: Worker, operation: str) -> None:
    body = {
        "operation": operation,
        "hive_id": "localhost",
        "model": "inweave/emoji",
        "prompt": "a red apple",
        "steps": 7,
        "strength": 1.0,
        "loras": [{"path": "pixel.safetensors"}],
    } | BODIES[operation]
    if operation == "image_generation":
        del body["strength"]
    answer = worker.http.post("/v1/jobs", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["sse_url"] == f"/v1/jobs/{answer.json()['job_id']}/stream"
    events = list(worker.events(answer.json()["job_id"], path="stream"))
    kinds = ["preview", *["progress"] * 4, "preview", "preview", "complete"]
    assert [event["type"] for event in events] == kinds
    assert [event["step"] for event in events[:-1]] == list(range(1, 8)) and events[0]["total"] == 7
    assert events[0].keys() == {"type", "step", "total", "percent", "image", "format"}
    assert events[1].keys() == {"type", "step", "total", "percent"}
    assert {"type", "image", "format"} <= events[-1].keys() and events[-1]["format"] == "png"
    assert Image.open(io.BytesIO(base64.b64decode(events[-1]["image"]))).size == (64, 64)


def test_what_is_left_out_has_the_value_of_the_contract() -> None:
    common = {"hive_id": "h", "prompt": "x", "seed": None, "negative_prompt": None, "steps": None}
    made = ImageRequest.parse(contract_fields({"operation": "image_generation", **common}))
    settings = made.settings
    assert (settings.steps, settings.guidance, settings.width, settings.height) == (20, 7.5, 512, 512)
    changed = ImageRequest.parse(contract_fields({"operation": "image_transform", "init_image": "x", **common}))
    assert changed.settings.strength == 0.8 and changed.settings.width is None and changed.image == "x"
    painted = contract_fields({"operation": "image_inpaint", "init_image": "x", "mask_image": "y", **common})
    assert ImageRequest.parse(painted).settings.strength == 1.0


def test_a_job_is_cancelled_in_the_words_of_the_contract(worker: Worker) -> None:
    body = {
        "operation": "image_generation",
        "hive_id": "h",
        "model": "inweave/emoji",
        "prompt": "x",
        "steps": 150,
        "width": 128,
        "height": 128,
    }
    job = worker.http.post("/v1/jobs", json=body).json()["job_id"]
    events = worker.events(job, path="stream")
    next(events)
    answer = worker.http.delete(f"/v1/jobs/{job}")
    assert answer.status_code == 200 and answer.json().items() >= {"job_id": job, "status": "cancelled"}.items()
    assert list(events)[-1] == {"type": "error", "message": "cancelled"}


def test_two_names_of_one_field_must_agree() -> None:
    body = {"prompt": "x", "operation": "image_transform", "image": "a", "init_image": "b"}
    with pytest.raises(ConfigError, match="another name of image"):
        ImageRequest.parse(body)
    with pytest.raises(ConfigError, match="another name of operation"):
        ImageRequest.parse({"prompt": "x", "kind": "image_transform", "operation": "image_generation"})
    assert ImageRequest.parse(body | {"init_image": "a", "input_image": None}).image == "a"


@pytest.mark.parametrize(
    ("device", "backend", "expected", "label"),
    [
        ("0", None, "cuda:0", "GPU-0"),
        ("1", "cuda", "cuda:1", "GPU-1"),
        ("0", "cpu", "cpu", "CPU-0"),
        ("0", "metal", "mps", "GPU-0"),
        ("cuda:3", "cpu", "cuda:3", "GPU-3"),
        ("cpu", None, "cpu", "CPU-0"),
    ],
)
def test_devices_in_both_spellings(device: str, backend: str | None, expected: str, label: str) -> None:
    assert _device(device, backend) == expected and device_label(expected) == label


def test_variants_are_models() -> None:
    assert (
        _variant("v1-5") == "runwayml/stable-diffusion-v1-5"
        and _variant("XL") == "stabilityai/stable-diffusion-xl-base-1.0"
    )
    assert _variant("turbo") == "stabilityai/sdxl-turbo" and _variant(None) is None
    with pytest.raises(ConfigError, match="nosuch"):
        _variant("nosuch")
