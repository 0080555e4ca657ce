"""Images that are sent once and named in jobs by their id."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from inweave.errors import MissingError, RequestError
from inweave.serve.jobs.errors import GoneError
from inweave.serve.storage.uploads import UploadStore
from tests.serve.worker import SMALL, Worker


def image_bytes(color: str = "red", size: tuple[int, int] = (64, 64), kind: str = "PNG", **options: Any) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size, color).save(content, format=kind, **options)
    return content.getvalue()


def half_mask() -> bytes:
    content = io.BytesIO()
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (0, 0, 32, 64))
    mask.save(content, format="PNG")
    return content.getvalue()


def send(worker: Worker, content: bytes) -> str:
    answer = worker.http.post("/v1/uploads", content=content)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def image_of(worker: Worker, **fields: Any) -> bytes:
    done = worker.ended(worker.submit(seed=5, **SMALL | {"steps": 2} | fields))
    assert done["state"] == "done", done["error"]
    return worker.http.get(done["result"]["images"][0]["url"]).content


class Clock:
    """A clock that tests advance."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def store(folder: Path, clock: Clock, **limits: Any) -> UploadStore:
    return UploadStore(folder, **{"keep_seconds": 100.0, "max_count": 10, "max_bytes": 10**6, **limits}, clock=clock)


def availability(uploads: UploadStore, names: list[str]) -> list[bool]:
    answers = []
    for name in names:
        try:
            answers.append(uploads.find(name).id == name)
        except GoneError:
            answers.append(False)
    return answers


@pytest.mark.parametrize("way", ["octets", "curl", "image", "wrong type", "multipart", "any field"])
def test_an_image_is_sent_as_bytes_or_as_a_form(worker: Worker, way: str) -> None:
    content = image_bytes(kind="JPEG", size=(96, 64))
    types = {
        "octets": "application/octet-stream", "curl": "application/x-www-form-urlencoded", "image": "image/jpeg",
        "wrong type": "image/png",
    }  # fmt: skip
    if way in types:
        answer = worker.http.post("/v1/uploads", content=content, headers={"Content-Type": types[way]})
    else:
        answer = worker.http.post("/v1/uploads", files={"file" if way == "multipart" else "photo": ("a.jpg", content)})
    assert answer.status_code == 201, answer.text
    facts = answer.json()
    assert (facts["width"], facts["height"]) == (96, 64) and facts["expires"] > facts["created"]
    assert answer.headers["location"] == facts["url"] and worker.http.get(facts["url"]).json() == facts
    stored = worker.http.get(facts["file"])
    assert stored.headers["content-type"] == "image/png" and len(stored.content) == facts["bytes"]
    assert Image.open(io.BytesIO(stored.content)).size == (96, 64)


def test_an_id_is_worth_the_image_in_any_field_that_takes_one(worker: Worker) -> None:
    content = image_bytes("blue")
    fields = {"operation": "image_transform", "strength": 0.6}
    in_base64 = image_of(worker, **fields, image=base64.b64encode(content).decode())
    for name in ("image", "input_image", "init_image"):
        assert image_of(worker, **fields, **{name: send(worker, content)}) == in_base64


def test_a_mask_by_its_id_repaints_what_is_white(worker: Worker) -> None:
    content, mask = image_bytes("blue"), half_mask()
    fields = {"operation": "image_inpaint", "init_image": send(worker, content), "mask_image": send(worker, mask)}
    repainted = image_of(worker, **fields)
    assert repainted == image_of(worker, **fields | {"mask_image": base64.b64encode(mask).decode()})
    right = Image.open(io.BytesIO(repainted)).crop((32, 0, 64, 64))
    assert right.tobytes() == Image.new("RGB", (32, 64), "blue").tobytes()


def test_other_apis_take_an_id_where_they_take_base64(worker: Worker) -> None:
    name = send(worker, image_bytes("green"))
    a1111 = {"prompt": "x", "init_images": [name], "width": 64, "height": 64, "steps": 1}
    assert worker.http.post("/sdapi/v1/img2img", json=a1111).status_code == 200
    edit = worker.http.post(
        "/v1/images/edits", files={"prompt": (None, "x"), "image": (None, name), "steps": (None, "1")}
    )
    assert edit.status_code == 200, edit.text


