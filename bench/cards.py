"""All bars for small cards on one GPU in under ten minutes: `PYTHONPATH=src:. python3 bench/cards.py`.

    smallest   the real command within a limit, observed by nvidia-smi (`bench/training.py`): GiB of the device and of
               the host, seconds of a step, and their ratio to the resident step with full checkpointing
    resident   a step of random weights in this process (`inweave.bench.step`), recorded as a CUDA graph

Lines are printed at once, so that a call that is cut short has shown the ones before.
Models are written to disk once; Qwen-Image is last, since writing it takes longest.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from bench.training import GIB, ON_DISK, RANKS, SIDE, limited, run_training

from inweave.bench.step import StepCase, our_step
from inweave.bench.train_command import roomy_folder, write_images, write_model

DEVICE, BUDGET = torch.device("cuda"), 570  # seconds
#: model -> (bar for the device in GiB, bar for the ratio of a step to the resident one, or None)
SMALLEST = {"sdxl": (4.0, 2.0), "z-image-turbo": (4.0, None), "flux1-dev": (5.0, 1.5), "qwen-image": (6.5, 1.5)}
#: format -> (bar for milliseconds of Flux's step, or None; bar for its ratio to bf16, or None; bar for GiB)
FLUX = {"fp8": (260.0, None, None), "nf4": (None, 1.25, 11.0)}


def resident(model: str, quantize: str = "off", checkpointing: str = "full") -> tuple[float, float]:
    """Return seconds of a step and its peak in GiB."""
    case = StepCase(model, rank=RANKS.get(model, 16), checkpointing=checkpointing, quantize=quantize)
    figures, _ = our_step(case, DEVICE, torch.bfloat16, runs=8, warmup=4)
    return figures.median, (figures.peak or 0) / GIB


def flux() -> None:
    """Print the resident steps of Flux in bf16, fp8 and nf4, without checkpointing."""
    plain, _ = resident("flux1-dev", checkpointing="off")
    print(f"flux1-dev bf16, resident: {plain * 1e3:.0f} ms", flush=True)
    for format, (time_bar, ratio_bar, memory_bar) in FLUX.items():
        mode = "full" if memory_bar else "off"
        base = resident("flux1-dev", checkpointing=mode)[0] if memory_bar else plain
        seconds, memory = resident("flux1-dev", format, mode)
        bars = [
            f"{seconds * 1e3:.0f} ms" + (f" (bar {time_bar:.0f})" if time_bar else ""),
            f"{seconds / base:.2f} of bf16" + (f" (bar {ratio_bar})" if ratio_bar else ""),
            f"peak {memory:.2f} GiB" + (f" (bar {memory_bar:.0f})" if memory_bar else ""),
        ]
        print(f"flux1-dev {format}, {mode} checkpointing: {', '.join(bars)}", flush=True)


def smallest(model: str) -> None:
    """Print the smallest run of a model within its bar."""
    bar, ratio_bar = SMALLEST[model]
    base, _ = resident(model)
    place = None if model in ON_DISK else roomy_folder()
    with tempfile.TemporaryDirectory(prefix="inweave-cards-", dir=place) as temporary:
        folder = Path(temporary)
        write_model(model, folder / model, DEVICE, torch.bfloat16)
        write_images(folder / "images", SIDE)
        stored = sum(path.stat().st_size for path in (folder / model).rglob("*.safetensors"))
        run = limited(f"{bar}GiB", quantize="auto")
        row = run_training(folder / model, folder / "images", run, RANKS.get(model, 16), folder)
    if "error" in row:
        print(f"{model}, {bar} GiB: {row['error'][:300]}", flush=True)
        return
    ratio = row["step_s"] / base
    print(
        f"{model}: {row['used'] / GIB:.2f} GiB (bar {bar}), {row['step_s']:.3f} s, {ratio:.2f} of resident"
        f"{f' (bar {ratio_bar})' if ratio_bar else ''}, host {row['host'] / stored:.2f} of the stored base (bar 1.15), "
        f"activations measured / planned {row.get('measured', 0) / max(row.get('expected', 0), 1):.2f} (0.9 to 1.1)",
        flush=True,
    )


def main() -> None:
    started = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {SIDE} x {SIDE}", flush=True)
    flux()
    for model in SMALLEST:
        if time.perf_counter() - started > BUDGET * 0.75:
            print(f"{model}: left out, the time is over", flush=True)
            continue
        smallest(model)
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
