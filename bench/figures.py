"""The figures of docs/bench, measured on a GPU: every command of `inweave bench` in a separate process.

    python3 bench/figures.py docs/bench                        all, the most important first
    python3 bench/figures.py docs/bench step-sdxl-1 kernels    these

The processes are forked from this one, which has imported torch and diffusers, which takes many seconds, and has not
started CUDA. A command that fails or exceeds its time limit leaves no file, and the others are still measured.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from inweave.cli.environment import use_expandable_segments

LIBRARIES = ("torch", "diffusers", "transformers", "peft", "inweave.cli.app", "inweave.bench.bench")


class Figure(NamedTuple):
    """A command of `inweave bench`, and its time limit in seconds."""

    command: str
    limit: float


LONG = "--warmup 50 --steps 200"  # a GPU gets slower when it reaches its power limit, after a few seconds
FLUX = f"step --model flux1-dev --rank 16 --targets listed --compile on {LONG}"
FIGURES = {
    "step-sdxl-1": Figure(f"step --model sdxl --batch 1 {LONG}", 90),
    "step-sdxl-4": Figure(f"step --model sdxl --batch 4 {LONG}", 120),
    "step-sd3.5-large": Figure(f"step --model sd3.5-large --rank 16 --compile on {LONG}", 180),
    "step-flux1-dev": Figure(FLUX, 240),
    "step-flux1-dev-fp8": Figure(f"{FLUX} --quantize fp8 --no-peers", 210),
    "step-sdxl-1-full": Figure(f"step --model sdxl --batch 1 --gradient-checkpointing full --no-peers {LONG}", 90),
    "step-sdxl-4-selective": Figure(
        f"step --model sdxl --batch 4 --gradient-checkpointing selective --no-peers {LONG}", 120
    ),
    "step-sdxl-1-deterministic": Figure(f"step --model sdxl --batch 1 --deterministic --no-peers {LONG}", 90),
    "step-flux1-dev-deterministic": Figure(f"{FLUX} --deterministic --no-peers", 210),
    "step-sd3.5-large-deterministic": Figure(
        f"step --model sd3.5-large --rank 16 --compile on --deterministic --no-peers {LONG}", 180
    ),
    "unmerged-sdxl": Figure("swap --model sdxl --unmerged", 90),
    "train-sdxl": Figure("step --model sdxl --train 200", 150),
    "kernels": Figure("kernels --replays 60", 150),
    "swap": Figure("swap --model sdxl", 120),
    "memory-sdxl-4": Figure("memory --model sdxl --batch 4 --steps 4 --no-peers", 180),
}


def measure(figure: Figure, file: Path) -> str | None:
    """Measure a figure; return the reason if that failed, else None."""
    file.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(figure.command, file))
    process.start()
    process.join(figure.limit)
    if process.exitcode is None:
        process.kill()
        with suppress(ProcessLookupError):  # killed before it had a process group of its own
            os.killpg(process.pid or 0, signal.SIGKILL)  # its subprocesses
        process.join()
        file.unlink(missing_ok=True)
        return f"it exceeded its time limit of {figure.limit:g} s"
    return None if process.exitcode == 0 and file.exists() else f"exit code {process.exitcode}"


def _run(command: str, file: Path) -> None:
    os.setsid()
    from inweave.cli.app import app

    app(["bench", *command.split(), "--json", str(file)])


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures the figures of docs/bench.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FIGURES))
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in FIGURES]:
        parser.error(f"no figure is called {unknown[0]}; these are: {', '.join(FIGURES)}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    use_expandable_segments()  # the commands call it too, but torch is imported by then
    # a library asks for CUDA while it is imported; asked through CUDA itself, no forked process could start it
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for library in LIBRARIES:
        importlib.import_module(library)
    missing = []
    for name in arguments.names or FIGURES:
        started = time.perf_counter()
        reason = measure(FIGURES[name], arguments.folder / f"{name}.json")
        outcome = f"no figure: {reason}" if reason else "measured"
        print(f"{name}: {outcome}, {time.perf_counter() - started:.0f} s\n", flush=True)
        missing += [name] * (reason is not None)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
