"""The APIs of others, with their own clients."""

from __future__ import annotations

import base64
import io

import openai
import pytest
import webuiapi
from PIL import Image

from tests.serve.worker import Worker


@pytest.fixture
def client(worker: Worker) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{worker.url}/v1", api_key="any", max_retries=0)


@pytest.fixture
def webui(worker: Worker) -> webuiapi.WebUIApi:
    return webuiapi.WebUIApi(host="127.0.0.1", port=int(worker.url.rpartition(":")[2]), sampler="Euler", steps=2)


def mask_with_a_hole() -> bytes:
    mask = Image.new("RGBA", (128, 128), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, 64, 128))
    content = io.BytesIO()
    mask.save(content, format="PNG")
    return content.getvalue()


def opened(text: str | None) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(text or "")))


def test_openai_generates(client: openai.OpenAI) -> None:
    settings = {"steps": 2, "seed": 1, "loras": [{"name": "pixel", "strength": 0.5}]}
    first, second = (
        client.images.generate(prompt="a red apple", model="inweave/emoji", size="128x128", n=2, extra_body=settings)
        for _ in range(2)
    )
    assert first.data is not None and second.data is not None and len(first.data) == 2
    assert [image.b64_json for image in first.data] == [image.b64_json for image in second.data]
    jpeg = client.images.generate(
        prompt="a red apple", model="inweave/emoji+pixel:0.5", output_format="jpeg", extra_body={"steps": 1}
    )
    assert jpeg.data is not None and opened(jpeg.data[0].b64_json).format == "JPEG"


def test_openai_streams(client: openai.OpenAI) -> None:
    events = list(client.images.generate(
        prompt="a red apple", model="inweave/emoji", stream=True, partial_images=2, extra_body={"steps": 6}
    ))  # fmt: skip
    assert [event.type for event in events] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert opened(events[-1].b64_json).size == (128, 128)


@pytest.mark.parametrize(("steps", "count", "partial"), [(7, 1, 2), (4, 2, 3), (5, 1, 0), (None, 1, 1)])
def test_a_stream_has_no_more_partial_images_than_asked_for(
    client: openai.OpenAI, steps: int | None, count: int, partial: int
) -> None:
    events = list(client.images.generate(
        prompt="x", n=count, size="64x64", stream=True, partial_images=partial, # type: ignore[call-overload]
        extra_body={} if steps is None else {"steps": steps},
    ))  # fmt: skip
    kinds = [event.type.partition(".")[2] for event in events]
    assert kinds == ["partial_image"] * partial + ["completed"] * count


def test_openai_edits_where_the_mask_is_transparent(client: openai.OpenAI) -> None:
    blue = io.BytesIO()
    Image.new("RGB", (128, 128), "blue").save(blue, format="PNG")
    answer = client.images.edit(
        image=("a.png", blue.getvalue()), mask=("m.png", mask_with_a_hole()), prompt="a pear",
        extra_body={"steps": 2, "loras": [{"name": "pixel", "weight": 0.5}, {"name": "ink", "weight": 0.1}]},
    )  # fmt: skip
    assert answer.data is not None
    image = opened(answer.data[0].b64_json).convert("RGB")
    assert image.crop((64, 0, 128, 128)).tobytes() == Image.new("RGB", (64, 128), "blue").tobytes()
    assert image.crop((0, 0, 64, 128)).tobytes() != Image.new("RGB", (64, 128), "blue").tobytes()


def test_openai_errors_and_models(client: openai.OpenAI) -> None:
    assert {"inweave/emoji", "inweave/emoji+pixel"} <= {model.id for model in client.models.list()}
    with pytest.raises(openai.NotFoundError, match="nosuch"):
        client.images.generate(prompt="x", model="nosuch")
    with pytest.raises(openai.BadRequestError, match="size"):
        client.images.generate(prompt="x", model="inweave/emoji", size="big")  # type: ignore[call-overload]
    with pytest.raises(openai.NotFoundError, match="nosuch"):
        client.images.generate(prompt="x", model="inweave/emoji+nosuch")


def test_webui_generates_with_tags(webui: webuiapi.WebUIApi) -> None:
    result = webui.txt2img(prompt="a red apple <lora:pixel:0.8>", width=128, height=128, seed=3, batch_size=2)
    assert len(result.images) == 2 and result.info["all_seeds"] == [3, 4]
    assert "pixel" in result.info["extra_generation_params"]["Lora hashes"]
    assert "<lora:pixel:0.8>" in result.info["infotexts"][0]
    assert "a red apple" in webui.png_info(result.image).info


def test_webui_transforms_and_inpaints(webui: webuiapi.WebUIApi) -> None:
    blue = Image.new("RGB", (128, 128), "blue")
    mask = Image.new("L", (128, 128), 0)
    mask.paste(255, (0, 0, 64, 128))
    changed = webui.img2img(images=[blue], prompt="a pear", width=128, height=128, denoising_strength=0.5)
    assert changed.image.size == (128, 128)
    painted = webui.img2img(images=[blue], mask_image=mask, prompt="a pear", width=128, height=128)
    assert painted.image.convert("RGB").crop((64, 0, 128, 128)).tobytes() == blue.crop((64, 0, 128, 128)).tobytes()


