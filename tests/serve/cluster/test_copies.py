"""Commands, copies and errors between a worker and its nodes, without a cluster."""

from __future__ import annotations

import asyncio
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.serve.cluster.bridge import Bridge
from inweave.serve.cluster.client import UnreachableError, _error
from inweave.serve.cluster.files import survey
from inweave.serve.cluster.fleet import Fleet
from inweave.serve.cluster.host import RunnerHost
from inweave.serve.engine.assignment import Assignments
from inweave.serve.engine.contract import Command, RunnerSettings, RunRequest, encode
from inweave.serve.engine.wire import Message, read_message
from inweave.serve.jobs.errors import DatabaseLost
from inweave.serve.jobs.job import State
from inweave.serve.jobs.signals import JobSignals
from inweave.serve.jobs.store import JobStore
from inweave.serve.settings import ServeSettings
from tests.serve.cluster.test_lease import SilentClient


class Host(RunnerHost):
    """A host whose commands are kept instead of run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(encode(RunnerSettings("cpu")).data, str(folder), 1000, str(folder / "none"))
        self._unclaimed.cancel()
        self.sent: list[Command] = []

    async def _send(self, command: Command) -> None:
        self.sent.append(command)


@pytest.fixture
def key(tmp_path: Path) -> dict[str, Any]:
    source = tmp_path / "a.safetensors"
    source.write_bytes(b"content")
    known = survey(str(source))
    assert known is not None
    return known


def test_a_command_that_is_repeated_while_its_files_are_looked_for_runs_once(
    tmp_path: Path, key: dict[str, Any]
) -> None:
    host = Host(tmp_path / "cache")
    message = encode(RunRequest("job-1", "image_generation", key["path"], {"prompt": "x"}))

    async def run() -> list[list[str]]:
        calls = (host.command(1, {"type": message.type, "data": message.data}, {key["path"]: key}) for _ in range(3))
        return list(await asyncio.gather(*calls))

    assert asyncio.run(run()) == [[], [], []]
    assert len(host.sent) == 1


def test_a_disk_that_takes_no_copy_fails_the_job_and_leaves_the_runner(tmp_path: Path, key: dict[str, Any]) -> None:
    host = Host(tmp_path / "cache")

    async def run() -> dict[str, Any]:
        part = (await host.open_copy(key))["part"]
        return await host.receive(part, "x" * 300, 0, b"content")  # the file system refuses the name

    failure = asyncio.run(run())["failure"]
    assert failure["code"] == "storage" and "cannot store a copy" in failure["message"]
    assert not [*(tmp_path / "cache").iterdir()], "nothing of it is left"


def test_a_file_that_is_gone_before_it_is_sent_is_an_error_of_the_job(key: dict[str, Any]) -> None:
    ray = pytest.importorskip("ray")
    Path(key["path"]).unlink()
    answers = BytesIO()
    asyncio.run(Bridge(ray, answers).answer(Message("hash", {"id": 1, "key": key})))
    answers.seek(0)
    message = read_message(answers.read)
    error = _error(**message.data)
    assert isinstance(error, ConfigError) and not isinstance(error, UnreachableError)
    assert "a.safetensors cannot be read any more" in str(error)


def test_the_number_of_runners_is_kept_right_after_the_database_was_lost(tmp_path: Path) -> None:
    class Store(JobStore):
        losses = 0

        def count(self, *states: State) -> int:
            self.losses += 1
            if self.losses == 1:
                raise DatabaseLost("it restarts")
            return super().count(*states)

    class Client(SilentClient):
        async def run(self) -> None:
            await asyncio.sleep(60)

    store, signals = Store(tmp_path), JobSignals()
    settings = ServeSettings(data=tmp_path, cluster="127.0.0.1:1")
    fleet = Fleet(settings, "", store, signals, Assignments(store), [], lambda *_: None)  # type: ignore[arg-type, return-value]
    fleet._client = Client("nowhere")

    async def run() -> None:
        task = asyncio.create_task(fleet.run())
        while store.losses < 2 and not task.done():
            signals.work()
            await asyncio.sleep(0.01)
        assert not task.done(), task.exception()
        task.cancel()
        await fleet.stop(0)

    asyncio.run(run())
    store.close()
