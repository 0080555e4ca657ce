"""Several machines: two agents of torchrun on this one, each with a process of its own, and the folder they share."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.test_train_processes import arguments
from tests.e2e.test_train_shard import bits

pytestmark = pytest.mark.full


def nodes(folder: Path, caches: list[Path], *more: list[str]) -> list[subprocess.Popen[str]]:
    """Start a run on two nodes, which share ``folder`` and nothing else; ``more``: further options of each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
             "--master-addr", "127.0.0.1", "--master-port", str(port), "--nproc-per-node", "1", "-m", "inweave",
             *arguments(caches[node]), "--set", "log_every=1", "-o", str(folder), *(more[node] if more else ())],
            cwd=folder.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for node in range(2)
    ]  # fmt: skip


def test_a_lost_node_ends_the_run_which_resumes_bit_for_bit(tmp_path: Path) -> None:
    caches = [tmp_path / f"cache-{node}" for node in range(2)]
    long = [["--steps", "12", "--save-every", "2"]] * 2
    for process in nodes(tmp_path / "whole", caches, *long):
        _, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors[-3000:]
    assert all(any(cache.rglob("*.safetensors")) for cache in caches), "each node encodes for itself"

    first, second = nodes(tmp_path / "lost", caches, *long)
    state = tmp_path / "lost" / "lora-state"
    deadline = time.monotonic() + 300
    while not list(state.glob("step-*")) and time.monotonic() < deadline and first.poll() is None:
        time.sleep(0.02)
    second.send_signal(signal.SIGSTOP)  # it would tell the other agent
    subprocess.run(["pkill", "-KILL", "-P", str(second.pid)], check=False)
    second.kill()
    output, errors = first.communicate(timeout=200)
    second.communicate(timeout=60)
    assert first.returncode != 0 and (output + errors).count("another process of this run ended") == 1, errors[-3000:]
    assert not (tmp_path / "lost" / "lora.safetensors").exists()

    again = [[*options, "--resume"] for options in long]
    for process in nodes(tmp_path / "lost", caches, *again):
        _, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors[-3000:]
    assert bits(tmp_path / "lost" / "lora.safetensors") == bits(tmp_path / "whole" / "lora.safetensors")


def test_the_error_of_a_rank_on_another_node_is_shown_on_both(tmp_path: Path) -> None:
    first, second = nodes(tmp_path / "out", [tmp_path / "a", tmp_path / "b"], [], ["--dataset", str(tmp_path / "gone")])
    reason = f"{tmp_path / 'gone'}"
    for process in (first, second):
        output, errors = process.communicate(timeout=300)
        assert process.returncode != 0
        assert reason in json.dumps(output) + errors
