"""Jobs that share batches in a worker: joined while they run, each with its own events, result and end."""

from __future__ import annotations

import base64
import io
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from inweave.models import embedded
from inweave.serve.engine.contract import Room, RunnerSettings, RunRequest
from inweave.serve.engine.requests import MAX_OVERTAKES, Requests
from inweave.serve.engine.runner import Runner
from inweave.serve.jobs.job import Event
from tests.serve.worker import SMALL, Worker

INK = str(embedded.folder() / "loras" / "ink.safetensors")
PIXEL = str(embedded.folder() / "loras" / "pixel.safetensors")


class Jobs:
    """A runner whose requests are driven step by step."""

    def __init__(self, **settings: Any) -> None:
        self.requests = Requests(Runner(RunnerSettings(device="cpu", **settings)))
        self.events: dict[str, list[Event]] = {}
        self.cancelled: set[str] = set()
        self.ended: dict[str, dict[str, Any] | Exception] = {}  # in the order of their ends

    def submit(
        self, job: str, lora: str = "", strength: float = 1.0, previews: tuple[int, bool] = (0, False), **config: Any
    ) -> None:
        loras = {"x": lora} if lora else {}
        body = {"prompt": "a cat", "seed": 1, "steps": 3, "width": 64, "height": 64} | config
        body["loras"] = [{"name": "x", "strength": strength}] if lora else []
        every, first = previews
        request = RunRequest(
            job, "image_generation", embedded.NAME, body, loras, name="emoji", preview_every=every, preview_first=first
        )
        self.requests.submit(request, self.events.setdefault(job, []).append, lambda: job in self.cancelled)

    def advance(self) -> None:
        for ended in self.requests.advance():
            try:
                self.ended[ended.job] = ended.finish()
            except Exception as error:
                self.ended[ended.job] = error

    def read(self) -> None:
        """Wait for the files that other threads read."""
        for each in self.requests._waiting:
            if each.reading is not None:
                each.reading.result()

    def run(self) -> None:
        while self.requests.busy:
            self.advance()


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    yield Jobs(batch=4)


@pytest.fixture(autouse=True)
def _clean(jobs: Jobs) -> None:
    for each in (jobs.events, jobs.cancelled, jobs.ended):
        each.clear()


def test_jobs_join_a_running_batch_and_keep_their_events_apart(jobs: Jobs) -> None:
    jobs.submit("first", PIXEL, steps=6)
    while not jobs.events["first"] or jobs.events["first"][-1].type != "progress":
        jobs.advance()
    assert jobs.requests.room == Room(4)
    jobs.submit("second", INK, steps=2, sampler="euler", seed=2)
    jobs.submit("third", steps=3, count=2, seed=3)
    jobs.read()
    jobs.run()
    assert [*jobs.ended] == ["second", "third", "first"]
    assert jobs.requests.room.jobs == 1, "nothing runs"
    for job, images, steps in (("first", 1, 6), ("second", 1, 2), ("third", 2, 6)):
        result = jobs.ended[job]
        assert isinstance(result, dict) and len(result["images"]) == images and result["batches"][0] > 1
        kinds = [event.type for event in jobs.events[job] if event.type != "loading"]
        assert kinds[-images:] == ["image"] * images and set(kinds[:-images]) == {"progress"}
        assert jobs.events[job][-images - 1].data["step"] == steps
    assert jobs.ended["first"]["added_loras"] == ["pixel"]  # type: ignore[index]


def test_jobs_of_one_batch_get_the_previews_that_they_asked_for_of_their_own_images(jobs: Jobs) -> None:
    jobs.submit("first", PIXEL, steps=5, previews=(2, True))
    while not jobs.events["first"] or jobs.events["first"][-1].type == "loading":
        jobs.advance()
    jobs.submit("second", INK, steps=3, count=2, seed=2, previews=(1, True))
    jobs.submit("third", steps=3, seed=3)
    jobs.read()
    jobs.run()
    assert not any(isinstance(each, Exception) or max(each["batches"]) < 2 for each in jobs.ended.values())
    events = {
        job: [(event.type, event.data["index"], event.data.get("step")) for event in own if event.type != "loading"]
        for job, own in jobs.events.items()
    }
    kinds = [(kind, step) for kind, _, step in events["first"]]
    assert kinds == [*((("preview", "progress")[step % 2 == 0], step) for step in range(1, 6)), ("image", None)]
    assert events["second"] == [
        *(("preview", index, step) for step in (2, 4, 6) for index in (0, 1)), ("image", 0, None), ("image", 1, None),
    ]  # fmt: skip
    assert {kind for kind, _, _ in events["third"]} == {"progress", "image"}
    with_images = {job: [event for event in own if event.image is not None] for job, own in jobs.events.items()}
    ends = []
    for job, index in (("first", 0), ("second", 0), ("second", 1)):
        *_, before, last, image = (_values(event) for event in with_images[job] if event.data["index"] == index)
        assert np.array_equal(last, image), "the preview of the last step is the image"
        ends += [before, image]
    assert not any(np.array_equal(one, other) for one, other in itertools.combinations(ends, 2))