def test_webui_reads_what_it_needs(webui: webuiapi.WebUIApi) -> None:
    assert webui.util_get_model_names() == ["inweave/emoji"]
    options = webui.get_options()
    webui.set_options(options)  # clients send all of it back
    assert options["sd_model_checkpoint"] == "inweave/emoji"
    assert {"Euler", "Euler a"} <= {sampler["name"] for sampler in webui.get_samplers()}
    assert {"pixel", "ink"} <= {lora["name"] for lora in webui.get_loras()}
    progress = webui.get_progress()
    assert progress["progress"] == 0 and progress["state"]["job_count"] == 0
    assert webui.interrupt() == {}
    for nothing in (
        webui.get_upscalers,
        webui.get_face_restorers,
        webui.get_embeddings,
        webui.get_scripts,
        webui.get_cmd_flags,
        webui.get_memory,
        webui.get_hypernetworks,
        webui.get_sd_vae,
        webui.get_schedulers,
    ):
        nothing()


def test_a1111_names_what_it_cannot_do(worker: Worker) -> None:
    body = {
        "prompt": "a red apple",
        "steps": 1,
        "width": 128,
        "height": 128,
        "scheduler": "Karras",
        "sampler_name": "DDIM",
        "restore_faces": True,
        "url": "http://x",
        "auth": "secret",
        "unknown": [1],
    }
    answer = worker.http.post("/sdapi/v1/txt2img", json=body, headers={"Authorization": "Basic Og=="}).json()
    assert len(answer["images"]) == 1 and isinstance(answer["info"], str)
    names = [warning.split()[0] for warning in answer["warnings"]]
    assert [name for name in names if name != "option"] == ["restore_faces", "unknown", "scheduler"]
    unknown = worker.http.post("/sdapi/v1/txt2img", json={"prompt": "x <lora:nosuch:1>"})
    assert unknown.status_code == 404 and "nosuch" in unknown.json()["detail"]
    assert worker.http.post("/sdapi/v1/img2img", json={"prompt": "x"}).json()["detail"] == "Init image not found"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": "transparent"}, "background"),
        ({"quality": 3}, "quality"),
        ({"n": 0}, "n"),
        ({"n": 99}, "n"),
        ({"size": "100x100"}, "size"),
        ({"stream": "false"}, "stream"),
        ({"stream": True, "response_format": "url"}, "response_format"),
        ({"output_format": "jpeg", "response_format": "url"}, "response_format"),
        ({"output_compression": 50}, "output_compression"),
        ({"output_format": "gif"}, "output_format"),
        ({"partial_images": 4}, "partial_images"),
        ({"nosuch": 1}, "nosuch"),
    ],
)
def test_openai_fields_that_cannot_be_honored_are_refused_by_name(
    worker: Worker, fields: dict[str, object], param: str
) -> None:
    answer = worker.http.post("/v1/images/generations", json={"prompt": "x", "steps": 1} | fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_openai_fields_without_effect_are_named(worker: Worker) -> None:
    body = {
        "prompt": "x",
        "steps": 1,
        "size": "64x64",
        "quality": "high",
        "style": "vivid",
        "user": "me",
        "moderation": "low",
        "background": "opaque",
        "partial_images": 1,
        "output_format": "webp",
        "output_compression": 30,
    }
    answer = worker.http.post("/v1/images/generations", json=body).json()
    assert [line.split()[0] for line in answer["warnings"]] == ["quality", "style", "partial_images"]
    assert opened(answer["data"][0]["b64_json"]).format == "WEBP" and answer["usage"]["total_tokens"] == 0


def test_openai_edits_have_the_requested_size_and_one_image(client: openai.OpenAI, worker: Worker) -> None:
    content = io.BytesIO()
    Image.new("RGB", (100, 60), "blue").save(content, format="PNG")
    answer = client.images.edit(
        image=("a.png", content.getvalue()),
        prompt="x",
        size="64x64",
        extra_body={"steps": 1},  # type: ignore[call-overload]
    )
    assert opened(answer.data[0].b64_json).size == (64, 64)
    own = client.images.edit(image=("a.png", content.getvalue()), prompt="x", extra_body={"steps": 1})
    assert own.data is not None and opened(own.data[0].b64_json).size == (100, 60)
    with pytest.raises(openai.BadRequestError, match="one image is expected, got 2"):
        client.images.edit(image=[("a.png", content.getvalue()), ("b.png", content.getvalue())], prompt="x")
    with pytest.raises(openai.BadRequestError, match="mask"):
        client.images.edit(image=("a.png", content.getvalue()), mask=("m.png", mask_with_a_hole()), prompt="x")


def test_openai_knows_one_model_and_one_with_a_lora(client: openai.OpenAI) -> None:
    assert client.models.retrieve("inweave/emoji").id == "inweave/emoji"
    assert client.models.retrieve("inweave/emoji+pixel:0.5").id == "inweave/emoji+pixel:0.5"
    for name in ("nosuch", "inweave/emoji+nosuch"):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)
