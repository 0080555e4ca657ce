"""LoRAs over HTTP: uploaded, checked, used, deleted; hostile ones change nothing."""

from __future__ import annotations

import asyncio
import io
import shutil
import unicodedata
import urllib.parse
import zipfile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from inweave.errors import MissingError
from inweave.exchange.load import load
from inweave.formats.files import write_file
from inweave.library import LibraryEntry
from inweave.library.entry import LibraryFacts
from inweave.models import embedded
from inweave.serve.app import create_app
from inweave.serve.sandbox.client import SandboxClient
from inweave.serve.sandbox.conversions import MAX_KEPT, ConversionStore
from inweave.serve.settings import ServeSettings
from tests.bad_files import BAD
from tests.serve.worker import Worker
from tests.support import lora_listing, tensor, write_sparse

PIXEL = embedded.loras()["pixel"]


def test_an_uploaded_file_is_checked_used_and_deleted(worker: Worker) -> None:
    answer = worker.http.post("/v1/loras", params={"name": "uploaded"}, content=PIXEL.read_bytes())
    assert answer.status_code == 201, answer.text
    entry = answer.json()
    assert entry["name"] == "uploaded" and entry["base"] == "inweave/emoji"
    again = worker.http.post("/v1/loras", params={"name": "uploaded"}, content=PIXEL.read_bytes()).json()
    assert again["name"] == "uploaded-2"
    job = worker.ended(worker.submit(loras=["uploaded"]))
    assert job["state"] == "done" and job["result"]["loras"][0]["modules"] == 100
    assert worker.http.get("/v1/loras/uploaded/file").content == PIXEL.read_bytes()
    for name in ("uploaded", "uploaded-2"):
        assert worker.http.delete(f"/v1/loras/{name}").status_code == 200
    assert worker.http.get("/v1/loras/uploaded").status_code == 404
    assert worker.http.delete("/v1/loras/pixel").status_code == 409  # the package's own


def test_files_that_are_no_adapters_are_refused(worker: Worker, tmp_path: Path) -> None:
    write_file(
        tmp_path / "nan.safetensors",
        {
            "lora_unet_x.lora_down.weight": tensor(np.full((2, 4), np.nan)),
            "lora_unet_x.lora_up.weight": tensor(np.ones((4, 2))),
        },
    )
    contents = {
        "nan": (tmp_path / "nan.safetensors").read_bytes(),
        "pickle": b"\x80\x02}q\x00.",
        "empty": b"",
        "text": b"x" * 100,
    }
    for name, content in contents.items():
        answer = worker.http.post("/v1/loras", params={"name": name}, content=content)
        assert answer.status_code == 422, (name, answer.text)
        assert "/" not in answer.json()["error"]["message"].replace("N/A", ""), answer.text
        assert worker.http.get(f"/v1/loras/{name}").status_code == 404
    assert not list((worker.data / "incoming").iterdir())


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "..", ".x", "a\\b", "con\x00", "<img src=x onerror=alert(1)>", "x" * 200, " ", "\u202egnp"]
)
def test_hostile_names_of_uploads_are_refused(worker: Worker, name: str) -> None:
    assert worker.http.post("/v1/loras", params={"name": name}, content=PIXEL.read_bytes()).status_code == 400


def test_a_lora_of_another_base_is_refused_with_a_report(worker: Worker) -> None:
    path = worker.data / "loras" / "sdxl-style.safetensors"
    listing: Any = lora_listing("gen_kohya_sdxl_lora")
    write_sparse(path, listing["tensors"])
    worker.http.post("/v1/loras/refresh")
    answer = worker.http.post("/v1/jobs", json={"prompt": "x", "loras": ["sdxl-style"]})
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["code"] == "lora_mismatch" and "sdxl" in error["message"] and error["report"]["placed"] == 0
    path.unlink()


def test_a_file_that_is_swapped_after_it_was_indexed_fails_its_job_alone(worker: Worker) -> None:
    path = worker.data / "loras" / "swapped.safetensors"
    content = bytearray(PIXEL.read_bytes())
    content[-1] ^= 1  # another file with the contents of pixel would do
    path.write_bytes(content)
    worker.http.post("/v1/loras/refresh")
    worker.http.post("/v1/queue", json={"paused": True})
    job = worker.submit(loras=["swapped"])
    path.write_bytes(b"gone bad")
    worker.http.post("/v1/queue", json={"paused": False})
    ended = worker.ended(job)
    assert ended["state"] == "failed" and "swapped" in ended["error"]["message"]
    assert str(worker.data) not in ended["error"]["message"]
    assert worker.ended(worker.submit())["state"] == "done"
    path.unlink()