def _values(event: Event) -> Any:
    assert event.image is not None
    return np.asarray(Image.open(io.BytesIO(event.image)).convert("RGB"), int)


def test_a_job_that_cannot_join_is_overtaken_a_bounded_number_of_times(jobs: Jobs) -> None:
    jobs.submit("first", steps=4)
    jobs.advance()
    jobs.submit("other size", width=128, steps=1)
    count = 0
    while "other size" not in jobs.ended:
        count += 1
        assert count < 100, "starved"
        jobs.submit(f"next {count}", steps=4)
        jobs.advance()
    before = [job for job in jobs.ended if job.startswith("next")]
    assert len(before) <= MAX_OVERTAKES
    jobs.run()
    assert not any(isinstance(each, Exception) for each in jobs.ended.values())


def test_cancelled_and_broken_jobs_end_alone(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"not a file")
    jobs.submit("good", steps=4)
    jobs.advance()
    jobs.submit("stopped", steps=50)
    jobs.submit("broken", str(tmp_path / "broken.safetensors"))
    jobs.submit("wrong", sampler="plms", schedule="karras", steps=2)
    jobs.advance()
    jobs.submit("early", steps=50)
    jobs.cancelled |= {"stopped", "early"}
    jobs.run()
    kinds = {job: type(end).__name__ for job, end in jobs.ended.items()}
    assert kinds["good"] == "dict" and kinds["stopped"] == kinds["early"] == "CancelledError"
    assert kinds["broken"] in ("ConfigError", "FormatError") and kinds["wrong"] == "ConfigError"


def test_loras_that_are_cheaper_to_merge_are_not_mixed_and_the_dispatcher_is_told() -> None:
    jobs = Jobs(batch="auto")
    native: dict[str, Any] = {"width": 128, "height": 128}
    jobs.submit("pixel", PIXEL, steps=3, **native)
    jobs.advance()
    jobs.submit("ink", INK, steps=1, **native)
    jobs.submit("pixel too", PIXEL, steps=1, **native)
    jobs.read()
    while not jobs.ended:
        jobs.advance()
    assert next(iter(jobs.ended)) == "pixel too" and jobs.requests.room == Room(4, mixed=False)
    jobs.run()
    assert [*jobs.ended] == ["pixel too", "pixel", "ink"]
    assert jobs.ended["ink"]["added_loras"] == []  # type: ignore[index]


@pytest.fixture(scope="module")
def own_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Yield a worker of this module."""
    running = Worker(tmp_path_factory.mktemp("batches") / "data", "--batch", "4").start()
    yield running
    running.stop()


def pixels(worker: Worker, job: str) -> Any:
    file = worker.job(job)["result"]["images"][0]["url"]
    return np.asarray(Image.open(io.BytesIO(worker.http.get(file).content)), int)


def test_jobs_of_a_worker_share_batches_survive_a_kill_and_are_cancelled_one_by_one(own_worker: Worker) -> None:
    body = {**SMALL, "prompt": "a red apple"}
    single = own_worker.submit(**body | {"steps": 6, "seed": 1, "loras": ["pixel:0.8"]})
    own_worker.ended(single)
    long = [own_worker.submit(**body | {"steps": 90, "seed": 7}) for _ in range(3)]
    for job in long:
        own_worker.running(job)
    mixed = own_worker.submit(**body | {"steps": 6, "seed": 1, "loras": ["pixel:0.8"]})
    own_worker.running(mixed)  # beside the three
    own_worker.http.delete(f"/v1/jobs/{long[1]}")
    assert own_worker.ended(long[1])["state"] == "cancelled"
    assert own_worker.ended(mixed)["result"]["batches"][0] > 1
    apart = np.abs(pixels(own_worker, single) - pixels(own_worker, mixed))
    assert apart.max() <= 2
    for pid in own_worker.model_pids():
        os.kill(pid, signal.SIGKILL)
    for job in (long[0], long[2]):
        ended = own_worker.ended(job)
        assert ended["state"] == "done" and ended["attempts"] == 2
        assert ended["result"]["batches"] == [1], "what may have killed its process runs alone"
    assert base64.b64encode(pixels(own_worker, long[0]).tobytes()) == base64.b64encode(
        pixels(own_worker, long[2]).tobytes()
    )
