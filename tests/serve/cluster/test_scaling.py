"""As many runners as the queue needs, and files that reach nodes without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.cluster.setup import LONG, cluster
from tests.serve.worker import SMALL

pytestmark = pytest.mark.full


def test_runners_come_with_jobs_and_go_without(tmp_path: Path) -> None:
    options = ("--min-runners", "0", "--max-runners", "2", "--idle-seconds", "3")
    with cluster(tmp_path, 2, *options) as setup:
        worker = setup.worker
        assert setup.devices == [] and worker.http.get("/ready").status_code == 200
        jobs = [worker.submit(**LONG, seed=seed) for seed in range(4)]
        worker.until(lambda: sum(each["job"] is not None for each in setup.devices) == 2)
        assert len({each["node"] for each in setup.devices}) == 2
        assert [worker.ended(each)["state"] for each in jobs] == ["done"] * 4
        worker.until(lambda: setup.devices == [], 60)
        assert worker.ended(worker.submit(**SMALL))["state"] == "done"
