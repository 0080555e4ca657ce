"""Untrusted requests: broken JSON, bombs, wrong types. Every answer is 4xx, quick, and names no file of the worker."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from inweave.serve.app import create_app
from inweave.serve.http import limits
from inweave.serve.sandbox.process import check_image
from inweave.serve.settings import ServeSettings
from tests.serve.test_security import ask
from tests.serve.worker import SMALL, Worker
from tests.support import figure, sized

LEAKS = re.compile(r"/work/|/tmp/|/home/|/usr/|site-packages|Traceback|File \\?\"|\b0x[0-9a-f]{5,}|\.py\b|object at")
FACES = ("/v1/jobs", "/sdapi/v1/txt2img", "/v1/images/generations")


def refused(answer: httpx.Response) -> httpx.Response:
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:300])
    assert not LEAKS.search(answer.text), answer.text[:300]
    return answer


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *more: bytes, rows: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"".join((b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", header), *more, chunk(b"IDAT", rows), chunk(b"IEND", b"")))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, format=kind, **options)
    return content.getvalue()


def text(content: bytes) -> str:
    return base64.b64encode(content).decode()


BOMBS = {
    "13000x13000": png(13000, 13000, rows=zlib.compress(bytes(1626 * 13000), 9)),
    "65535x1": encoded(Image.new("L", (65535, 1))),
    "truncated": encoded(Image.effect_noise((64, 64), 50))[:900],
    "zTXt": png(8, 8, chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(60_000_000), 9)), rows=zlib.compress(bytes(16))),
    "many zTXt": png(
        8, 8, *[chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(900_000), 9))] * 9, rows=zlib.compress(bytes(16))
    ),
    "GIF": encoded(Image.new("L", (8, 8)), "GIF"),
    "TIFF": encoded(Image.new("L", (8, 8)), "TIFF"),
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "nothing": b"",
    "0x0": png(0, 0),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_and_other_files_are_refused_before_they_are_decoded(worker: Worker, name: str) -> None:
    started = time.monotonic()
    body = {"operation": "image_transform", "prompt": "x", "image": text(BOMBS[name])}
    refused(worker.http.post("/v1/jobs", json=body))
    refused(worker.http.post("/sdapi/v1/img2img", json={"init_images": [text(BOMBS[name])], "width": 64, "height": 64}))
    refused(worker.http.post("/v1/images/edits", data={"prompt": "x"}, files={"image": ("a.png", BOMBS[name])}))
    refused(worker.http.post("/v1/uploads", content=BOMBS[name], headers={"Content-Type": "image/png"}))
    refused(worker.http.post("/v1/uploads", files={"file": ("a.png", BOMBS[name], "image/png")}))
    assert time.monotonic() - started < 10  # three answers, on a machine that is busy


def bmp(width: int, height: int) -> bytes:
    head = struct.pack("<IIIHHIIIIII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)[:40]
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + head + bytes(64)


def jpeg(width: int, height: int) -> bytes:
    content = bytearray(encoded(Image.new("L", (16, 16)), "JPEG"))
    frame = content.index(b"\xff\xc0")
    content[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(content)


LARGE = {
    **{name: BOMBS[name] for name in ("13000x13000", "65535x1", "zTXt", "many zTXt", "0x0")},
    "iCCP": png(8, 8, chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(90_000_000), 9)), rows=zlib.compress(bytes(16))),
    "PNG of 2^31": png(2**31 - 1, 2**31 - 1, rows=zlib.compress(bytes(1000))),
    "JPEG of 65500": jpeg(65500, 65500),
    "BMP of 40000": bmp(40000, 40000),
    "WebP of 16383": encoded(Image.new("L", (16383, 1))),
}  # fmt: skip


def test_bombs_take_no_memory(worker: Worker) -> None:
    """Measure the process that opens images while it refuses each one; one that decodes shows that it measures."""
    good = text(encoded(Image.new("RGB", (2048, 2048))))
    body = {"operation": "image_transform", "prompt": "x", "steps": 1}
    worker.http.post("/v1/jobs", json=body | {"image": text(b"x")})  # starts the process
    (pid, *_) = worker.child_pids("inweave.serve.sandbox.process")

    def peak_growth(image: str, refusal: bool) -> tuple[float, float]:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak starts again
        before = status_bytes(pid, "VmRSS")
        started = time.monotonic()
        answer = worker.http.post("/v1/jobs", json=body | {"image": image})
        seconds = time.monotonic() - started
        if refusal:
            refused(answer)
        else:
            assert answer.status_code == 202
            worker.http.delete(f"/v1/jobs/{answer.json()['id']}")
        return (status_bytes(pid, "VmHWM") - before) / 2**20, seconds

    grown = {name: peak_growth(text(content), True) for name, content in LARGE.items()}
    decoded, _ = peak_growth(good, False)
    worst, slowest = max(grown, key=lambda name: grown[name][0]), max(grown, key=lambda name: grown[name][1])
    figure(
        f"{len(LARGE)} image bombs: at most {grown[worst][0]:.1f} MiB ({worst}) "
        f"and {grown[slowest][1] * 1000:.0f} ms ({slowest}) "
        f"until they are refused; 2048x2048 that is decoded takes {decoded:.0f} MiB"
    )
    assert decoded > 8, "the measurement sees what is decoded"
    assert grown[worst][0] < 100, grown


def status_bytes(pid: int, name: str) -> int:
    (line,) = [each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def test_unusual_pictures_are_read_as_what_they_show() -> None:
    def clean(content: bytes) -> Image.Image:
        return Image.open(
            io.BytesIO(check_image({"content": content, "label": "image", "pixels": 4096 * 4096})["content"])
        )

    deep = Image.new("I;16", (32, 32), 0x8000)
    assert clean(encoded(deep)).getpixel((0, 0)) == (128, 128, 128)
    white = clean(encoded(Image.new("CMYK", (32, 32), (0, 0, 0, 0)), "JPEG")).getpixel((0, 0))
    assert isinstance(white, tuple) and min(white) > 250
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = clean(encoded(Image.new("RGB", (32, 16)), "JPEG", exif=exif))
    assert turned.size == (16, 32) and not turned.getexif()
    frames = [Image.new("RGB", (32, 32), (shade, 0, 0)) for shade in range(50)]
    assert clean(encoded(frames[9], save_all=True, append_images=frames)).getpixel((0, 0)) == (9, 0, 0)


@pytest.mark.parametrize(
    "prefix",
    [
        "data:text/html;base64,",
        "data:image/svg+xml;base64,",
        "data:image/png,",
        "data:;base64,",
        "http://127.0.0.1/",
        "FILE:///etc/",
        "gopher://x/",
        "\x00",
    ],
)
def test_addresses_and_wrong_types_are_refused(worker: Worker, prefix: str) -> None:
    image = prefix + text(encoded(Image.new("RGB", (64, 64))))
    refused(worker.http.post("/v1/jobs", json={"operation": "image_transform", "prompt": "x", "image": image}))


def test_a_mask_of_another_size_is_refused(worker: Worker) -> None:
    image, mask = (text(encoded(Image.new("RGB", size))) for size in ((64, 64), (64, 32)))
    body = {"operation": "image_inpaint", "prompt": "x", "image": image, "mask_image": mask}
    assert "64x32" in refused(worker.http.post("/v1/jobs", json=body)).text


JSONS = {
    "deep list": b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "1e999": b'{"prompt":"x","guidance":1e999,"cfg_scale":1e999}',
    "NaN": b'{"prompt":"x","guidance":NaN}',
    "seed": b'{"prompt":"x","seed":%d}' % 2**70,
    "digits": b'{"prompt":"x","steps":' + b"9" * 5000 + b"}",
    "repeated": b'{"prompt":"x","prompt":"y"}',
    "half a pair": b'{"prompt":"\\ud800x"}',
    "half a pair in a name": b'{"prompt":"x","\\udfff":1}',
    "half a pair in a tag": b'{"prompt":"x <lora:\\ud800:1>"}',
    "half a pair in UTF-8": b'{"prompt":"\xed\xa0\x80"}',
    "NUL": b'{"prompt":"a\\u0000b"}',
    "long": json.dumps({"prompt": "x " * 500_000}).encode(),
    "brackets": json.dumps({"prompt": "(" * 1_000_000}).encode(),
    "tags": json.dumps({"prompt": "<lora:pixel:1>" * 20_000}).encode(),
    "LoRAs": json.dumps({"prompt": "x", "loras": ["pixel"] * 1000}).encode(),
    "list": b"[]", "text": b'"x"', "null": b"null", "empty": b"", "bytes": b"\xff\xfe", "more": b'{"prompt":"x"} x',
}  # fmt: skip


@pytest.mark.parametrize("name", JSONS)
def test_json_that_is_wrong_is_refused_by_every_face(worker: Worker, name: str) -> None:
    for face in FACES:
        refused(worker.http.post(face, content=JSONS[name], headers={"Content-Type": "application/json"}))


def test_other_content_types_are_refused(worker: Worker) -> None:
    for face in FACES:
        for kind in ("text/plain", "application/xml", "multipart/form-data", "multipart/form-data; boundary="):
            answer = worker.http.post(face, content=b'{"prompt":"x"}', headers={"Content-Type": kind})
            assert refused(answer).status_code == 415
    for files in ([("image", ("a", b"x"))] * 1000, [(f"f{number}", (None, b"x")) for number in range(1000)]):
        refused(worker.http.post("/v1/images/edits", files=files))
    for number in (b"\xb2", b"-1", b"x"):
        refused(worker.http.get("/v1/jobs/nosuch/events", headers={b"Last-Event-ID": number}))


def test_ten_thousand_ranges_are_one_answer(worker: Worker) -> None:
    url = worker.ended(worker.submit(steps=1))["result"]["images"][0]["url"]
    whole = worker.http.get(url).content
    ranges = ",".join(f"{number}-{number}" for number in range(10_000))
    answer = worker.http.get(url, headers={"Range": f"bytes={ranges}"})
    assert answer.status_code in (200, 400, 416, 431) and len(answer.content) <= len(whole)
    job = url.split("/")[3]
    refused(worker.http.get(f"/v1/jobs/{job}/events", headers={b"Last-Event-ID": b"\xb2"}))


_WRONG: tuple[Any, ...] = ([[]], {"x": 1}, "x", 2**63, [], {}, -1, 1.5, True, "\u202e")
WRONG = _WRONG[: sized(4, len(_WRONG))]
FIELDS = (
    "prompt",
    "negative_prompt",
    "seed",
    "steps",
    "cfg_scale",
    "width",
    "height",
    "batch_size",
    "n_iter",
    "clip_skip",
    "loras",
    "on_mismatch",
    "override_settings",
    "styles",
    "alwayson_scripts",
    "script_name",
    "infotext",
    "init_images",
    "mask",
    "mask_blur",
    "denoising_strength",
    "resize_mode",
    "inpainting_mask_invert",
    "sampler_name",
    "scheduler",
    "force_task_id",
)


def test_a1111_survives_wrong_types_in_every_field(worker: Worker) -> None:
    """A step count of 0 makes sure that nothing runs."""
    for field in FIELDS:
        for value in WRONG:
            body = {"prompt": "x", "steps": 0, "init_images": [text(encoded(Image.new("RGB", (64, 64))))]} | {
                field: value
            }
            body["steps"] = value if field == "steps" and value not in (True,) else 0
            refused(worker.http.post(f"/sdapi/v1/{'img2img' if field in FIELDS[17:23] else 'txt2img'}", json=body))
    for route, field in (
        ("options", "sd_model_checkpoint"),
        ("options", "CLIP_stop_at_last_layers"),
        ("png-info", "image"),
    ):
        for value in WRONG:
            answer = worker.http.post(f"/sdapi/v1/{route}", json={field: value})
            assert answer.status_code < 500, answer.text
    for value in WRONG:
        assert (
            worker.http.post("/internal/progress", json={"id_task": value, "id_live_preview": value}).status_code < 500
        )


def test_a1111_takes_null_for_everything(worker: Worker) -> None:
    body = dict.fromkeys((*FIELDS, "tiling", "eta", "send_images", "save_images", "enable_hr", "hr_scale", "subseed"))
    for prompt in (None, "x"):
        answer = worker.http.post("/sdapi/v1/txt2img", json={**body, "prompt": prompt, **SMALL})
        assert answer.status_code == 200 and len(answer.json()["images"]) == 1, answer.text[:300]


def test_a_body_that_stops_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.05)
    application = create_app(ServeSettings(data=Path("/nonexistent")))

    async def call() -> list[Any]:
        sent: list[Any] = []

        async def receive() -> Any:
            await asyncio.sleep(60)

        async def send(message: Any) -> None:
            sent.append(message)

        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/v1/queue",
            "raw_path": b"/v1/queue",
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"127.0.0.1:7870"), (b"content-length", b"10")],
            "http_version": "1.1",
            "scheme": "http",
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 7870),
            "state": {},
            "app": None,
        }
        await application(scope, receive, send)  # type: ignore[arg-type]
        return sent

    assert asyncio.run(call())[0]["status"] == 408
    assert asyncio.run(ask("GET", "/health", {}, application))[0] == 200
