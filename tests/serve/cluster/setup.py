"""A worker and the cluster that runs its jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.serve.cluster.nodes import Nodes
from tests.serve.worker import Worker

LONG: dict[str, Any] = {"steps": 60, "width": 128, "height": 128}


class Setup(NamedTuple):
    nodes: Nodes
    worker: Worker

    @property
    def devices(self) -> list[dict[str, Any]]:
        """What the worker says of its runners."""
        devices: list[dict[str, Any]] = self.worker.http.get("/v1/queue").json()["devices"]
        return devices

    def node_of(self, job: str) -> str:
        """Return the node that runs a job."""
        self.worker.until(lambda: job in [each["job"] for each in self.devices])
        return next(str(each["node"]) for each in self.devices if each["job"] == job)

    def until_ready(self, runners: int) -> None:
        """Wait until this many runners take jobs."""
        self.worker.until(lambda: [each["status"] for each in self.devices].count("ready") == runners)

    def losses(self, job: str) -> list[str]:
        """Return why a job was queued again, each time."""
        return [each["code"] for each in self.worker.events(job) if each["type"] == "retried"]


@contextmanager
def cluster(folder: Path, count: int, *options: str, keep_state: bool = False, wait: bool = True) -> Iterator[Setup]:
    """Run a worker on a cluster of ``count`` nodes; ``wait`` until it is ready."""
    state = folder / "head" if keep_state else None
    if state is not None:
        state.mkdir()
    nodes = Nodes(count, state)
    arguments = ("--cluster", nodes.address, "--node-cache", str(folder / "cache"), "--log-level", "info", *options)
    worker = Worker(folder / "data", *arguments)
    try:
        yield Setup(nodes, worker.start(wait=wait))
    finally:
        if worker.process is not None:
            worker.stop()
        nodes.stop()
