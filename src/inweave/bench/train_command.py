"""`inweave train` on a full-size model with random weights: the time of a step with data and log, and without.

command     a separate process: a model folder, eight images with captions, latents and text cached, the usual log
step        time between lines of the log over the steps between them; the median after a tenth of the run
all         the mean from that tenth to the end, with everything else that the run did
alone       `inweave.bench.step`: the same update on a batch that is on the device
"""

from __future__ import annotations

import importlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from inweave.bench.models import fill_random, published_blueprint
from inweave.bench.report import BenchRow
from inweave.bench.step import StepCase, our_step, step_config, step_limit
from inweave.bench.timing import Rates
from inweave.errors import InweaveError
from inweave.files.writing import write_text
from inweave.models import bundled, embedded
from inweave.models.families import network_classes

IMAGES = 8
PATIENCE = 300  # seconds for the command
_ROOM = 1 << 35  # bytes for a model, its adapter and checkpoints
_MEMORY = Path("/dev/shm")
_SPEED_EVENTS = ("speed", "compile", "compile failed", "graph", "graph failed")


def measure_training(
    case: StepCase,
    device: torch.device,
    dtype: torch.dtype,
    rates: Rates,
    *,
    steps: int = 200,
    runs: int = 10,
    progress: Callable[[str], None] | None = None,
) -> tuple[list[BenchRow], list[str]]:
    """Return a row in milliseconds, and notes."""
    report = progress or (lambda text: None)
    report(f"{case.name}: a step alone")
    bare_step, _ = our_step(case, device, dtype, runs=runs, warmup=4)
    with tempfile.TemporaryDirectory(prefix="inweave-bench-", dir=roomy_folder()) as temporary:
        folder = Path(temporary)
        report(f"{case.name}: a model folder")
        model = write_model(case.model, folder / "model", device, dtype)
        write_images(folder / "images", case.size)
        report(f"{case.name}: inweave train, {steps} steps")
        settings = step_config(case, device, dtype).model_dump(mode="json", exclude_unset=True)
        seconds, notes = run_command(model, folder, steps, settings)
    first, last = min(step for step in seconds if step >= steps // 10), max(seconds)
    whole = (seconds[last] - seconds[first]) / (last - first)
    marks = sorted(step for step in seconds if step >= first)
    parts = [(seconds[b] - seconds[a]) / (b - a) for a, b in pairwise(marks)]
    median = statistics.median(parts)
    details: dict[str, float | str] = {
        "all": whole * 1e3, "step alone": bare_step.median * 1e3, "times the step": median / bare_step.median,
        "all, times the step": whole / bare_step.median, "steps": f"{first} to {last}",
    }  # fmt: skip
    row = BenchRow(f"inweave train, {case.name}", "ms", median * 1e3, {}, step_limit(case, dtype, rates), details)
    return [row], [*bare_step.notes, *notes]


def run_command(model: str, folder: Path, steps: int, settings: dict[str, Any]) -> tuple[dict[int, float], list[str]]:
    """Run the command; return the clock after every logged step, and notes. A failure is raised with its output."""
    settings = {**settings, "cache_dir": str(folder / "cache"), "log_every": max(1, min(10, steps // 20))}
    settings.pop("dataset")
    output = folder / "output"
    command = [
        sys.executable, "-P", "-m", "inweave", "train", "--model", model, "--dataset", str(folder / "images"),
        "--output", str(output), "--steps", str(steps), "--json",
    ]  # fmt: skip
    for name, value in settings.items():
        command += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        raise InweaveError(
            f"inweave train: {steps} steps did not finish within {PATIENCE} s; measure fewer, or a smaller --size"
        ) from None
    total = time.perf_counter() - started
    if done.returncode:
        printed = " ".join((done.stderr or done.stdout).split())
        raise InweaveError(f"inweave train ended with exit code {done.returncode}: {printed[-600:]}")
    (log,) = output.glob("*.jsonl")
    records = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    clocks = {record["step"]: float(record["time"]) for record in records if "loss" in record}
    notes = [f"inweave train: {total:.3g} s with its start, {IMAGES} images encoded and the adapter written"]
    notes += [f"inweave train: {record['text']}" for record in records if record.get("event") in _SPEED_EVENTS]
    losses = json.loads(done.stdout)["losses"]
    if not all(isinstance(loss, float) for loss in losses):
        notes.append("inweave train: a loss is not finite")
    return clocks, notes


def write_model(name: str, target: Path, device: torch.device, dtype: torch.dtype) -> str:
    """Write a diffusers folder with random weights, unless it is the embedded model; return the name for `--model`."""
    if name == embedded.NAME:
        return name
    variant = published_blueprint(name).name
    bundled.write_skeleton(variant, target)
    for number, folder in enumerate(bundled.folders(variant)):
        if not folder.startswith(("tokenizer", "scheduler")):
            network = _random_network(variant, folder, number, device, dtype)
            network.save_pretrained(target / folder, safe_serialization=True)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return str(target)


def _random_network(variant: str, folder: str, seed: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a component on the device, with random weights that preserve the scale of activations."""
    class_name, config = bundled.component_config(variant, folder)
    kind = getattr(importlib.import_module(network_classes()[class_name].library), class_name)
    with torch.device("meta"):
        model = kind.from_config(config) if "_class_name" in config else kind(kind.config_class.from_dict(config))
    model = model._apply(lambda t: t.to(dtype) if t.is_floating_point() else t).to_empty(device=device)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    fill_random(model, seed)
    return model.eval().requires_grad_(False)


def write_images(folder: Path, side: int) -> None:
    """Write square images with caption files."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    for number in range(IMAGES):
        coarse = Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8))
        coarse.resize((side, side), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
        write_text(folder / f"{number}.txt", f"image number {number}")


def roomy_folder() -> str | None:
    """Return /dev/shm if it has enough space, since a model is written and read once; else None, the default."""
    return str(_MEMORY) if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM else None
