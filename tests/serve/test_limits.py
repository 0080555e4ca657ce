"""What runs out: the queue, the disk, the time that results are kept. Each ends in an answer."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inweave.cli.app import app
from inweave.errors import InweaveError
from inweave.serve.jobs.job import Submission
from inweave.serve.jobs.store import JobStore
from inweave.serve.service import Service
from inweave.serve.settings import ServeSettings
from tests.serve.worker import SMALL, Worker


@pytest.fixture(scope="module")
def small_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker with room for one waiting job, started with rbee's flags."""
    data = tmp_path_factory.mktemp("small") / "data"
    flags = ("--worker-id", "w7", "--callback-url", "http://x", "--backend", "cpu", "--use-flash-attn", "--local-mode")
    running = Worker(data, "--queue-limit", "1", "--drain-seconds", "1", *flags).start()
    yield running
    running.stop()


@pytest.fixture
def small(small_worker: Worker) -> Worker:
    """The same for each test: one of them stops it, and they come in any order."""
    if small_worker.process is None or small_worker.process.poll() is not None:
        small_worker.start()
        pause(small_worker, False)
    return small_worker


def pause(worker: Worker, paused: bool) -> None:
    assert worker.http.post("/v1/queue", json={"paused": paused}).json() == {"paused": paused}


def test_flags_of_rbee_are_taken(small: Worker) -> None:
    info = small.http.get("/info").json()
    assert info["id"] == "w7" and info["status"] == "ready" and info["model_id"] == "inweave/emoji"
    assert 'inweave_jobs{state="queued"}' in small.http.get("/metrics").text


def test_a_full_queue_is_429_in_the_words_of_each_face(small: Worker) -> None:
    pause(small, True)
    job = small.submit(**SMALL)
    assert small.http.get("/internal/pending-tasks").json() == {"size": 1, "tasks": [job]}
    progress = small.http.post("/internal/progress", json={"id_task": job}).json()
    assert progress["queued"] and not progress["active"] and progress["textinfo"] == "In queue: 1/1"
    answers = [
        small.http.post(path, json={"prompt": "x"})
        for path in ("/v1/jobs", "/v1/images/generations", "/sdapi/v1/txt2img")
    ]
    assert [answer.status_code for answer in answers] == [429] * 3
    assert all(int(answer.headers["Retry-After"]) > 0 for answer in answers)
    native, openai, a1111 = (answer.json() for answer in answers)
    assert native["error"]["code"] == "busy" and "message" in native["error"]
    assert {"message", "type", "param", "code"} <= set(openai["error"])
    assert a1111["error"] == "busy" and "full" in a1111["detail"]
    pause(small, False)
    assert small.ended(job)["state"] == "done"
    assert small.http.post("/internal/progress", json={"id_task": job}).json()["completed"]
    url = small.job(job)["result"]["images"][0]["url"]
    assert small.http.delete(f"/v1/jobs/{job}", params={"forget": True}).status_code == 200
    for path in (f"/v1/jobs/{job}", url, f"/v1/jobs/{job}/events", f"/v1/jobs/{job}/stream"):
        assert small.http.get(path).status_code == 410


@contextlib.contextmanager
def small_files(worker: Worker) -> Iterator[None]:
    """No file of the web process can grow beyond a kilobyte: neither its database nor an image."""
    assert worker.process is not None
    before = resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        if worker.process.poll() is None:
            resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def full_disk(worker: Worker) -> Iterator[None]:
    """The disk of the data folder, a small one, has not a byte left."""
    filler = worker.data / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    try:
        yield
    finally:
        filler.unlink()


def survives_without_disk(worker: Worker, without_disk: contextlib.AbstractContextManager[None]) -> None:
    """A job that runs fails with the reason, one that is submitted is refused, the model stays loaded."""
    models = worker.model_pids()
    job = worker.submit(steps=150, width=64, height=64)
    worker.running(job)
    with without_disk:
        answer = worker.http.post("/v1/jobs", json={"prompt": "x"})
        assert answer.status_code == 507 and answer.json()["error"]["code"] == "storage"
        upload = worker.http.post("/v1/loras", params={"name": "x"}, content=bytes(2**20))
        assert upload.status_code == 507, upload.text
        worker.until(lambda: "cannot be stored" in worker.log())
        assert worker.http.get("/health").status_code == 200
        assert worker.http.get(f"/v1/jobs/{job}").status_code == 200
    ended = worker.ended(job)
    assert ended["state"] == "failed" and ended["error"]["code"] == "storage"
    assert worker.ended(worker.submit(**SMALL))["state"] == "done"
    assert worker.model_pids() == models
    assert not [*worker.data.rglob("*.part"), *(worker.data / "incoming").iterdir()]


