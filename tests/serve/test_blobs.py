"""Images in a folder and in an object store: the same answers; an object store that stops loses nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inweave.errors import ConfigError, ConflictError, MissingError
from inweave.serve.jobs import s3
from inweave.serve.jobs.blobs import BlobStore, FolderBlobs
from inweave.serve.jobs.errors import BlobsLost, StorageError
from inweave.serve.jobs.files import JobFiles
from inweave.serve.jobs.job import Submission
from inweave.serve.jobs.s3 import S3Blobs
from inweave.serve.jobs.store import JobStore
from inweave.serve.settings import ServeSettings
from inweave.serve.storage.uploads import UploadStore
from tests.serve.postgres import Postgres
from tests.serve.s3_server import S3Server
from tests.serve.test_several_workers import LONG, ends_once, holder
from tests.serve.test_uploads import image_bytes, send
from tests.serve.worker import SMALL, Worker


@pytest.fixture
def bucket(object_store: S3Server, tmp_path: Path) -> str:
    """Return the location of an empty bucket."""
    return object_store.bucket(f"b-{abs(hash(str(tmp_path)))}")


@pytest.fixture(params=["folder", "bucket", "prefix"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    if request.param == "folder":
        return FolderBlobs(tmp_path / "images")
    location: str = request.getfixturevalue("bucket")
    return S3Blobs.open(location if request.param == "bucket" else f"{location}/of/mine")


def test_contents_are_written_read_listed_and_removed(blobs: BlobStore) -> None:
    part = blobs.part("files")
    part.write("job-1/0.png", b"first")
    part.write("job-1/0.png", b"second")
    part.write("job-1/input-init.png", b"")
    part.write("job-11/0.png", b"x" * 300_000)
    part.write("one.png", b"1")
    assert part.read("job-1/0.png") == b"second" and part.read("job-1/input-init.png") == b""
    assert [part.read(name) for name in ("job-1/1.png", "job-2/0.png", "job-1")] == [None] * 3
    assert part.sizes("job-1") == {"0.png": 6, "input-init.png": 0} and part.sizes("job-2") == {}
    assert sorted(part.ages()) == ["job-1", "job-11", "one.png"]
    assert all(-5 < age < 60 for age in part.ages().values())
    assert blobs.read("files/job-11/0.png") == b"x" * 300_000 and sorted(blobs.ages()) == ["files"]
    part.remove("job-1")
    part.remove("one.png")
    part.remove("nothing")
    assert sorted(part.ages()) == ["job-11"], "job-11 is not below job-1"


def test_more_objects_than_one_answer_lists_are_listed_and_removed(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = S3Blobs.open(bucket)
    monkeypatch.setattr(s3, "BATCH", 3)
    names = [f"{number}.png" for number in range(7)]
    for name in names:
        store.write(f"job/{name}", b"12")
    assert store.sizes("job") == dict.fromkeys(names, 2)
    store.remove("job")
    assert store.sizes("job") == {} and store.ages() == {}


def test_jobs_and_uploads_leave_nothing_behind(blobs: BlobStore, tmp_path: Path) -> None:
    store = JobStore(tmp_path / "data", files=JobFiles(blobs.part("files")))
    job, _ = store.submit(Submission("image_inpaint", "m", {}, {"init.png": b"image", "mask.png": b"mask"}))
    assert store.files.inputs(job.id) == {"init.png": b"image", "mask.png": b"mask"}
    store.claim()
    store.files.write(job.id, "0.png", b"result")
    store.finish(job.id, "done", result={"images": [{"file": "0.png"}]})
    assert store.files.read(job.id, "0.png") == b"result" and store.files.result_bytes(job.id) == 6
    assert store.retry(job.id).inputs == {"init.png": b"image", "mask.png": b"mask"}
    store.files.write("job-lost", "0.png", b"of a dead process")
    store.remove_lost_files(older_than=3600)
    assert sorted(blobs.part("files").ages()) == sorted([job.id, "job-lost"])
    store.remove_lost_files()
    assert sorted(blobs.part("files").ages()) == [job.id]
    store.delete(job.id)
    store.close()
    uploads = UploadStore(tmp_path, keep_seconds=60, max_count=2, max_bytes=10**6, files=blobs.part("uploads"))
    ids = [uploads.add(image_bytes()).id for _ in range(3)]
    assert uploads.read(ids[2]) == image_bytes() and len(blobs.part("uploads").ages()) == 2
    for each in ids[1:]:
        uploads.remove(each)
    uploads.close()
    assert blobs.part("files").ages() == blobs.part("uploads").ages() == {}


@pytest.mark.parametrize("name", ["../0.png", "input-", "input-/../x", "", ".hidden", "0/../../x", "0.png\n"])
def test_a_name_that_no_result_has_reads_nothing(blobs: BlobStore, name: str) -> None:
    files = JobFiles(blobs)
    files.write("job-1", "input-init.png", b"private")
    for ask in (files.read, files.path, files.remove_result):
        with pytest.raises(Exception, match="job job-1 has no file"):
            ask("job-1", name)


def test_inputs_of_a_job_are_read_and_not_removed_one_by_one(blobs: BlobStore) -> None:
    files = JobFiles(blobs)
    files.write_inputs("job-1", {"init.png": b"an image"})
    assert files.read("job-1", "input-init.png") == b"an image"
    with pytest.raises(MissingError, match="job job-1 has no file"):
        files.remove_result("job-1", "input-init.png")


def test_a_bucket_belongs_to_one_queue(bucket: str, tmp_path: Path) -> None:
    first, second = JobStore(tmp_path / "one"), JobStore(tmp_path / "two")
    blobs = S3Blobs.open(f"{bucket}/images")
    first.ensure_same_store("--blobs", blobs)
    first.ensure_same_store("--blobs", blobs)
    with pytest.raises(ConflictError, match=f"--blobs {bucket}/images: another queue uses this folder"):
        second.ensure_same_store("--blobs", blobs)
    second.ensure_same_store("--blobs", S3Blobs.open(f"{bucket}/others"))
    first.close()
    second.close()


@pytest.mark.parametrize(
    "location", ["s3://", "s3://A", "s3://ab", "s3://bucket/../x", "s3://bucket/a b", "gs://bucket"]
)
def test_a_location_that_is_none_is_refused(location: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="blobs: expected"):
        ServeSettings(data=tmp_path, blobs=location)


def test_several_workers_need_a_folder_beside_the_bucket(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shared: name a folder that all workers see"):
        ServeSettings(data=tmp_path, blobs="s3://bucket", store="postgresql://host/database")
    settings = ServeSettings(data=tmp_path, blobs="s3://bucket", shared=tmp_path / "shared")
    assert settings.gallery_folder() == tmp_path / "shared" / "images"


@pytest.mark.parametrize(
    ("bucket_name", "environment", "reason"),
    [("nosuchbucket", {}, "NoSuchBucket"), ("own", {"AWS_SECRET_ACCESS_KEY": "wrong"}, "SignatureDoesNotMatch"),
     ("own", {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}, "Could not connect"),
     ("own", {"AWS_ENDPOINT_URL_S3": "nonsense"}, "Invalid endpoint")],
)  # fmt: skip
def test_a_bucket_that_cannot_be_used_is_one_line(
    bucket_name: str, environment: dict[str, str], reason: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    location = bucket if bucket_name == "own" else f"s3://{bucket_name}"
    with pytest.raises(ConfigError, match=f"--blobs {location}: .*{reason}|blobs s3://...: .*{reason}") as caught:
        S3Blobs.open(location)
    assert "\n" not in str(caught.value)


def test_a_store_that_does_not_answer_is_lost_and_one_that_refuses_is_an_error(
    bucket: str, object_store: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "ATTEMPTS", 1)
    store = S3Blobs.open(bucket)
    store.write("job/0.png", b"1")
    object_store.stop()
    try:
        for call in (lambda: store.read("job/0.png"), lambda: store.write("x", b""), lambda: store.sizes("job")):
            with pytest.raises(BlobsLost, match="does not answer"):
                call()
        store.remove("job")  # later
    finally:
        object_store.start()
    assert store.read("job/0.png") == b"1"
    with pytest.raises(StorageError, match="NoSuchBucket"):
        S3Blobs(store._client, "nosuchbucket", "").write("x", b"")


@pytest.fixture
def pair(tmp_path: Path, bucket: str, postgres: Postgres) -> Iterator[tuple[Worker, Worker]]:
    """Yield two workers of one queue in PostgreSQL, whose images are in a bucket."""
    options = (
        "--store", postgres.database(f"b{abs(hash(bucket))}"), "--blobs", f"{bucket}/mine",
        "--shared", str(tmp_path / "shared"), "--lease-seconds", "5", "--no-gallery",
    )  # fmt: skip
    one, two = (Worker(tmp_path / name, *options).start(wait=False) for name in ("one", "two"))
    for each in (one, two):
        each.wait_ready()
    yield one, two
    for each in (one, two):
        each.stop()


def test_workers_share_a_bucket_that_stops_and_returns(
    pair: tuple[Worker, Worker], bucket: str, object_store: S3Server
) -> None:
    one, two = pair
    upload = send(one, image_bytes())
    assert two.http.get(f"/v1/uploads/{upload}/file").status_code == 200
    job = two.submit(operation="image_transform", input_image=upload, strength=0.5, **SMALL)
    small = [each.submit(seed=5, **SMALL) for each in pair]
    images = set()
    for each in (job, *small):
        url = one.ended(each)["result"]["images"][0]["url"]
        contents = {worker.http.get(url).content for worker in pair}
        assert len(contents) == 1 and next(iter(contents)).startswith(b"\x89PNG")
        images |= contents
        assert [*one.events(each, path="stream")][-1]["type"] == "complete"
    assert len(images) == 2
    long = one.submit(**LONG)
    holder(pair, long)
    object_store.stop()
    try:
        answer = two.http.get(f"/v1/jobs/{small[0]}/files/0.png")
        assert answer.status_code == 503 and "Retry-After" in answer.headers, answer.text
        assert two.http.get("/health").status_code == 200
        time.sleep(2)
        assert one.job(long)["state"] == "running", "it waits for the bucket at its end"
    finally:
        object_store.start()
    ended = two.ended(long)
    assert (ended["state"], ended["attempts"]) == ("done", 1), ended["error"]
    ends_once(one, long)
    assert two.http.get(ended["result"]["images"][0]["url"]).status_code == 200
    keys = [key for key in object_store.objects(bucket.removeprefix("s3://")) if long in key]
    assert keys == [f"mine/files/{long}/0.png"]
    assert one.http.delete(f"/v1/jobs/{long}", params={"forget": True}).status_code == 200
    assert not [key for key in object_store.objects(bucket.removeprefix("s3://")) if long in key]
