"""Random sequences of what clients do to a worker: submit, cancel, read a little and hang up, retry, reorder, forget.

They test the queue, the streams and the answers; the model only has to tell a right image from a wrong one. The
thousand sequences of the full size therefore run on a model of a few megabytes with random weights, which takes a third
of the time, and on two model processes at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.serve.worker import SMALL, Worker
from tests.support import figure, sized

ENDS = ("done", "failed", "cancelled")


class Clients(RuleBasedStateMachine):
    """Every answer is one that its route documents, and each job ends once, with the right image."""

    worker: ClassVar[Worker]
    stacks: ClassVar[list[list[dict[str, Any]]]]
    references: ClassVar[list[bytes]]
    sequences: ClassVar[int] = 0
    ended: ClassVar[dict[str, int]] = {}
    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.http = self.worker.http
        self.known: dict[str, int] = {}  # job -> its stack
        self.cancelled: set[str] = set()
        self.forgotten: set[str] = set()
        self.keys: dict[str, str] = {}

    def ask(self, method: str, path: str, *allowed: int, **options: Any) -> httpx.Response:
        answer = self.http.request(method, path, **options)
        assert answer.status_code in allowed, (method, path, answer.status_code, answer.text[:300])
        return answer

    def state(self, job: str) -> str | None:
        answer = self.ask("GET", f"/v1/jobs/{job}", 410 if job in self.forgotten else 200)
        return None if job in self.forgotten else str(answer.json()["state"])

    @rule(
        target=jobs,
        stack=st.integers(0, 2),
        key=st.sampled_from([None, None, "a", "b"]),
        long=st.booleans(),
    )
    def submit(self, stack: int, key: str | None, long: bool) -> str:
        body = {
            "prompt": "a red apple",
            "seed": 3,
            "loras": self.stacks[stack],
            **SMALL,
            **({"priority": 1} if long else {}),
        }
        headers = {} if key is None else {"Idempotency-Key": f"{id(self)}-{key}-{stack}-{long}"}
        answer = self.ask("POST", "/v1/jobs", 202, json=body, headers=headers)
        job = str(answer.json()["id"])
        if headers:
            assert self.keys.setdefault(headers["Idempotency-Key"], job) == job
        assert key is not None or job not in self.known
        self.known[job] = stack
        return job

    @initialize(target=jobs)
    def begin(self) -> str:
        return str(self.submit(0, None, False))

    @rule(job=jobs)
    def cancel(self, job: str) -> None:
        before = self.state(job)
        answer = self.ask("DELETE", f"/v1/jobs/{job}", *((410,) if before is None else (200, 409)))
        if answer.status_code == 200:
            self.cancelled.add(job)
        elif answer.status_code == 409:
            assert self.state(job) in ("done", "failed")

    @rule(job=jobs, count=st.integers(0, 4), last=st.integers(0, 3))
    def read_and_hang_up(self, job: str, count: int, last: int) -> None:
        """Read a few events and leave, which changes nothing."""
        headers = {"Last-Event-ID": str(last)}
        with self.http.stream("GET", f"/v1/jobs/{job}/events", headers=headers) as stream:
            assert stream.status_code == (410 if job in self.forgotten else 200)
            if job in self.forgotten:
                return
            for number, line in enumerate(stream.iter_lines()):
                if number >= count:
                    break
                assert line == "" or line.split(":")[0] in ("id", "event", "data", "")

    @rule(face=st.sampled_from(["/sdapi/v1/txt2img", "/v1/images/generations"]), seconds=st.sampled_from([0.001, 0.05]))
    def hang_up_while_waiting(self, face: str, seconds: float) -> None:
        """Call an API that answers when the job is done, and hang up before it does."""
        body = {"prompt": "a red apple", "size": "64x64", **SMALL}
        try:
            answer = httpx.post(f"{self.worker.url}{face}", json=body, timeout=httpx.Timeout(30, read=seconds))
            assert answer.status_code == 200, answer.text
        except httpx.ReadTimeout:
            pass

    @rule(target=jobs, job=jobs)
    def retry(self, job: str) -> str:
        before = self.state(job)
        answer = self.ask("POST", f"/v1/jobs/{job}/retry", *((410,) if before is None else (202, 409)))
        if answer.status_code != 202:
            assert before is None or before not in ENDS
            return job
        assert answer.json()["id"] not in self.known
        self.known[answer.json()["id"]] = self.known[job]
        return str(answer.json()["id"])

    @rule(job=jobs, priority=st.integers(-2, 2))
    def reorder(self, job: str, priority: int) -> None:
        allowed = (410,) if job in self.forgotten else (200, 409)
        self.ask("PATCH", f"/v1/jobs/{job}", *allowed, json={"priority": priority})

    @rule(job=jobs)
    def forget(self, job: str) -> None:
        allowed = (410,) if job in self.forgotten else (200, 409)
        if self.ask("DELETE", f"/v1/jobs/{job}", *allowed, params={"forget": True}).status_code == 200:
            self.forgotten.add(job)

    def teardown(self) -> None:
        Clients.sequences += 1
        for job, stack in self.known.items():
            if job in self.forgotten:
                continue
            ends = [
                event["type"] for event in self.worker.events(job) if event["type"] in ENDS
            ]  # until the stream ends
            document = self.worker.job(job)
            self.ended[document["state"]] = self.ended.get(document["state"], 0) + 1
            assert ends == [document["state"]]
            if document["state"] == "done":
                image = self.http.get(document["result"]["images"][0]["url"]).content
                assert image == self.references[stack], "another job changed the image"
            else:
                assert document["state"] == "cancelled" and job in self.cancelled, document
        self.worker.until(lambda: self.worker.queued() == 0)  # also those of callers that hung up


@pytest.fixture
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Worker, list[str]]]:
    """Yield a worker and two LoRAs of its model."""
    if not sized(0, 1):
        yield request.getfixturevalue("worker"), ["pixel", "ink"]
        return
    from tests.peers import tiny_models

    (tmp_path / "loras").mkdir()
    for number, name in enumerate(("one", "two")):
        tiny_models.lora(tmp_path / "loras" / f"{name}.safetensors", "sd1.5", dialect="kohya", seed=number)
    model = str(tiny_models.folder("sd1.5"))
    running = Worker(
        tmp_path / "data", "--model", model, "--lora-dir", str(tmp_path / "loras"), "--device", "cpu", "--device", "cpu"
    ).start()
    yield running, ["one", "two"]
    running.stop()


def test_random_sequences_of_clients(served: tuple[Worker, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    worker, (first, second) = served
    stacks: list[list[dict[str, Any]]] = [[], [{"name": first, "strength": 0.8}], [{"name": second}]]
    references, begun = [], time.monotonic()
    for stack in stacks:
        done = worker.ended(worker.submit(seed=3, loras=stack, **SMALL))
        references.append(worker.http.get(done["result"]["images"][0]["url"]).content)
    assert len(set(references)) == 3
    facts = {"worker": worker, "stacks": stacks, "references": references, "ended": {}, "sequences": 0}
    for name, value in facts.items():
        monkeypatch.setattr(Clients, name, value, raising=False)
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Clients,
        settings=settings(
            max_examples=sized(6, 1000), stateful_step_count=8, deadline=None, database=None,
            derandomize=bool(sized(1, 0)), suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
        ),
    )  # fmt: skip
    seconds = time.monotonic() - begun
    figure(f"{Clients.sequences} sequences: {sum(Clients.ended.values())} jobs, {Clients.ended}, {seconds:.0f} s")
    assert worker.http.get("/health").status_code == 200
