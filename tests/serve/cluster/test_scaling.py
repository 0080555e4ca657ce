"""As many runners as the queue needs, and files that reach nodes without them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from inweave.models import embedded
from tests.serve.cluster.nodes import Nodes, descendants
from tests.serve.cluster.setup import LONG, cluster
from tests.serve.worker import SMALL, Worker

pytestmark = pytest.mark.full


def test_runners_come_with_jobs_and_go_without(tmp_path: Path) -> None:
    options = ("--min-runners", "0", "--max-runners", "2", "--idle-seconds", "3")
    with cluster(tmp_path, 2, *options) as setup:
        worker = setup.worker
        assert setup.devices == [] and worker.http.get("/ready").status_code == 200
        # of sizes that share no batch: one runner could take all of the others
        jobs = [worker.submit(**LONG | {"width": 64 + 8 * number}) for number in range(4)]
        worker.until(lambda: sum(each["job"] is not None for each in setup.devices) == 2)
        assert len({each["node"] for each in setup.devices}) == 2
        assert [worker.ended(each)["state"] for each in jobs] == ["done"] * 4
        worker.until(lambda: setup.devices == [], 60)
        assert worker.ended(worker.submit(**SMALL))["state"] == "done"


def test_models_and_loras_reach_a_node_that_has_neither(tmp_path: Path) -> None:
    model, loras = tmp_path / "models" / "mine", tmp_path / "loras"
    shutil.copytree(embedded.folder(), model, ignore=shutil.ignore_patterns("loras", "styles"))
    loras.mkdir()
    shutil.copy(embedded.loras()["pixel"], loras / "dots.safetensors")
    options = ("--model", str(model), "--lora-dir", str(loras))
    request = {**SMALL, "seed": 3, "loras": [{"name": "dots", "strength": 0.8}]}
    plain = Worker(tmp_path / "plain", *options).start()
    (image,) = plain.ended(plain.submit(**request))["result"]["images"]
    expected = plain.http.get(image["url"]).content
    plain.stop()
    with cluster(tmp_path, 0, *options, wait=False) as setup:
        node = setup.nodes.add_without(model, loras, tmp_path / "data")
        try:
            setup.worker.wait_ready()
            for _ in range(2):
                ended = setup.worker.ended(setup.worker.submit(**request))
                assert ended["state"] == "done", ended["error"]
                (image,) = ended["result"]["images"]
                assert setup.worker.http.get(image["url"]).content == expected, "with the names of the originals"
            assert [each["role"] for each in setup.devices] == ["images"], "it does not see the folder of training"
            copies = sorted(path.name for path in (tmp_path / "cache").glob("*/*") if len(path.parent.name) == 64)
            assert copies == ["dots.safetensors", "mine"]
            assert [each["adapters"] for each in setup.devices] == [1], "known by its path on this machine"
        finally:
            node.terminate()
            node.wait()


def test_a_local_cluster_is_its_own_and_ends_with_its_worker(tmp_path: Path) -> None:
    """Also while another one runs on this machine, which it would find."""
    nodes = Nodes(1)
    worker = Worker(tmp_path / "data", "--cluster", "local", "--node-cache", str(tmp_path / "cache"))
    try:
        worker.start()
        (node,) = worker.http.get("/v1/queue").json()["nodes"]
        assert node["cpus"] == (os.cpu_count() or 1)
        assert worker.ended(worker.submit(**SMALL))["state"] == "done"
        (bridge,) = worker.child_pids("inweave.serve.cluster.bridge")
        processes = descendants(bridge)
        assert processes and worker.stop() == 0
        worker.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), 30)
    finally:
        nodes.stop()
