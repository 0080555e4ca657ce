"""The gallery over HTTP: images of jobs stay, are found again, sorted, deleted and restored."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image, PngImagePlugin

from tests.serve.test_gallery_store import png
from tests.serve.worker import SMALL, Worker

ACCOUNTS = """
[alice]
token = "alice-token"
[bob]
token = "bob-token"
"""


@pytest.fixture(scope="module")
def own_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Yield a worker whose images are in a folder of their own."""
    folder = tmp_path_factory.mktemp("gallery")
    names = "[model_name]/[seed]-[prompt_words]"
    running = Worker(folder / "data", "--pictures", str(folder / "images"), "--picture-names", names).start()
    yield running
    running.stop()


def folder_of(worker: Worker) -> Path:
    return worker.data.parent / "images"


def images_of(worker: Worker, **query: Any) -> list[dict[str, Any]]:
    answer = worker.http.get("/v1/gallery", params=query)
    assert answer.status_code == 200, answer.text
    images: list[dict[str, Any]] = answer.json()["images"]
    return images


def post(worker: Worker, path: str, **body: Any) -> Any:
    answer = worker.http.post(f"/v1/gallery/{path}", json=body)
    assert answer.is_success, answer.text
    return answer.json()


def made(worker: Worker, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return (a job that is done, its images in the gallery by their places)."""
    job = worker.ended(worker.submit(**SMALL | fields))
    assert job["state"] == "done", job["error"]
    return job, sorted(images_of(worker, job=job["id"]), key=lambda image: image["place"])


def test_images_are_there_when_their_job_is_done_and_stay_when_it_is_forgotten(own_worker: Worker) -> None:
    job, images = made(own_worker, prompt="a blue boat <lora:pixel:0.5>", seed=11, count=2, negative_prompt="blur")
    assert [image["gallery"] for image in job["result"]["images"]] == [image["id"] for image in images]
    assert [image["seed"] for image in images] == ["11", "12"]
    first = images[0]
    assert first["prompt"] == "a blue boat <lora:pixel:0.5>" and first["negative_prompt"] == "blur"
    assert (first["model"], first["loras"], first["width"]) == ("inweave/emoji", ["pixel"], 64)
    path = folder_of(own_worker) / first["path"]
    assert first["path"] == "inweave_emoji/11-a-blue-boat.png"
    of_job = own_worker.http.get(job["result"]["images"][0]["url"]).content
    assert path.read_bytes() == of_job == own_worker.http.get(first["url"]).content
    assert b"a blue boat" in of_job  # the infotext
    assert own_worker.http.delete(f"/v1/jobs/{job['id']}", params={"forget": True}).status_code == 200
    assert own_worker.http.get(job["result"]["images"][0]["url"]).status_code == 410
    assert own_worker.http.get(first["url"]).content == of_job and len(images_of(own_worker, job=job["id"])) == 2
    settings = own_worker.http.get(f"/v1/gallery/{first['id']}/settings").json()
    assert settings["settings"]["seed"] == 11 and settings["loras"][0]["id"] is not None and not settings["warnings"]


def test_a_job_may_leave_its_images_out(own_worker: Worker) -> None:
    job, images = made(own_worker, prompt="a draft", gallery=False)
    assert images == [] and "gallery" not in job["result"]["images"][0]
    request = {"prompt": "a draft", "do_not_save_samples": True, **SMALL}
    assert own_worker.http.post("/sdapi/v1/txt2img", json=request).status_code == 200
    assert images_of(own_worker, q="a draft") == []
    assert own_worker.http.post("/sdapi/v1/txt2img", json={**request, "do_not_save_samples": False}).is_success
    assert len(images_of(own_worker, q="a draft")) == 1


def test_a_restart_and_a_kill_keep_the_gallery(own_worker: Worker) -> None:
    job, images = made(own_worker, prompt="over a restart", seed=3)
    own_worker.kill()
    own_worker.start()
    assert images_of(own_worker, job=job["id"]) == images
    assert own_worker.http.get(images[0]["url"]).headers["content-type"] == "image/png"


def test_lists_are_paged_searched_and_counted(own_worker: Worker) -> None:
    _, images = made(own_worker, prompt="zebra crossing", count=5, seed=100)
    answer = own_worker.http.get("/v1/gallery", params={"q": "ZEBRA", "limit": 2}).json()
    assert answer["total"] == 5 and len(answer["images"]) == 2
    ids = [image["id"] for image in answer["images"]]
    while answer["next"]:
        answer = own_worker.http.get("/v1/gallery", params={"q": "zebra", "limit": 2, "cursor": answer["next"]}).json()
        assert answer["total"] is None
        ids += [image["id"] for image in answer["images"]]
    assert len(ids) == len(set(ids)) == 5 and set(ids) == {image["id"] for image in images}
    assert images_of(own_worker, q="zebra nosuch") == [] == images_of(own_worker, q="zebra", lora="pixel")
    assert len(images_of(own_worker, q="zebra", model="inweave/emoji")) == 5
    facets = own_worker.http.get("/v1/gallery/facets").json()
    assert facets["models"][0]["name"] == "inweave/emoji" and facets["images"] >= 5 and facets["trash_days"] == 7


def test_stars_and_albums(own_worker: Worker) -> None:
    _, images = made(own_worker, prompt="starry", count=2)
    ids = [image["id"] for image in images]
    assert post(own_worker, "star", images=ids[:1], starred=True) == {"images": 1}
    assert [image["id"] for image in images_of(own_worker, q="starry", starred=True)] == ids[:1]
    album = post(own_worker, "albums", name=" Night ")
    assert album["name"] == "Night"
    assert own_worker.http.post("/v1/gallery/albums", json={"name": "Night"}).status_code == 409
    assert post(own_worker, f"albums/{album['id']}/images", images=ids)["images"] == 2
    assert len(images_of(own_worker, album=album["id"])) == 2
    post(own_worker, f"albums/{album['id']}/images", images=ids[:1], present=False)
    assert [image["albums"] for image in images_of(own_worker, album=album["id"])] == [[album["id"]]]
    [listed] = own_worker.http.get("/v1/gallery/albums").json()["albums"]
    assert listed["images"] == 1 and own_worker.http.get(listed["cover"]).status_code == 200
    at = f"/v1/gallery/albums/{album['id']}"
    assert own_worker.http.patch(at, json={"name": "Day"}).json()["name"] == "Day"
    assert own_worker.http.delete(at).status_code == 200 and own_worker.http.delete(at).status_code == 404
    assert own_worker.http.get("/v1/gallery", params={"album": album["id"]}).status_code == 404
    assert len(images_of(own_worker, q="starry")) == 2


def test_deleting_can_be_undone_until_it_is_final(own_worker: Worker) -> None:
    job, images = made(own_worker, prompt="oops", count=3)
    ids = [image["id"] for image in images]
    assert post(own_worker, "delete", images=[*ids[:2], "image-nosuch"])["deleted"] == ids[:2]
    assert len(images_of(own_worker, q="oops")) == 1 and len(images_of(own_worker, q="oops", trashed=True)) == 2
    assert not (folder_of(own_worker) / images[0]["path"]).exists()
    assert [image["path"] for image in post(own_worker, "restore", images=ids[:2])["images"]] == [
        image["path"] for image in images[:2]
    ]
    assert len(images_of(own_worker, q="oops")) == 3
    assert post(own_worker, "purge", images=ids) == {"purged": 0}  # only from the trash
    post(own_worker, "delete", images=ids[:1])
    assert post(own_worker, "purge", images=ids) == {"purged": 1}
    assert own_worker.http.get(images[0]["url"]).status_code == 404
    assert len(own_worker.job(job["id"])["result"]["images"]) == 2  # the copy of its job is gone too
    assert own_worker.http.get(job["result"]["images"][0]["url"]).status_code == 404


def test_deleting_an_image_of_a_job_moves_its_copy_into_the_trash_unless_it_is_kept(own_worker: Worker) -> None:
    job, images = made(own_worker, prompt="of a job", count=2)
    urls = [image["url"] for image in job["result"]["images"]]
    assert own_worker.http.delete(urls[0], params={"keep": True}).json()["trashed"] == []
    assert own_worker.http.delete(urls[1]).json()["trashed"] == [images[1]["id"]]
    assert [image["id"] for image in images_of(own_worker, q="of a job")] == [images[0]["id"]]
    assert post(own_worker, "restore", images=[images[1]["id"]])["images"][0]["id"] == images[1]["id"]


def infotext_png(text: str, size: tuple[int, int] = (600, 400)) -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text("parameters", text)
    content = io.BytesIO()
    Image.new("RGB", size, "purple").save(content, format="PNG", pnginfo=info)
    return content.getvalue()


def test_files_are_imported_unchanged_with_their_settings(own_worker: Worker) -> None:
    content = infotext_png("a castle <lora:towers:1>\nSteps: 9, Sampler: Euler a, CFG scale: 4, Seed: 5, Model: other")
    answer = own_worker.http.post(
        "/v1/gallery", params={"name": "old/castle.png", "modified": 1_600_000_000}, content=content
    )
    image = answer.json()
    assert answer.status_code == 201 and image["path"] == "imported/old/castle.png" and image["created"] == 1.6e9
    assert (image["prompt"], image["seed"], image["model"], image["loras"], image["width"]) == (
        "a castle <lora:towers:1>", "5", "other", ["towers"], 600,
    )  # fmt: skip
    assert own_worker.http.get(image["url"]).content == content
    again = own_worker.http.post("/v1/gallery", params={"name": "other.png"}, content=content)
    assert again.status_code == 200 and again.json()["id"] == image["id"]
    small = own_worker.http.get(image["thumbnail"])
    assert small.headers["content-type"] == "image/webp" and "immutable" in small.headers["cache-control"]
    with Image.open(io.BytesIO(small.content)) as opened:
        assert opened.size == (384, 256)
    assert [each["id"] for each in images_of(own_worker, lora="towers")] == [image["id"]]


def test_a_turned_photo_keeps_its_format_and_is_shown_upright(own_worker: Worker) -> None:
    content, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (800, 400), "white").save(content, format="JPEG", exif=exif)
    image = own_worker.http.post("/v1/gallery", params={"name": "photo.png"}, content=content.getvalue()).json()
    assert (image["width"], image["height"], image["name"]) == (400, 800, "photo.jpg")
    assert own_worker.http.get(image["url"]).headers["content-type"] == "image/jpeg"
    with Image.open(io.BytesIO(own_worker.http.get(image["thumbnail"]).content)) as opened:
        assert opened.size == (192, 384)


def test_what_is_not_an_image_is_refused(own_worker: Worker) -> None:
    bmp = io.BytesIO()
    Image.new("RGB", (8, 8)).save(bmp, format="BMP")
    for content in (b"", b"hello", png()[:40], b"<svg onload=alert(1)>", bmp.getvalue()):
        answer = own_worker.http.post("/v1/gallery", params={"name": "x.png"}, content=content)
        assert answer.status_code == 400, (content, answer.text)
    assert not list((folder_of(own_worker) / "imported").glob("x*"))


def test_files_in_the_folder_are_noticed_and_never_served_from_outside(own_worker: Worker) -> None:
    folder = folder_of(own_worker)
    (folder / "mine").mkdir()
    (folder / "mine" / "copied.png").write_bytes(infotext_png("a copied castle\nSteps: 9, Seed: 5"))
    (folder / "mine" / "broken.png").write_bytes(b"no image")
    counts = own_worker.http.post("/v1/gallery/refresh").json()
    assert counts == {"read": 1, "missing": 0, "returned": 0, "skipped": 1}
    assert own_worker.http.post("/v1/gallery/refresh").json()["skipped"] == 0
    [image] = images_of(own_worker, q="copied castle")
    secret = folder.parent / "secret.png"
    secret.write_bytes(png())
    (folder / "mine" / "copied.png").unlink()
    (folder / "mine" / "copied.png").symlink_to(secret)
    assert own_worker.http.get(image["url"]).status_code == 404
    assert own_worker.http.post("/v1/gallery/refresh").json()["missing"] == 1
    assert images_of(own_worker, q="copied castle") == []


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "image-nosuch", None), ("GET", "image-nosuch/file", None), ("GET", "image-nosuch/thumbnail", None),
        ("GET", "image-nosuch/settings", None), ("GET", "..%2F..%2Fetc/file", None),
        ("POST", "albums/album-x/images", {"images": ["image-nosuch"]}), ("PATCH", "albums/album-x", {"name": "x"}),
    ],
)  # fmt: skip
def test_unknown_names_are_not_there(own_worker: Worker, method: str, path: str, body: Any) -> None:
    assert own_worker.http.request(method, f"/v1/gallery/{path}", json=body).status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("delete", {}), ("delete", {"images": []}), ("delete", {"images": ["x"] * 1001}), ("star", {"images": [1]}),
        ("albums", {"name": "  "}), ("albums", {"name": ""}), ("purge", {"images": []}),
    ],
)  # fmt: skip
def test_bodies_without_sense_are_refused(own_worker: Worker, path: str, body: Any) -> None:
    assert own_worker.http.post(f"/v1/gallery/{path}", json=body).status_code == 400


def test_a_file_name_in_a_header_is_quoted(own_worker: Worker) -> None:
    image = own_worker.http.post("/v1/gallery", params={"name": 'ü";x=.png'}, content=png("navy")).json()
    header = own_worker.http.get(image["url"], params={"download": True}).headers["content-disposition"]
    assert header.startswith("attachment; filename*=utf-8''") and '"' not in header


def test_a_gallery_that_cannot_be_written_fails_no_job(own_worker: Worker) -> None:
    folder = folder_of(own_worker)
    folder.rename(folder.with_name("unplugged"))
    try:
        job = own_worker.ended(own_worker.submit(**SMALL))
        assert job["state"] == "done" and "gallery" in job["result"]["warnings"][-1]
        assert own_worker.http.get(job["result"]["images"][0]["url"]).status_code == 200
        assert own_worker.http.post("/v1/gallery/refresh").status_code == 507
    finally:
        folder.with_name("unplugged").rename(folder)
    assert made(own_worker)[1]


def test_accounts_see_their_own_images_alone(tmp_path: Path) -> None:
    accounts = tmp_path / "accounts.toml"
    accounts.write_text(ACCOUNTS)
    worker = Worker(tmp_path / "data", "--tokens", str(accounts), token="the-worker-token").start()
    try:
        clients = {
            name: httpx.Client(base_url=worker.url, headers={"Authorization": f"Bearer {name}-token"})
            for name in ("alice", "bob", "the-worker")
        }
        request = {"prompt": "private", **SMALL}
        job = worker.ended(clients["alice"].post("/v1/jobs", json=request).json()["id"])
        image = clients["alice"].get("/v1/gallery").json()["images"][0]
        assert image["path"].startswith("@alice/") and image["job"] == job["id"]
        for other in ("bob", "the-worker"):
            client = clients[other]
            assert client.get("/v1/gallery").json() == {"images": [], "next": None, "total": 0}
            assert client.get("/v1/gallery", params={"job": job["id"]}).json()["images"] == []
            for address in (image["url"], image["thumbnail"], f"/v1/gallery/{image['id']}"):
                assert client.get(address).status_code == 404
            body = {"images": [image["id"]]}
            assert client.post("/v1/gallery/delete", json=body).json() == {"deleted": []}
            assert client.post("/v1/gallery/star", json=body).json() == {"images": 0}
            assert client.get("/v1/gallery/facets").json()["images"] == 0
        # another account may delete the file of a job, as before, and leaves the copy of its owner
        assert clients["bob"].delete(job["result"]["images"][0]["url"]).json()["trashed"] == []
        assert clients["alice"].get(image["url"]).status_code == 200
        assert httpx.get(f"{worker.url}{image['url']}").status_code == 401
    finally:
        worker.stop()


def test_a_worker_may_go_without_a_gallery(tmp_path: Path) -> None:
    worker = Worker(tmp_path / "data", "--no-gallery").start()
    try:
        job = worker.ended(worker.submit(**SMALL))
        assert job["state"] == "done" and "gallery" not in job["result"]["images"][0]
        assert not (tmp_path / "data" / "images").exists()
        answer = worker.http.get("/v1/gallery")
        assert answer.status_code == 404 and "--no-gallery" in answer.text
        assert "gallery" not in worker.http.get("/v1/capabilities").json()["features"]
        assert worker.http.delete(job["result"]["images"][0]["url"]).status_code == 200
    finally:
        worker.stop()


def test_a_folder_that_cannot_be_used_ends_the_start_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    worker = Worker(tmp_path / "data", "--pictures", str(tmp_path / "file" / "images"))
    with pytest.raises(AssertionError, match="--pictures"):
        worker.start()