def test_broken_files_in_a_folder_do_not_stop_the_library(worker: Worker) -> None:
    folder = worker.data / "loras" / "bad"
    for name, bad in BAD.items():
        (folder / name).mkdir(parents=True)
        bad.make(folder / name)
    assert worker.http.post("/v1/loras/refresh").status_code == 200
    assert (
        "cut short"
        in worker.http.get("/v1/loras/" + urllib.parse.quote("bad/cut-in-header/cut", safe="")).json()["health"][0]
    )
    assert worker.ended(worker.submit(loras=["pixel"]))["state"] == "done"
    shutil.rmtree(folder)


def test_where_every_tensor_goes_on_any_base(worker: Worker) -> None:
    question = {"lora": "pixel", "placements": True}
    on_model = worker.http.post("/v1/loras/check", json=question).json()
    rows = on_model["verdict"]["placements"]
    assert on_model["verdict"]["ok"] and len(rows) == 100
    assert sorted(key for row in rows for key in row["keys"]) == sorted(load(PIXEL).tensors)
    assert rows[0].keys() >= {"component", "tensor", "shape", "algorithm"} and rows[0]["component"] == "unet"
    assert "placements" not in worker.http.post("/v1/loras/check", json={"lora": "pixel"}).json()["verdict"]
    other = worker.http.post("/v1/loras/check", json={**question, "base": "SDXL"}).json()
    assert other["base"] == "sdxl" and not other["verdict"]["ok"] and other["verdict"]["placements"] == []
    assert other["verdict"]["unplaced"][0]["nearest"]
    for wrong in ("/etc", "nonsense", "../x", str(PIXEL)):
        answer = worker.http.post("/v1/loras/check", json={"lora": "pixel", "base": wrong})
        assert answer.status_code == 400 and "root" not in answer.text, answer.text
    assert worker.http.post("/v1/loras/check", json={**question, "base": "sdxl", "model": "x"}).status_code == 400
    capabilities = worker.http.get("/v1/capabilities").json()
    assert "sdxl" in capabilities["bases"] and "kohya" in capabilities["dialects"]


