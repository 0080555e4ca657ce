"""Edit models of the worker: reference images of native jobs and of OpenAI's edits, as `generate` makes them."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

pytest.importorskip("diffusers")

from PIL import Image

from inweave.generate.pipeline import Pipeline
from inweave.models.model import load_model
from tests.peers import tiny_models as tiny
from tests.peers.test_families import difference, hole, picture
from tests.serve.worker import Worker

EDIT = "flux2-klein-4b"
SETTINGS: dict[str, Any] = {"steps": 1, "seed": 3, "width": 64, "height": 64}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("edit")
    models = ("--also", f"edit={tiny.folder(EDIT)}")
    running = Worker(folder / "data", *models).start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return Pipeline(load_model(tiny.folder(EDIT)))


def png(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, format="PNG")
    return content.getvalue()


def same(one: Image.Image, other: Image.Image) -> bool:
    return bool(difference(one, other).max() <= 1)


def references() -> list[Image.Image]:
    return [picture().resize((96, 64)), picture().rotate(90)]


def test_a_native_job_sees_its_references_in_order(worker: Worker, pipe: Pipeline) -> None:
    images = references()
    body = {"prompt": "a dog", "model": "edit", **SETTINGS}
    texts = [base64.b64encode(png(image)).decode() for image in images]
    job = worker.http.post("/v1/jobs", json=body | {"references": texts}).json()
    result = worker.ended(job["id"])
    content = worker.http.get(f"/v1/jobs/{job['id']}/files/0.png").content
    made = Image.open(io.BytesIO(content)).convert("RGB")
    assert result["state"] == "done"
    assert same(made, pipe("a dog", references=images, **SETTINGS).images[0])
    assert not same(made, pipe("a dog", references=images[::-1], **SETTINGS).images[0])


def test_capabilities_say_which_models_read_references(worker: Worker) -> None:
    models = {each["name"]: each["references"] for each in worker.http.get("/v1/capabilities").json()["models"]}
    assert models == {"edit": 4, "inweave/emoji": 0}


def test_references_never_name_a_file_of_this_machine(worker: Worker) -> None:
    for value in ("/etc/hostname", "file:///etc/hostname", "../a.png"):
        answer = worker.http.post("/v1/jobs", json={"prompt": "x", "model": "edit", "references": [value]})
        assert answer.status_code in (400, 404, 422), answer.text
    for model, count, text in (("inweave/emoji", 1, "reads no reference images"), ("edit", 5, "at most 4")):
        texts = [base64.b64encode(png(picture())).decode()] * count
        answer = worker.http.post("/v1/jobs", json={"prompt": "x", "model": model, "references": texts})
        assert answer.status_code in (400, 422) and text in answer.text, answer.text


def test_openai_edits_of_an_edit_model_take_images_as_references(worker: Worker, pipe: Pipeline) -> None:
    client = openai.OpenAI(base_url=f"{worker.url}/v1", api_key="any", max_retries=0)
    images = references()
    answer = client.images.edit(
        model="edit", prompt="a dog", image=[("a.png", png(images[0])), ("b.png", png(images[1]))], size="64x64",
        extra_body={"steps": 1, "seed": 3},
    )  # fmt: skip
    assert answer.data is not None
    made = Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json or ""))).convert("RGB")
    assert same(made, pipe("a dog", references=images, **SETTINGS).images[0])


def test_a_mask_belongs_to_the_first_image(worker: Worker, pipe: Pipeline) -> None:
    client = openai.OpenAI(base_url=f"{worker.url}/v1", api_key="any", max_retries=0)
    first, second = picture().resize((64, 64)), references()[0]
    inside = hole().resize((64, 64))
    mask = Image.new("RGBA", (64, 64), "black")
    mask.putalpha(inside.point(lambda value: 0 if value >= 128 else 255))
    answer = client.images.edit(
        model="edit", prompt="a dog", image=[("a.png", png(first)), ("b.png", png(second))], mask=("m.png", png(mask)),
        extra_body={"steps": 1, "seed": 3, "strength": 1.0},
    )  # fmt: skip
    assert answer.data is not None
    made = Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json or ""))).convert("RGB")
    other = pipe("a dog", init=first, mask=inside, references=[second], strength=1.0, steps=1, seed=3).images[0]
    assert same(made, other)
    outside = np.asarray(inside) < 128
    assert (np.asarray(made)[outside] == np.asarray(first.convert("RGB"))[outside]).all()
