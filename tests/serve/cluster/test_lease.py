"""A model process whose lease is over ends by itself, also if its host is stopped."""

from __future__ import annotations

import asyncio
import time

import pytest

from inweave.serve.cluster import endpoint as endpoint_module
from inweave.serve.cluster.client import ClusterClient, UnreachableError
from inweave.serve.cluster.endpoint import Placement, RayEndpoint
from inweave.serve.engine.child_process import ChildProcess
from inweave.serve.engine.contract import Cancel, Lease, RunnerLostError, RunnerSettings, encode
from inweave.serve.engine.model_process import LEASE_OVER
from inweave.serve.engine.wire import WireError
from inweave.version import __version__


def test_a_model_process_ends_with_its_lease_and_not_before() -> None:
    async def run() -> tuple[float, int | None]:
        process = ChildProcess("inweave.serve.engine.model_process")
        await process.start(encode(RunnerSettings("cpu")))
        await process.send(encode(Lease(time.monotonic() + 120)))
        await process.receive()  # Ready
        until = 0.0
        for _ in range(2):  # each lease replaces the one before
            until = time.monotonic() + 2.5
            await process.send(encode(Lease(until)))
            await asyncio.sleep(1.5)
        try:
            await process.receive()
        except WireError:
            ended = time.monotonic()
        return ended - until, await process.stop()

    late, code = asyncio.run(run())
    assert 0 <= late < 3 and code == LEASE_OVER


class SilentClient(ClusterClient):
    """A cluster whose actors are placed and then never answer."""

    async def call(self, name: str, **data: object) -> object:
        if name == "place":
            return {"version": __version__, "host": "x", "address": "10.0.0.1", "node": "abcdefgh", "shares": True}
        if name == "exchange":
            raise UnreachableError("the network is cut")
        await asyncio.sleep(60)
        return None


def test_an_endpoint_gives_a_silent_runner_up_after_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "LEASE", 1.0)

    async def run() -> float:
        endpoint = RayEndpoint(SilentClient("nowhere"), Placement(1.0, 0.0, "", 0, ""))
        await endpoint.start(RunnerSettings("cpu"))
        assert endpoint.alive and endpoint.node == "10.0.0.1-abcdef"
        begun = time.monotonic()
        try:
            await endpoint.receive()
        except RunnerLostError:
            lost = time.monotonic() - begun
        assert not endpoint.alive
        try:
            await endpoint.send(Cancel("job-1"))
        except RunnerLostError:
            return lost
        raise AssertionError("a command to a lost runner")

    assert 0.9 < asyncio.run(run()) < 3
