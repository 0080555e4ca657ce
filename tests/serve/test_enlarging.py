"""Hires fix, upscalers, styles, wildcards, sheets and outpainting over HTTP: natively and as A1111's clients ask."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
import webuiapi
from PIL import Image

from inweave.generate.record import settings_of
from inweave.serve.api.a1111.hires import second_pass
from tests.serve.worker import Worker

SMALL: dict[str, Any] = {"width": 64, "height": 64, "steps": 2, "seed": 7}


def image_of(worker: Worker, document: dict[str, Any], number: int = 0) -> Image.Image:
    content = worker.http.get(document["result"]["images"][number]["url"]).content
    return Image.open(io.BytesIO(content))


def decoded(text: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(text)))


def encoded(image: Image.Image) -> str:
    content = io.BytesIO()
    image.save(content, format="PNG")
    return base64.b64encode(content.getvalue()).decode()


def done(worker: Worker, **fields: Any) -> dict[str, Any]:
    document = worker.ended(worker.submit(**SMALL | fields))
    assert document["state"] == "done", document
    return document


def test_a1111s_hires_fix_is_the_native_second_pass(worker: Worker) -> None:
    api = webuiapi.WebUIApi(baseurl=f"{worker.url}/sdapi/v1")
    theirs = api.txt2img(
        prompt="a cat face", steps=2, seed=7, width=64, height=64, cfg_scale=4, enable_hr=True, hr_scale=2,
        hr_upscaler="Lanczos", denoising_strength=0.5, hr_second_pass_steps=2, sampler_name="Euler",
    )  # fmt: skip
    upscale = {"scale": 2, "strength": 0.5, "steps": 4}
    ours = done(worker, prompt="a cat face", guidance=4, sampler="euler", upscale=upscale)
    assert theirs.image.size == (128, 128)
    assert theirs.image.tobytes() == image_of(worker, ours).tobytes()
    assert theirs.info["denoising_strength"] == 0.5
    assert theirs.info["extra_generation_params"]["Hires upscaler"] == "Lanczos"
    assert "Hires upscale: 2, Hires steps: 2, Hires upscaler: Lanczos" in theirs.info["infotexts"][0]
    assert ours["result"]["images"][0]["width"] == 128
    steps = [(event["step"], event["total"]) for event in worker.events(ours["id"]) if "step" in event]
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)], "of both passes"


@pytest.mark.parametrize(
    ("body", "upscale"),
    [
        ({}, {"upscaler": "Latent", "scale": 2.0, "strength": 0.75}),
        ({"steps": 20, "denoising_strength": 0.7}, {"upscaler": "Latent", "scale": 2.0, "strength": 0.7, "steps": 29}),
        ({"hr_resize_x": 1024, "hr_resize_y": 0}, {"upscaler": "Latent", "width": 1024, "strength": 0.75}),
        (
            {"hr_second_pass_steps": 10, "denoising_strength": 0.5, "hr_sampler_name": "Euler a"},
            {"upscaler": "Latent", "scale": 2.0, "strength": 0.5, "steps": 20, "sampler": "Euler a"},
        ),
    ],
)
def test_fields_of_hires_fix_are_translated(body: dict[str, Any], upscale: dict[str, Any]) -> None:
    assert second_pass({"enable_hr": True} | body, {}) == {"upscale": upscale}
    assert second_pass(body, {}) == {}


def test_the_older_form_of_hires_fix_names_the_size_of_the_result() -> None:
    body = {"enable_hr": True, "firstphase_width": 512, "firstphase_height": 512}
    made = second_pass(body, {"width": 1024, "height": 768})
    assert made["width"] == made["height"] == 512
    assert (made["upscale"]["width"], made["upscale"]["height"]) == (1024, 768)


def test_upscalers_are_listed_and_enlarge_images(worker: Worker) -> None:
    api = webuiapi.WebUIApi(baseurl=f"{worker.url}/sdapi/v1")
    names = [each["name"] for each in worker.http.get("/sdapi/v1/upscalers").json()]
    assert names == ["None", "Lanczos", "Bicubic", "Nearest", "twice"]
    assert {"name": "Latent (bicubic)"} in worker.http.get("/sdapi/v1/latent-upscale-modes").json()
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 48, 3), np.uint8))
    single = api.extra_single_image(image=image, upscaler_1="Nearest", upscaling_resize=3)
    assert single.image.tobytes() == image.resize((144, 120), Image.Resampling.NEAREST).tobytes()
    batch = api.extra_batch_images([image, image], upscaler_1="twice", upscaling_resize=2)
    assert [each.size for each in batch.images] == [(96, 80), (96, 80)]
    same = worker.http.post("/sdapi/v1/extra-single-image", json={"image": encoded(image), "upscaler_1": "None"}).json()
    assert decoded(same["image"]).tobytes() == image.tobytes()
    sized = {"image": encoded(image), "upscaler_1": "Lanczos", "resize_mode": 1, "upscaling_resize_w": 100,
             "upscaling_resize_h": 100}  # fmt: skip
    assert decoded(worker.http.post("/sdapi/v1/extra-single-image", json=sized).json()["image"]).size == (100, 100)
    sized["upscaling_crop"] = False
    assert decoded(worker.http.post("/sdapi/v1/extra-single-image", json=sized).json()["image"]).size == (120, 100)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "image"),
        ({"image": "aGVsbG8="}, "image"),
        ({"upscaler_1": "nosuch"}, "upscaler_1"),
        ({"upscaler_1": "../../etc/passwd.safetensors"}, "upscaler_1"),
        ({"upscaling_resize": 0.5}, "upscaling_resize"),
        ({"upscaling_resize": 100}, "upscaling_resize"),
        ({"gfpgan_visibility": 1}, "gfpgan"),
    ],
)
def test_what_cannot_be_enlarged_is_refused(worker: Worker, body: dict[str, Any], word: str) -> None:
    fields = {"upscaler_1": "Lanczos", "image": encoded(Image.new("RGB", (16, 16)))} | body if body else {}
    answer = worker.http.post("/sdapi/v1/extra-single-image", json=fields)
    assert answer.status_code in (400, 404, 422) and word in answer.json()["detail"], answer.text
    assert "/etc" not in answer.text or "no such" in answer.text


def test_styles_are_kept_and_applied(worker: Worker) -> None:
    style = {"name": "ink/øld", "prompt": "{prompt}, {thin|thick} ink", "negative_prompt": "photo"}
    assert worker.http.put("/v1/styles", json=style).json() == style
    assert style in worker.http.get("/sdapi/v1/prompt-styles").json()
    document = done(worker, prompt="a __colors__ cat", styles=["ink/øld"], count=3)
    prompts = [each["settings"]["prompt"] for each in document["result"]["images"]]
    assert all(text.endswith(" ink") and "__" not in text for text in prompts) and len(set(prompts)) > 1
    read = settings_of(image_of(worker, document, 2), "it")
    assert read.config["prompt"] == prompts[2]
    assert read.config["template"] == {"prompt": "a __colors__ cat", "negative_prompt": "", "styles": ["ink/øld"]}
    answer = worker.http.post(
        "/sdapi/v1/txt2img", json=SMALL | {"prompt": "a __colors__ cat", "styles": ["ink/øld", "None"], "seed": 9}
    ).json()
    assert decoded(answer["images"][0]).tobytes() == image_of(worker, document, 2).tobytes()
    assert json.loads(answer["info"])["styles"] == ["ink/øld"]
    assert worker.http.delete("/v1/styles", params={"name": "ink/øld"}).status_code == 200
    assert worker.http.delete("/v1/styles", params={"name": "ink/øld"}).status_code == 404
    refused = worker.http.post("/v1/jobs", json={"prompt": "x", "styles": ["ink/øld"]})
    assert refused.status_code == 400 and "no such style" in refused.text
    for wrong in ({"name": ""}, {"name": "x" * 200}, {"name": "a\nb"}, {"prompt": "x"}):
        assert worker.http.put("/v1/styles", json=wrong).status_code in (400, 422)


def test_wildcards_are_listed_and_missing_ones_refused(worker: Worker) -> None:
    assert worker.http.get("/v1/wildcards").json() == {"wildcards": ["colors"]}
    refused = worker.http.post("/v1/jobs", json={"prompt": "a __color__ cat"})
    assert refused.status_code == 400 and "did you mean 'colors'" in refused.text
    assert str(worker.data) not in refused.text


def test_a_sheet_is_one_image_with_the_settings_of_all(worker: Worker) -> None:
    document = done(
        worker, prompt="a cat <lora:pixel:1>", grid=["strength=0,1", "sampler=Euler,DDIM"], count=3,
    )  # fmt: skip
    assert len(document["result"]["images"]) == 1 and document["result"]["loras"][0]["name"] == "pixel"
    sheet = image_of(worker, document)
    assert sheet.width > 2 * 64 and sheet.height > 2 * 64
    record = json.loads(sheet.text["inweave"])  # type: ignore[attr-defined]
    assert record["grid"]["axes"] == ["strength=0,1", "sampler=Euler,DDIM"]
    assert [[cell["sampler"] for cell in row] for row in record["grid"]["settings"]] == [["euler"] * 2, ["ddim"] * 2]
    cell = record["grid"]["settings"][1][1]
    single = done(worker, **{name: cell[name] for name in ("prompt", "sampler", "schedule", "guidance")})
    assert _is_on(sheet, image_of(worker, single))
    rows = worker.http.get("/v1/gallery").json()["images"]
    assert [row["id"] for row in rows].count(document["result"]["images"][0]["gallery"]) == 1


def _is_on(sheet: Image.Image, cell: Image.Image) -> bool:
    """Return whether an image is on a sheet, up to the rounding of a batch."""
    whole, part = (np.asarray(image.convert("RGB"), np.int16) for image in (sheet, cell))
    places = np.argwhere(np.abs(whole[: 1 - cell.height, : 1 - cell.width] - part[0, 0]).max(-1) <= 2)
    return any(
        np.abs(whole[top : top + cell.height, left : left + cell.width] - part).max() <= 2 for top, left in places
    )


@pytest.mark.parametrize(
    ("grid", "word"),
    [
        (["nosuch=1"], "nosuch"),
        (["steps"], "steps"),
        (["steps=a"], "whole numbers"),
        (["steps=0"], "steps"),
        (["model=nosuch"], "nosuch"),
        (["strength=0,1"], "needs a LoRA"),
        (["prompt=dog,cow"], "looked for"),
        (["seed=" + ",".join(map(str, range(101)))], "100"),
        (["seed=1,2", "seed=1,2"], "both axes"),
        (["width=4096", "seed=1,2,3,4,5,6,7,8,9"], "pixels"),
        (["seed=1", "steps=1", "guidance=1"], "grid"),
        (["prompt=cat,<lora:nosuch:1>"], "nosuch"),
    ],
)
def test_a_sheet_that_cannot_be_made_is_refused(worker: Worker, grid: list[str], word: str) -> None:
    answer = worker.http.post("/v1/jobs", json={"prompt": "a cat", "height": 4096, "width": 64, "grid": grid})
    assert answer.status_code in (400, 404, 422) and word in answer.text, answer.text


def test_an_image_is_extended_over_http(worker: Worker) -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8))
    document = worker.ended(worker.submit(
        operation="image_transform", prompt="grass", image=encoded(image), outpaint={"right": 32}, strength=1, seed=1,
    ))  # fmt: skip
    result = image_of(worker, document)
    assert result.size == (96, 64)
    assert np.array_equal(np.asarray(result)[:, :48], np.asarray(image)[:, :48])
    refused = worker.http.post("/v1/jobs", json={"prompt": "x", "outpaint": {"right": 32}})
    assert refused.status_code == 400 or worker.ended(refused.json()["id"])["state"] == "failed"


def test_what_there_is_is_in_the_capabilities(worker: Worker) -> None:
    document = worker.http.get("/v1/capabilities").json()
    assert {"name": "twice", "label": "twice", "latent": False} in document["upscalers"]
    assert {"sampler", "model", "prompt"} <= set(document["axes"])
