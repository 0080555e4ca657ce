"""Full-size training on one GPU: the plan for a memory limit, and whether it holds. `inweave bench step` has peers.

    PYTHONPATH=src:. python3 bench/training.py [MODEL[:RUN] ...]        sdxl, flux1-dev:5GiB, z-image-turbo:resident

Models have random bf16 weights and the published configurations; images are noise of 1024 x 1024. Each run is the
real command in a separate process, observed from outside: "used" is the peak that nvidia-smi reported above the level
before the run, so it includes everything, CUDA's own memory too; "host" is the peak of the process's anonymous host
memory (RssAnon), page-locked memory included, mapped files not. "expected" and "measured" are the activation memory of
a step as the command itself reports it. "seconds" is one step with data and logging, averaged over the last steps; the
notes tell what the plan predicted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from inweave.bench.train_command import roomy_folder, write_images, write_model

DEVICE = "cuda"
SIDE, STEPS, LAST = 1024, 40, 20
GIB = 1 << 30
PATIENCE = 240
SAMPLES = {"sample_prompts": ["an image"], "sample_every": 18, "sample_steps": 4}


class Run(NamedTuple):
    """A run of the command; ``name``: a memory limit for `--vram`, unless there is none."""

    name: str
    limited: bool
    settings: dict[str, Any]


def limited(limit: str, **settings: Any) -> Run:
    return Run(limit, True, settings)


RESIDENT = Run("resident", False, {"gradient_checkpointing": "full"})
PLAIN = {"targets": ["to_q", "to_k", "to_v", "to_out.0"], "rank": 32}
RUNS: dict[str, list[Run]] = {
    "sdxl": [
        RESIDENT,
        limited("4GiB", quantize="auto"),
        limited("3GiB", quantize="auto"),
        Run("batch 4", False, {"batch_size": 4, **PLAIN}),
        *(limited(limit, batch_size=4, **PLAIN, **SAMPLES) for limit in ("24GiB", "12GiB", "8GiB")),
    ],
    "sd3.5-medium": [limited("12GiB", batch_size=4, **PLAIN, **SAMPLES)],
    "flux1-dev": [
        RESIDENT,
        limited("5GiB", quantize="auto"),
        limited("4.5GiB", quantize="auto"),
        Run("nf4", False, {"gradient_checkpointing": "full", "quantize": "nf4"}),
        *(limited(limit, batch_size=4, **PLAIN, **SAMPLES) for limit in ("32GiB", "20GiB")),
    ],
    "qwen-image": [RESIDENT, limited("6.5GiB", quantize="auto"), limited("5.5GiB", quantize="auto")],
    "z-image-turbo": [RESIDENT, limited("4GiB", quantize="auto"), limited("3GiB", quantize="auto")],
}
RANKS = {"sdxl": 32}  # 16 elsewhere
ON_DISK = ("qwen-image",)  # too large to be held in memory twice


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


@contextmanager
def peak_host_memory(process: int) -> Iterator[MemoryWatch]:
    """Watch the peak of a process's anonymous memory; what `wait4` reports includes that of its parent."""
    watch, ended = MemoryWatch(), threading.Event()

    def read() -> None:
        while not ended.wait(0.05):
            with suppress(OSError, ValueError, IndexError):  # it has ended
                words = Path(f"/proc/{process}/status").read_text("utf-8").split()
                watch.highest = max(watch.highest, int(words[words.index("RssAnon:") + 1]) << 10)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join()


def run_training(model: Path, images: Path, run: Run, rank: int, folder: Path) -> dict[str, Any]:
    """Run the command once; return memory and seconds, or its error."""
    output = Path(tempfile.mkdtemp(dir=folder))
    settings: dict[str, Any] = {"rank": rank, "batch_size": 1, "log_every": 5, "cache_dir": str(folder / "cache")}
    command = [
        sys.executable, "-P", "-m", "inweave", "train", "--model", str(model), "--dataset", str(images),
        "--output", str(output), "--steps", str(STEPS), "--json", *(["--vram", run.name] if run.limited else []),
    ]  # fmt: skip
    for name, value in (settings | run.settings).items():
        command += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    started = time.perf_counter()
    with peak_memory() as memory, (output / "stdout").open("w+") as printed, (output / "stderr").open("w+") as errors:
        process = subprocess.Popen(command, stdout=printed, stderr=errors, text=True)
        timer = threading.Timer(PATIENCE, process.kill)
        timer.start()
        with peak_host_memory(process.pid) as host:
            process.wait()
        timer.cancel()
    row: dict[str, Any] = {
        "total_s": time.perf_counter() - started, "used": memory.used, "host": host.used
    }  # fmt: skip
    text = (output / "stdout").read_text()
    if process.returncode:
        return row | {"error": " ".join(((output / "stderr").read_text() or text).split())[-600:]}
    records = [json.loads(line) for line in (output / "lora.jsonl").read_text().splitlines()]
    losses = json.loads(text)["losses"]
    row["notes"] = [record["text"] for record in records if "text" in record]
    row["samples"] = sum(record.get("event") == "sample" for record in records)
    row["finite"] = all(isinstance(loss, float) for loss in losses)
    for record in records:
        if "measured_bytes" in record:
            row |= {"measured": record["measured_bytes"], "expected": record["expected_bytes"]}
    times = {record["step"]: record["time"] for record in records if "loss" in record}
    row["step_s"] = (times[STEPS] - times[LAST]) / (STEPS - LAST)
    return row


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {SIDE} x {SIDE}")
    lines = []
    for model, only in choices(sys.argv[1:]).items():
        place = None if model in ON_DISK else roomy_folder()
        with tempfile.TemporaryDirectory(prefix="inweave-bench-", dir=place) as temporary:
            folder = Path(temporary)
            started = time.perf_counter()
            write_model(model, folder / model, torch.device(DEVICE), torch.bfloat16)
            write_images(folder / "images", SIDE)
            print(f"{model}: written in {time.perf_counter() - started:.0f} s", flush=True)
            for run in [run for run in RUNS[model] if not only or run.name in only]:
                name = f"{model}, {run.name}"
                row = run_training(folder / model, folder / "images", run, RANKS.get(model, 16), folder)
                print(name, json.dumps(row), flush=True)
                lines.append(_line(name, row))
    print(f"\n{'':<28}{'seconds':>9}{'used GiB':>10}{'host':>8}{'expected':>10}{'measured':>10}{'all s':>8}")
    print("\n".join(lines))


def choices(arguments: list[str]) -> dict[str, list[str]]:
    """Return the names of the runs of each model, none for all: a model is written once."""
    chosen: dict[str, list[str]] = {}
    for argument in arguments or list(RUNS):
        model, _, run = argument.partition(":")
        chosen.setdefault(model, []).extend([run] if run else [])
    return chosen


def _line(name: str, row: dict[str, Any]) -> str:
    def cell(key: str, unit: float, places: int) -> str:
        return f"{row[key] / unit:.{places}f}" if row.get(key) is not None else "-"

    line = (
        f"{name:<28}{cell('step_s', 1, 3):>9}{cell('used', GIB, 2):>10}{cell('host', GIB, 1):>8}"
        f"{cell('expected', GIB, 2):>10}{cell('measured', GIB, 2):>10}{cell('total_s', 1, 0):>8}"
    )
    return line + (f"  {row['error'][:200]}" if "error" in row else "")


if __name__ == "__main__":
    main()
