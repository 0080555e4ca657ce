"""The contract of runners: every message survives the wire, and a dispatcher works with any endpoint."""

from __future__ import annotations

import asyncio
import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from inweave.serve.engine.contract import (
    Cancel,
    Command,
    DeviceMemory,
    Finished,
    JobEvent,
    Lease,
    Load,
    Loaded,
    Ready,
    Report,
    Room,
    RunnerSettings,
    RunRequest,
    decode,
    encode,
)
from inweave.serve.engine.dispatcher import Dispatcher, DispatchSettings, Resolved
from inweave.serve.engine.wire import MAX_BLOB_COUNT, Message, WireError, read_message
from inweave.serve.jobs.errors import DatabaseLost
from inweave.serve.jobs.job import Event, Failure, Job, Submission
from inweave.serve.jobs.signals import JobSignals
from inweave.serve.jobs.store import JobStore

MESSAGES: list[RunnerSettings | Command | Report] = [
    RunnerSettings(),
    RunnerSettings("cuda:0", "bf16", 2**34, {"model": {"vae": "/vae"}}, ("/a", "/b"), ("/c",)),
    Load("inweave/emoji"),
    RunRequest("job-1", "image_generation", "inweave/emoji", {"prompt": "x", "alpha": {"*": 4.0}}),
    RunRequest(
        "job-2", "image_inpaint", "/m", {"prompt": "x"}, {"pixel": "/p"}, 2, True, "warn",
        {"init": b"\x89PNG", "mask": b""}, {"output": "/o"}, "mine",
    ),
    Cancel("job-1"),
    Lease(12.5),
    Ready(None),
    Loaded("m", Failure("internal", "x")),
    JobEvent("job-1", Event("preview", {"step": 1, "loss": 0.5}, b"image")),
    JobEvent("job-2", Event("progress", {"records": [{"step": 1}, None]})),
    Finished("job-1", "done", {"images": [{"index": 0}]}),
    Finished("job-1", "failed", error=Failure("busy", "x"), memory=DeviceMemory(1, 2, 3)),
    Room(4, mixed=False),
    JobEvent("job-1", Event("progress"), DeviceMemory(2**35, 2**36, 2**37)),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive_the_wire(message: RunnerSettings | Command | Report) -> None:
    pipe = io.BytesIO(encode(message).encode() * 2)
    assert [decode(read_message(pipe.read)) for _ in range(2)] == [message, message]
    with pytest.raises(WireError, match="closed"):
        read_message(pipe.read)


@pytest.mark.parametrize(
    "header",
    [
        b"{", b"[]", b"3", b"[" * 100_000, {}, {"type": 3, "data": {}, "blobs": []},
        {"type": "run", "data": [], "blobs": []}, {"type": "run", "data": {}, "blobs": [[["a", "b"], 0]]},
        {"type": "run", "data": {}, "blobs": [[[], 0]]}, {"type": "run", "data": {}, "blobs": [["a", 0]]},
        {"type": "run", "data": {}, "blobs": [[["a"], -1]]}, {"type": "run", "data": {}, "blobs": [[["a"], 2**40]]},
        {"type": "run", "data": {}, "blobs": [[["a"], 0]] * (MAX_BLOB_COUNT + 1)},
    ],
    ids=lambda header: str(header)[:40],
)  # fmt: skip
def test_broken_messages_end_the_connection(header: Any) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with pytest.raises(WireError):
        read_message(io.BytesIO(struct.pack(">I", len(text)) + text).read)


@pytest.mark.parametrize(
    "message", [Message("unknown"), Message("cancel"), Message("finished", {"job": "x", "state": "odd"})]
)
def test_messages_outside_of_the_contract_are_refused(message: Message) -> None:
    with pytest.raises(WireError, match="not a message between"):
        decode(message)


class Endpoint:
    """A runner in this process that interleaves reports of another job with those of the current one."""

    node = ""

    def __init__(self, deaths: int) -> None:
        self.alive, self.starts, self._deaths = False, 0, deaths
        self.reports: asyncio.Queue[Report] = asyncio.Queue()

    async def start(self, settings: RunnerSettings) -> None:
        self.alive, self.starts, self.reports = True, self.starts + 1, asyncio.Queue()
        await self.reports.put(Ready(settings.device))

    async def send(self, command: Command) -> None:
        assert isinstance(command, RunRequest)
        image = {"index": 0}
        for report in (
            JobEvent("other", Event("image", image, b"not this one")),
            JobEvent(command.job, Event("image", image, command.inputs["init"])),
            Finished("other", "failed", error=Failure("internal", "not this one")),
            Finished(command.job, "done", {"images": [image]}, memory=DeviceMemory(1, 2, 3)),
        ):
            await self.reports.put(report)

    async def receive(self) -> Report:
        report = await self.reports.get()
        if self._deaths and isinstance(report, Finished) and report.state == "done":
            self._deaths, self.alive = self._deaths - 1, False
            raise WireError("the runner is gone")
        return report

    async def stop(self, *, now: bool = False) -> int | None:
        self.alive = False
        return 0


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_dispatcher_takes_any_endpoint_and_routes_reports_by_job(attempts: int, tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    submission = Submission("image_generation", "m", {"config": {"prompt": "x"}}, {"init.png": b"image"})
    job = store.submit(submission)[0].id

    losses = iter([DatabaseLost("it restarts")])

    def resolve(job: Job) -> Resolved:
        for error in losses:
            raise error  # the job is not to blame
        return Resolved("/m", {}, {})

    async def run() -> None:
        settings, endpoint = DispatchSettings(RunnerSettings("cpu")), Endpoint(deaths=attempts - 1)
        dispatcher = Dispatcher(store, JobSignals(), settings, resolve, lambda job, result: result, endpoint)
        task = asyncio.create_task(dispatcher.run())
        while not store.job(job).final:
            await asyncio.sleep(0.01)
        assert dispatcher.memory == DeviceMemory(1, 2, 3), "as the runner reported it last"
        await dispatcher.drain(1)
        await task
        assert endpoint.starts == attempts

    asyncio.run(run())
    ended = store.job(job)
    assert (ended.state, ended.attempts) == ("done", attempts)
    assert ended.result == {"images": [{"index": 0, "file": "0.png"}]}
    assert store.files.read(job, "0.png") == b"image"
    store.close()