def test_a_file_system_that_refuses_fails_the_job_and_nothing_else(small: Worker) -> None:
    survives_without_disk(small, small_files(small))


def test_a_signal_on_a_full_disk_ends_the_worker_without_a_traceback(small: Worker) -> None:
    job = small.submit(steps=150, width=64, height=64)
    small.running(job)
    before = len(small.log())
    with small_files(small):
        assert small.stop() == 0
    log = small.log()[before:]
    assert "cannot be put back" in log and "Traceback" not in log, log


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """A file system in memory over a folder; skips the test where this user may not mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
    try:
        mount = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mount.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mount.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.full
def test_a_disk_without_a_byte_left_fails_the_job_and_nothing_else(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=8m") as disk:
        worker = Worker(disk / "data", log=tmp_path / "log").start()
        try:
            survives_without_disk(worker, full_disk(worker))
            with mounted(worker.data / "files", "ro"):  # results cannot be written; the queue can
                refused = worker.ended(worker.submit(**SMALL))
                assert refused["state"] == "failed" and refused["error"]["code"] == "storage"
            assert worker.ended(worker.submit(**SMALL))["state"] == "done"
        finally:
            assert worker.stop() == 0


def refused(data: Path) -> str:
    with pytest.raises(InweaveError) as caught:
        Service.open(ServeSettings(data=data))
    return str(caught.value)


def test_a_data_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for data in (tmp_path / "file", tmp_path / "file" / "data"):
        assert "cannot be used as the data folder" in refused(data)
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "jobs.sqlite3").write_bytes(b"not a database" * 1000)
    assert "not a database" in refused(tmp_path / "junk")
    first = Service.open(ServeSettings(data=tmp_path / "data"))
    assert "another worker" in refused(tmp_path / "data")
    first.store.close()
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--data", str(tmp_path / "file")])
    assert result.exit_code == 2 and "listening" not in result.output
    assert len(result.output.splitlines()) == 1 and "Traceback" not in result.output


def test_a_data_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    if os.geteuid() == 0:  # permissions do not stop this user
        with mounted(tmp_path / "locked", "ro") as folder:
            assert "Read-only file system" in refused(folder)
    else:
        (tmp_path / "locked").mkdir(mode=0o555)
        assert "Permission denied" in refused(tmp_path / "locked")


def test_results_expire_over_http(tmp_path: Path) -> None:
    """What is kept for a moment only is gone when the worker looks; what waits is not. No model is needed for it."""
    store = JobStore(tmp_path / "data")
    submission = Submission("image_generation", "inweave/emoji", {"config": {"prompt": "x"}})
    job = store.submit(submission)[0].id
    assert (store.claim() or store.job(job)).state == "running"
    store.files.write(job, "0.png", b"an image")
    assert store.finish(job, "done", result={"images": [{"file": "0.png"}]})
    store.pause(True)
    waiting = store.submit(submission)[0].id
    assert store.files.read(job, "0.png")
    store.close()
    short = Worker(tmp_path / "data", "--keep-hours", "0.0000001").start(wait=False)
    try:
        short.until(lambda: short.http.get(f"/v1/jobs/{job}").status_code == 410)
        for path in (f"/v1/jobs/{job}/files/0.png", *(f"/v1/jobs/{job}{end}" for end in ("/events", "/stream", ""))):
            answer = short.http.get(path)
            assert answer.status_code == 410 and answer.json()["error"]["code"] == "gone"
        assert short.http.delete(f"/v1/jobs/{job}").status_code == 410
        assert short.http.post(f"/v1/jobs/{job}/retry").status_code == 410
        assert not (short.data / "files" / job).exists()
        assert [each["id"] for each in short.http.get("/v1/jobs").json()["jobs"]] == [waiting]
        assert short.http.delete(f"/v1/jobs/{waiting}").status_code == 200
    finally:
        short.stop()
