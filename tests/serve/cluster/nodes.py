"""A Ray cluster of several nodes on this machine, reachable from this machine alone."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ADDRESS = "127.0.0.1"
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray moves a head on the loopback address to another one otherwise
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 otherwise: programs beside the tests would take all the time
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
STORE_BYTES = 100 * 2**20
#: a node in a process of its own; the command `ray start` refuses a loopback address
NODE = f"""
import signal, sys
from ray._private.node import Node
from ray._private.parameter import RayParams
parameters = RayParams(
    gcs_address=sys.argv[1], redis_address=None, node_ip_address="{ADDRESS}", num_cpus=1, num_gpus=0,
    object_store_memory={STORE_BYTES}, min_worker_port=0, max_worker_port=0, node_manager_port=0,
    include_log_monitor=False, dashboard_agent_listen_port=None,
)
node = Node(parameters, head=False, shutdown_at_exit=True, spawn_reaper=True)
signal.sigwait({{signal.SIGTERM}})
node.kill_all_processes(check_alive=False, allow_graceful=False)
"""


class Nodes:
    """A head without devices, and nodes with one CPU each: one runner fits on a node."""

    def __init__(self, count: int, state: Path | None = None) -> None:
        """Start a head and ``count`` nodes; a head that keeps its ``state`` on disk can be restarted."""
        os.environ.update(ENVIRONMENT)
        if state is not None:
            os.environ.update({"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(state)})
        with socket.socket() as free:
            free.bind((ADDRESS, 0))
            self.port = free.getsockname()[1]
        self.nodes: list[Any] = []
        self.start(count)

    def start(self, count: int) -> None:
        """Start a cluster, always at the same address."""
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0, "node_ip_address": ADDRESS, "include_dashboard": False, "gcs_server_port": self.port,
                "object_store_memory": STORE_BYTES,
            },
        )  # fmt: skip
        for _ in range(count):
            self.add()

    @property
    def address(self) -> str:
        return f"{ADDRESS}:{self.port}"

    def add(self, cpus: int = 1) -> Any:
        """Start another node."""
        node = self.cluster.add_node(
            wait=False, num_cpus=cpus, node_ip_address=ADDRESS, object_store_memory=STORE_BYTES
        )
        self.nodes.append(node)
        return node

    def add_without(self, *folders: Path) -> subprocess.Popen[bytes]:
        """Start another node, for whose processes these folders are empty, as on another machine."""
        hide = " && ".join(f"mount -t tmpfs none {shlex.quote(str(each))}" for each in folders)
        start = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(NODE)} {self.address}"
        return subprocess.Popen(["unshare", "-rm", "sh", "-c", f"{hide} && {start}"])

    def node(self, name: str) -> Any:
        """Return a node by its name for people."""
        return next(each for each in self.nodes if each.node_id[:6] == name.rpartition("-")[2])

    def restart_head(self) -> None:
        """Kill the head and start it again with the state on its disk; the nodes stay."""
        self.cluster.head_node.kill_gcs_server()
        self.cluster.head_node.start_gcs_server()

    def stop(self) -> None:
        """End every node."""
        for node in self.nodes:
            self.signal(node, signal.SIGCONT)
        self.nodes = []
        self.cluster.shutdown()
        for name in ("RAY_gcs_storage", "RAY_gcs_storage_path"):
            os.environ.pop(name, None)

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

    def kill(self, node: Any) -> None:
        """Kill every process of a node."""
        self.signal(node, signal.SIGKILL)
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)


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
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"inweave.serve.engine.model_process" in words:
                result.append(pid)
    return result
