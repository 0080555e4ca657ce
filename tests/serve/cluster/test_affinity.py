"""Jobs with 200 LoRAs by Zipf's law on three nodes: most find their LoRA in the memory of the runner they get."""

from __future__ import annotations

import random
import re
import time
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from inweave.models import embedded
from tests.serve.cluster.setup import cluster
from tests.serve.worker import SMALL, Worker
from tests.support import figure

pytestmark = pytest.mark.full
LORAS, WAITING = 200, 12
#: jobs that fill the runners' memories, and jobs that are counted
WARM_UP, COUNTED = 500, 500


def library_of(folder: Path) -> None:
    """Write LoRAs that differ in every tensor."""
    folder.mkdir()
    tensors = load_file(str(embedded.loras()["pixel"]))
    for number in range(LORAS):
        scaled = {name: np.asarray(value * (1 + number / 1000), value.dtype) for name, value in tensors.items()}
        save_file(scaled, str(folder / f"zipf-{number}.safetensors"))


def lora_hits(worker: Worker) -> dict[str, float]:
    """Return how many jobs found their LoRA in memory, and how many did not."""
    lines = re.findall(r'^inweave_job_loras_total{found="(\w+)"} (\S+)$', worker.http.get("/metrics").text, re.M)
    return {"memory": 0.0, "disk": 0.0} | {name: float(count) for name, count in lines}


def test_nine_of_ten_jobs_find_their_lora_in_memory(tmp_path: Path) -> None:
    library_of(tmp_path / "loras")
    chance, weights = random.Random(3), [*accumulate(1 / (rank + 1) for rank in range(LORAS))]
    options = ("--min-runners", "3", "--max-runners", "3", "--lora-dir", str(tmp_path / "loras"))
    with cluster(tmp_path, 3, *options) as setup:
        worker = setup.worker
        setup.until_ready(3)

        def run(count: int) -> list[str]:
            jobs = list[str]()
            for _ in range(count):
                while len(jobs) >= WAITING and worker.queued() >= WAITING:
                    time.sleep(0.02)
                lora = f"zipf-{chance.choices(range(LORAS), cum_weights=weights)[0]}"
                jobs.append(worker.submit(**SMALL, gallery=False, loras=[{"name": lora}]))
            assert {worker.ended(job)["state"] for job in jobs} == {"done"}
            return jobs

        run(WARM_UP)
        before, begun = lora_hits(worker), time.monotonic()
        run(COUNTED)
        after = lora_hits(worker)
        hits, misses = (after[name] - before[name] for name in ("memory", "disk"))
        figure(
            f"{LORAS} LoRAs by Zipf's law on 3 runners: {hits:.0f} of {hits + misses:.0f} jobs found theirs in memory, "
            f"{100 * hits / (hits + misses):.1f} %, {COUNTED / (time.monotonic() - begun):.1f} jobs/s"
        )
        assert hits + misses == COUNTED and hits >= 0.9 * COUNTED
