"""A Ray cluster of several nodes on this machine, reachable from this machine alone."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

ADDRESS = "127.0.0.1"
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray moves a head on the loopback address to another one otherwise
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


class Nodes:
    """A head without devices, and nodes with one CPU each: one runner fits on a node."""

    def __init__(self, count: int) -> None:
        os.environ.update(ENVIRONMENT)
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "node_ip_address": ADDRESS, "include_dashboard": False,
                            "object_store_memory": 100 * 2**20},
        )  # fmt: skip
        self.nodes: list[Any] = [self.add() for _ in range(count)]

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, cpus: int = 1) -> Any:
        """Start another node."""
        return self.cluster.add_node(
            wait=False, num_cpus=cpus, node_ip_address=ADDRESS, object_store_memory=100 * 2**20
        )

    def stop(self) -> None:
        for node in self.nodes:
            self.signal(node, signal.SIGCONT)
        self.cluster.shutdown()

    def pids(self, node: Any) -> list[int]:
        """Return the processes of a node: its raylet and everything below it, children first."""
        (raylet,) = (each.process.pid for each in node.all_processes["raylet"])
        return [*descendants(raylet), raylet]

    def signal(self, node: Any, number: signal.Signals) -> None:
        """Send a signal to every process of a node."""
        if "raylet" not in node.all_processes:
            return
        for pid in reversed(self.pids(node)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def node_of(self, pid: int) -> Any:
        """Return the node that a process belongs to."""
        return next(each for each in self.nodes if "raylet" in each.all_processes and pid in self.pids(each))


def descendants(pid: int) -> list[int]:
    """Return the processes below one, the youngest generation first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        parents.setdefault(parent, []).append(int(entry.parent.name))
    pending, result = [pid], list[int]()
    while pending:
        children = parents.get(pending.pop(), [])
        pending += children
        result += children
    return result[::-1]


def model_pids(pids: list[int]) -> list[int]:
    """Return which of these processes are model processes."""
    result = []
    for pid in pids:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"inweave.serve.engine.model_process" in words:
            result.append(pid)
    return result
