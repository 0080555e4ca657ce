"""Full-size training on one GPU: the plan for a memory limit, and whether it holds. `inweave bench step` has peers.

    PYTHONPATH=src:. python3 bench/training.py [VARIANT[:LIMIT] ...]        sdxl, sd3.5-medium, flux1-dev:32GiB

Models have random bf16 weights and the published configurations; images are noise of 1024 x 1024. Each run is the
real command in a separate process, observed from outside: "used" is the peak that nvidia-smi reported above the level
before the run, so it includes everything, CUDA's own memory too. "expected" and "measured" are the activation memory of
a step as the command itself reports it. "seconds" is one step with data and logging, averaged over the last steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inweave.bench.train_command import write_images, write_model

DEVICE = "cuda"
SIDE, RANK, STEPS, LAST = 1024, 32, 15, 10
GIB = 1 << 30
PATIENCE = 240
#: (batch size, memory limit, gradient checkpointing) of the runs of a variant
RUNS: dict[str, list[tuple[int, str | None, str]]] = {
    "sdxl": [(4, None, "off"), (1, None, "full"), (4, "24GiB", "off"), (4, "12GiB", "off"), (4, "8GiB", "off")],
    "sd3.5-medium": [(4, "12GiB", "off")],
    "flux1-dev": [(4, "32GiB", "off"), (4, "20GiB", "off"), (1, None, "full")],
}
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")


# a run and its memory


@dataclass
class MemoryWatch:
    """GPU memory before a run, and the highest value since."""

    before: int = 0
    highest: int = 0

    @property
    def used(self) -> int:
        return self.highest - self.before


@contextmanager
def peak_memory() -> Iterator[MemoryWatch]:
    """Watch the peak of the memory in use on the GPU, queried twenty times a second."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    watch = MemoryWatch(before=int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) << 20)
    monitor = subprocess.Popen([*query, "-lms", "50"], stdout=subprocess.PIPE, text=True)

    def read() -> None:
        assert monitor.stdout is not None
        for line in monitor.stdout:
            watch.highest = max(watch.highest, int(line) << 20)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield watch
    finally:
        monitor.kill()
        thread.join()


def run_training(model: Path, images: Path, batch: int, vram: str | None, mode: str, folder: Path) -> dict[str, Any]:
    """Run the command once; return memory and seconds, or its error."""
    output = Path(tempfile.mkdtemp(dir=folder))
    command = [
        sys.executable, "-P", "-m", "inweave", "train", "--model", str(model), "--dataset", str(images),
        "--output", str(output), "--batch-size", str(batch), "--rank", str(RANK), "--steps", str(STEPS), "--json",
        "--set", f"targets={json.dumps(TARGETS)}",
        "--set", "log_every=5", "--set", f"gradient_checkpointing={mode}", "--set", f"cache_dir={folder / 'cache'}",
        *(["--vram", vram, "--set", 'sample_prompts=["an image"]', "--set", "sample_every=8",
           "--set", "sample_steps=4"]
          if vram else []),
    ]  # fmt: skip
    started = time.perf_counter()
    with peak_memory() as memory:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    row: dict[str, Any] = {"total_s": time.perf_counter() - started, "used": memory.used}
    if done.returncode:
        return row | {"error": " ".join((done.stderr or done.stdout).split())[-600:]}
    records = [json.loads(line) for line in (output / "lora.jsonl").read_text().splitlines()]
    losses = json.loads(done.stdout)["losses"]
    row["notes"] = [record["text"] for record in records if record.get("event") in ("memory", "sample failed")]
    row["samples"] = sum(record.get("event") == "sample" for record in records)
    row["finite"] = all(isinstance(loss, float) for loss in losses)
    for record in records:
        if "measured_bytes" in record:
            row |= {"measured": record["measured_bytes"], "expected": record["expected_bytes"]}
    times = {record["step"]: record["time"] for record in records if "loss" in record}
    row["step_s"] = (times[STEPS] - times[LAST]) / (STEPS - LAST)
    return row


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, rank {RANK}, {SIDE} x {SIDE}")
    lines = []
    for choice in sys.argv[1:] or RUNS:
        variant, _, only = choice.partition(":")
        with tempfile.TemporaryDirectory(prefix="inweave-bench-") as temporary:
            folder = Path(temporary)
            started = time.perf_counter()
            write_model(variant, folder / variant, torch.device(DEVICE), torch.bfloat16)
            write_images(folder / "images", SIDE)
            print(f"{variant}: written in {time.perf_counter() - started:.0f} s", flush=True)
            for batch, vram, mode in [run for run in RUNS[variant] if only in ("", run[1])]:
                name = f"{variant}, batch {batch}, {vram or mode}"
                row = run_training(folder / variant, folder / "images", batch, vram, mode, folder)
                print(name, json.dumps(row), flush=True)
                lines.append(_line(name, row))
    print(f"\n{'':<44}{'seconds':>10}{'used GiB':>10}{'expected':>10}{'measured':>10}{'all s':>8}")
    print("\n".join(lines))


def _line(name: str, row: dict[str, Any]) -> str:
    def cell(key: str, unit: float, places: int) -> str:
        return f"{row[key] / unit:.{places}f}" if row.get(key) is not None else "-"

    line = (
        f"{name:<44}{cell('step_s', 1, 3):>10}{cell('used', GIB, 2):>10}{cell('expected', GIB, 2):>10}"
        f"{cell('measured', GIB, 2):>10}{cell('total_s', 1, 0):>8}"
    )
    return line + (f"  {row['error'][:200]}" if "error" in row else "")


if __name__ == "__main__":
    main()
