"""A run on a Ray cluster: three nodes of this machine with a CPU each, of which one is killed while it trains."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inweave.cli.app import app
from tests.e2e.test_train_processes import INWEAVE, arguments
from tests.e2e.test_train_shard import bits

ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a head stays on the loopback address
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_DISABLE_IMPORT_WARNING": "1",
    "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip
LONG = ["--steps", "8", "--save-every", "2", "--set", "log_every=1"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, Any]]:
    """The head's address, and a cluster of three nodes; the head itself has no devices."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    from ray.cluster_utils import Cluster

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common: dict[str, Any] = {"node_ip_address": "127.0.0.1", "object_store_memory": 100 * 2**20}
    head = {**common, "num_cpus": 0, "include_dashboard": False, "gcs_server_port": port}
    started = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(3):
        started.add_node(wait=False, num_cpus=1, **common)
    yield f"127.0.0.1:{port}", started
    started.shutdown()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def processes(folder: Path) -> dict[int, int]:
    """The processes that train with an output of this folder, as rank -> pid."""
    ranks = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"-P" in words and b"train" in words and (entry / "cwd").readlink() == folder:
                variables = dict(each.split(b"=", 1) for each in (entry / "environ").read_bytes().split(b"\0") if each)
                ranks[int(variables[b"RANK"])] = int(entry.name)
        except (OSError, KeyError, ValueError):
            continue
    return ranks


def train(address: str, folder: Path, cache: Path, *more: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    command = [*INWEAVE, *arguments(cache), "-o", "out", "--cluster", address, "--gpus", "2", *more]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until_saved(run: subprocess.Popen[str], folder: Path) -> dict[int, int]:
    """Wait for a checkpoint; return the processes of the run."""
    deadline = time.monotonic() + 300
    while not list((folder / "out" / "lora-state").glob("step-*")):
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()
        time.sleep(0.02)
    return processes(folder)


def test_a_killed_process_is_replaced_and_the_result_has_the_same_bits(
    cluster: tuple[str, Any], tmp_path: Path
) -> None:
    cache, folder = tmp_path / "cache", tmp_path / "spread"
    one = CliRunner().invoke(
        app, [*arguments(cache), *LONG, "--set", "gradient_accumulation=2", "-o", str(tmp_path / "one")]
    )
    assert one.exit_code == 0, one.output
    run = train(cluster[0], folder, cache, *LONG)
    victims = until_saved(run, folder)
    assert sorted(victims) == [0, 1]
    os.kill(victims[1], signal.SIGKILL)
    output, errors = run.communicate(timeout=400)
    assert run.returncode == 0, errors[-3000:]
    assert "restart 1 of 3 from the last checkpoint" in errors and json.loads(output)["ok"]
    assert bits(folder / "out" / "lora.safetensors") == bits(tmp_path / "one" / "lora.safetensors")
    assert not processes(folder)


@pytest.mark.full
def test_a_lost_machine(cluster: tuple[str, Any], tmp_path: Path) -> None:
    """The node of rank 0 is killed, with the store of the process group; with no restart left the run ends."""
    address, started = cluster
    cache, folder = tmp_path / "cache", tmp_path / "spread"
    run = train(address, folder, cache, *LONG, "--restarts", "0")
    first = until_saved(run, folder)[0]
    (node,) = (each for each in started.worker_nodes if first in descendants(raylet(each)))
    pids = [raylet(node), *descendants(raylet(node))]
    for pid in pids:
        if pid != first:  # it ends with its parent
            os.kill(pid, signal.SIGKILL)
    output, errors = run.communicate(timeout=400)
    assert run.returncode == 4 and (output + errors).count("was lost") == 1, errors[-3000:]
    assert not processes(folder)
    started.remove_node(node, allow_graceful=False)
    again = train(address, folder, cache, *LONG, "--resume")  # on the two machines that are left
    _, errors = again.communicate(timeout=400)
    assert again.returncode == 0, errors[-3000:]
    whole = train(address, tmp_path / "whole", cache, *LONG)
    assert whole.wait(timeout=400) == 0
    name = Path("out", "lora.safetensors")
    assert bits(folder / name) == bits(tmp_path / "whole" / name)


@pytest.mark.full
def test_an_error_of_the_run_is_not_tried_again_and_a_signal_stops_all(
    cluster: tuple[str, Any], tmp_path: Path
) -> None:
    cache, folder = tmp_path / "cache", tmp_path / "bad"
    run = train(cluster[0], folder, cache, "--dataset", str(tmp_path / "gone"))
    output, errors = run.communicate(timeout=300)
    assert run.returncode == 2 and output.count('"ok": false') == 1 and "restart" not in errors, (output, errors)
    folder = tmp_path / "stopped"
    run = train(cluster[0], folder, cache, "--steps", "5000", "--save-every", "2")
    until_saved(run, folder)
    threading.Timer(0.5, run.send_signal, [signal.SIGINT]).start()
    output, errors = run.communicate(timeout=300)
    assert run.returncode == 130 and '"ok": false' in output, (output, errors)


def raylet(node: Any) -> int:
    (process,) = node.all_processes["raylet"]
    pid: int = process.process.pid
    return pid


def descendants(pid: int) -> list[int]:
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listing.splitlines()]
    children = [child for child, parent in pairs if parent == pid]
    return [each for child in children for each in (child, *descendants(child))]


def test_ray_is_imported_with_the_option_alone() -> None:
    program = "import sys; from inweave.cli import train; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.full
def test_other_users_of_the_machine_cannot_join_a_local_cluster() -> None:
    """A program that reaches its ports could run code in it."""
    join = "import sys, ray; ray.init(address=sys.argv[1], logging_level='ERROR'); print('joined')"
    own = f"""
import os, subprocess, sys
stranger = dict(os.environ)
from inweave.cli.launch_cluster import connect
ray = connect("local")
address = ray.get_runtime_context().gcs_address
done = subprocess.run([sys.executable, "-c", {join!r}, address], env=stranger, capture_output=True, text=True)
print(done.returncode, "joined" in done.stdout, ray.get(ray.remote(lambda: "own").remote()))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    done = subprocess.run(
        [sys.executable, "-c", own], env={**environment, **ENVIRONMENT}, capture_output=True, text=True, timeout=180
    )
    assert done.stdout.split() == ["1", "False", "own"], done.stderr