def test_a_lora_is_converted_and_downloaded(worker: Worker, tmp_path: Path) -> None:
    answer = worker.http.post("/v1/loras/convert", json={"lora": "pixel", "to": "diffusers"})
    assert answer.status_code == 201, answer.text
    report = answer.json()
    assert (report["file"], report["dialect"], report["ok"]) == ("pixel-diffusers.safetensors", "diffusers", True)
    file = worker.http.get(report["url"])
    assert len(file.content) == report["bytes"] and "pixel-diffusers.safetensors" in file.headers["content-disposition"]
    (tmp_path / "d.safetensors").write_bytes(file.content)
    assert load(tmp_path / "d.safetensors").dialects == ("diffusers-peft",)
    peft = worker.http.post("/v1/loras/convert", json={"lora": "pixel", "to": "peft"}).json()
    archive = zipfile.ZipFile(io.BytesIO(worker.http.get(peft["url"]).content))
    assert sorted(archive.namelist()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_what_cannot_be_converted_is_named_and_leaves_nothing(worker: Worker) -> None:
    before = sorted((worker.data / "converted").glob("*"))
    for wish, status in (
        ({"to": "bfl"}, 422), ({"to": "nonsense"}, 400), ({"to": "../x"}, 400), ({"to": "kohya", "base": "/etc"}, 400),
        ({"to": "kohya", "lora": "nosuch"}, 404), ({"to": "kohya", "lora": "../../etc/passwd"}, 404), ({}, 400),
    ):  # fmt: skip
        answer = worker.http.post("/v1/loras/convert", json={"lora": "pixel", **wish})
        assert answer.status_code == status, (wish, answer.text)
        assert str(worker.data) not in answer.text
    assert sorted((worker.data / "converted").glob("*")) == before
    for identifier in ("x", "..%2f..", "0" * 32):
        assert worker.http.get(f"/v1/conversions/{identifier}").status_code == 404
    evil = worker.http.post(
        "/v1/loras/convert", json={"lora": "pixel", "to": "kohya"}, headers={"Origin": "http://evil"}
    )
    assert evil.status_code == 403


def test_old_conversions_make_room(tmp_path: Path) -> None:
    class Writer(SandboxClient):
        async def convert(self, path: str, target: str, *rest: Any, **more: Any) -> dict[str, Any]:
            (Path(target) / "adapter.safetensors").write_bytes(b"x")
            return {"file": "adapter.safetensors"}

    async def fill() -> None:
        store = ConversionStore(tmp_path / "converted", Writer())
        entry = LibraryEntry("id", str(tmp_path), "<b>.safetensors", 1, 0.0, LibraryFacts(), None)
        reports = [await store.create(entry, to="kohya", base=None, drop=False) for _ in range(MAX_KEPT + 2)]
        assert len(list((tmp_path / "converted").iterdir())) == MAX_KEPT
        assert store.file(reports[-1]["id"])[1] == "<b>-kohya.safetensors"
        with pytest.raises(MissingError, match="convert the LoRA again"):
            store.file(reports[0]["id"])
        store.clear()
        assert not (tmp_path / "converted").exists()

    asyncio.run(fill())


def test_names_of_other_scripts_are_names(worker: Worker) -> None:
    for name in ("水彩", "aquarelle e\u0301te\u0301", "акварель 2"):
        answer = worker.http.post("/v1/loras", params={"name": name}, content=PIXEL.read_bytes())
        assert answer.status_code == 201, answer.text
        entry = answer.json()
        assert entry["name"] == unicodedata.normalize("NFC", name) and entry["removable"]
        assert worker.http.delete(f"/v1/loras/{urllib.parse.quote(entry['name'])}").status_code == 200
    assert worker.http.post("/v1/loras", params={"name": "水" * 120}, content=b"").status_code == 400
    assert not worker.http.get("/v1/loras/pixel").json()["removable"]


def test_a_lora_may_be_larger_than_other_requests(tmp_path: Path) -> None:
    settings = ServeSettings(data=tmp_path, body_bytes=1024, lora_bytes=4096)
    transport = httpx.ASGITransport(create_app(settings), raise_app_exceptions=False)

    async def statuses() -> list[int]:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            sizes = (("/v1/loras", 2000), ("/v1/loras", 5000), ("/v1/loras/check", 2000), ("/v1/jobs", 2000))
            return [(await client.post(path, content=b"x" * size)).status_code for path, size in sizes]

    assert asyncio.run(statuses()) == [400, 413, 413, 413]  # the first one only lacks its name


def test_files_of_one_layout_have_their_own_numbers_of_modules(worker: Worker) -> None:
    """The second file takes the plan of the first one."""
    for name in ("pixel", "ink"):
        job = worker.ended(worker.submit(loras=[name], steps=1, width=64, height=64))
        (lora,) = job["result"]["loras"]
        assert lora["modules_in_file"] == lora["modules"] > 0, name


def test_a_fresh_library_is_waited_for_and_uploads_get_names_that_no_folder_has(tmp_path: Path) -> None:
    """Two files of one path in two folders could not be told apart, and the package's own would be overridden."""
    (tmp_path / "loras").mkdir()
    shipped = embedded.folder() / "loras" / "ink.safetensors"
    (tmp_path / "loras" / "mine.safetensors").write_bytes(shipped.read_bytes())
    running = Worker(tmp_path / "data", "--lora-dir", str(tmp_path / "loras")).start(wait=False)
    try:
        early = [
            running.http.get("/v1/loras/pixel"),
            running.http.post("/v1/jobs", json={"prompt": "x", "loras": ["pixel", "ink"]}),
            running.http.post("/sdapi/v1/txt2img", json={"prompt": "<lora:pixel:1>"}),
        ]
        statuses = [answer.status_code for answer in early]
        assert statuses[:2] == [503] * 2 and statuses[2] in (200, 503), "the folders are being read, for a while"
        assert early[1].json()["error"]["code"] == "not_ready" and int(early[1].headers["retry-after"]) > 0
        running.wait_ready()
        assert running.http.get("/v1/loras/pixel").status_code == 200, "ready includes the library"
        assert running.http.get("/v1/loras/nosuch").status_code == 404
        for name in ("mine", "ink", "mine", "other"):
            answer = running.http.post("/v1/loras", params={"name": name}, content=shipped.read_bytes())
            assert answer.status_code == 201, answer.text
        listed = running.http.get("/v1/loras").json()["loras"]
        paths = [lora["path"] for lora in listed if lora["name"].split("-")[0] in ("mine", "ink", "other")]
        stems = ("ink", "ink-2", "mine", "mine-2", "mine-3", "other")
        assert sorted(paths) == sorted(f"{stem}.safetensors" for stem in stems)
        job = running.ended(running.submit(loras=["mine"], steps=1, width=64, height=64))
        assert job["state"] == "done"
        for path in ("/etc/passwd", "../../secret.safetensors", "~/x.safetensors", r"C:\\x.safetensors"):
            refused = running.http.post("/v1/jobs", json={"prompt": "x", "loras": [{"path": path}]})
            assert refused.status_code == 404 and "outside the folders" in refused.json()["error"]["message"]
            assert str(running.data) not in refused.text, "the request is repeated, folders are not listed"
    finally:
        assert running.stop() == 0