def test_a_job_keeps_its_image_when_the_upload_goes(worker: Worker) -> None:
    name = send(worker, image_bytes("yellow"))
    worker.http.post("/v1/queue", json={"paused": True})
    try:
        job = worker.submit(operation="image_transform", image=name, **SMALL)
        assert worker.http.delete(f"/v1/uploads/{name}").json() == {"deleted": name}
    finally:
        worker.http.post("/v1/queue", json={"paused": False})
    assert worker.ended(job)["state"] == "done"
    again = worker.http.post(f"/v1/jobs/{job}/retry").json()["id"]
    assert worker.ended(again)["state"] == "done"
    for answer in (
        worker.http.get(f"/v1/uploads/{name}"),
        worker.http.get(f"/v1/uploads/{name}/file"),
        worker.http.delete(f"/v1/uploads/{name}"),
        worker.http.post("/v1/jobs", json={"operation": "image_transform", "prompt": "x", "image": name}),
    ):
        assert answer.status_code == 410 and answer.json()["error"]["code"] == "gone"


@pytest.mark.parametrize("name", ["upload-" + "0" * 24, "upload-", "upload-../../jobs.sqlite3", "upload-x" * 5])
def test_an_id_that_never_was_is_missing(worker: Worker, name: str) -> None:
    body = {"operation": "image_transform", "prompt": "x", "image": name}
    answer = worker.http.post("/v1/jobs", json=body)
    assert answer.status_code == 404 and "upload the image" in answer.json()["error"]["message"]


def test_files_that_are_not_images_are_refused(worker: Worker) -> None:
    post = worker.http.post
    assert post("/v1/uploads", content=b"").status_code == 400
    assert post("/v1/uploads", content=b"hello").status_code == 400
    assert post("/v1/uploads", json={"image": "x"}).status_code == 415
    assert post("/v1/uploads", content=image_bytes(size=(4097, 4096))).status_code == 400  # a pixel too many
    two = [("file", ("a.png", image_bytes())), ("file", ("b.png", image_bytes()))]
    assert post("/v1/uploads", files=two).status_code == 400
    assert post("/v1/uploads", data={"note": "x"}, files={"file": ("a.png", image_bytes())}).status_code == 400
    assert post("/v1/uploads", files={"file": (None, "text")}).status_code == 400
    broken = {"Content-Type": "multipart/form-data; boundary=x"}
    assert post("/v1/uploads", content=b"no form", headers=broken).status_code == 400


def test_the_ones_used_longest_ago_make_room(tmp_path: Path) -> None:
    clock = Clock()
    uploads = store(tmp_path, clock, max_count=3)
    names = []
    for _ in range(3):
        clock.now += 1
        names.append(uploads.add(image_bytes()).id)
    clock.now += 1
    assert uploads.read(names[0]) == image_bytes()
    names += [uploads.add(image_bytes()).id]
    assert availability(uploads, names) == [True, False, True, True]
    assert sorted(path.stem for path in (tmp_path / "uploads").iterdir()) == sorted((names[0], names[2], names[3]))


def test_uploads_are_bounded_in_size_and_time(tmp_path: Path) -> None:
    clock, size = Clock(), len(image_bytes())
    uploads = store(tmp_path, clock, max_bytes=2 * size)
    names = [uploads.add(image_bytes()).id for _ in range(3)]
    assert availability(uploads, names) == [False, True, True]
    with pytest.raises(RequestError, match="may take"):
        uploads.add(image_bytes() + bytes(2 * size))
    clock.now += 99
    uploads.read(names[1])
    clock.now += 2
    assert availability(uploads, names) == [False, True, False]  # also before the next clean-up
    uploads.expire()
    assert [path.stem for path in (tmp_path / "uploads").iterdir()] == [names[1]]


def test_uploads_and_their_ends_survive_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    uploads = store(tmp_path, clock)
    names = [uploads.add(image_bytes()).id for _ in range(2)]
    uploads.remove(names[0])
    (tmp_path / "uploads" / "upload-half.png.part").write_bytes(b"x")  # of a process that was killed while it wrote
    (tmp_path / "uploads" / f"{names[0]}.png").write_bytes(b"x")  # and of one killed while it removed
    again = store(tmp_path, clock)  # the first one was never closed
    assert availability(again, names) == [False, True] and again.read(names[1]) == image_bytes()
    assert [path.stem for path in (tmp_path / "uploads").iterdir()] == [names[1]]
    with pytest.raises(MissingError):
        again.find("upload-" + "0" * 24)


def test_the_memory_of_what_expired_is_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inweave.serve.storage.uploads.TOMBSTONES", 2)
    uploads = store(tmp_path, Clock(), max_count=1)
    names = [uploads.add(image_bytes()).id for _ in range(4)]
    assert availability(uploads, names[2:]) == [False, True]
    with pytest.raises(MissingError):
        uploads.find(names[0])
