"""LoRAs over HTTP: uploaded, checked, used, deleted; hostile ones change nothing."""

from __future__ import annotations

import shutil
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inweave.formats.files import write_file
from inweave.models import embedded
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
    write_file(tmp_path / "nan.safetensors", {
        "lora_unet_x.lora_down.weight": tensor(np.full((2, 4), np.nan)), "lora_unet_x.lora_up.weight": tensor(np.ones((4, 2))),
    })  # fmt: skip
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


TRAVERSALS = [
    f"{prefix}{middle}{target}"
    for prefix in ("", "/", "./", "~/", "~root/", "file:", "C:\\", "\\\\server\\share\\")
    for middle in ("", "../", "..\\", "....//", "%2e%2e%2f", "..%2f", "..%c0%af", "styles/../../")
    for target in ("etc/passwd", "jobs.sqlite3", "pixel.safetensors\x00.png", "$HOME", "pix\nel", "\u202egnp.lexip", "<img src=x onerror=alert(1)>")
]  # fmt: skip


def test_no_reference_opens_anything_outside_the_library(worker: Worker) -> None:
    assert len(TRAVERSALS) > 300
    for reference in TRAVERSALS:
        quoted = urllib.parse.quote(reference, safe="")
        answer = worker.http.get(f"/v1/loras/{quoted}")
        assert answer.status_code in (400, 404, 409), (reference, answer.text)
        assert "root:" not in answer.text
    for reference in TRAVERSALS[::20]:
        answer = worker.http.post("/v1/jobs", json={"prompt": "x", "loras": [{"path": reference}]})
        assert answer.status_code in (400, 404, 409), (reference, answer.text)


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
    shutil.copy(PIXEL, path)
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
