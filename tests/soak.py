"""Kill a run with SIGKILL again and again, at any moment, and see that it ends with the bits of one that never was.

    python tests/soak.py --rounds 100 --seed 0

A round is one run from its first step to its file. It is started, killed and resumed until it ends by itself:

    at a moment    after a random share of the time a whole run takes
    in a save      at the n-th disk operation while a checkpoint or the adapter is written: half a file, before a flush,
                   before and between renames, in the middle of removing old ones

Processes are forked from this one, which has loaded torch and done nothing with it.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from inweave.training.checkpoint import store as checkpoint
from inweave.training.checkpoint.store import checkpoints, load_state
from tests.unit.training.tiny import EVERYTHING, OPTIMIZERS, file_bits, tiny

KEEP_LAST = (2, 0)  # checkpoints with their adapters; 0 keeps all
MOST_KILLS = 12


def settings(optimizer: str, keep_last: int) -> dict[str, Any]:
    return {**EVERYTHING, "optimizer": optimizer, "steps": 12, "save_every": 1, "keep_last": keep_last,
        "resume": "auto",
            "validation_split": 0.2}  # fmt: skip


def die_at(count: int) -> None:
    """From now on the n-th thing that touches the disk is this process's last."""
    left = itertools.count(count, -1)

    def wrapped(work: Callable[..., Any], half: bool = False) -> Callable[..., Any]:
        def touched(*arguments: Any, **options: Any) -> Any:
            if next(left) <= 0:
                if half:  # some of the bytes are there
                    work(*arguments, **options)
                    os.truncate(arguments[1], Path(arguments[1]).stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return work(*arguments, **options)

        return touched

    checkpoint._flush = wrapped(checkpoint._flush)
    checkpoint.save_file = wrapped(checkpoint.save_file, half=True)  # type: ignore[attr-defined]
    Path.rename = wrapped(Path.rename)  # type: ignore[method-assign]
    Path.replace = wrapped(Path.replace)  # type: ignore[method-assign]
    Path.write_text = wrapped(Path.write_text)  # type: ignore[method-assign]
    shutil.rmtree = wrapped(shutil.rmtree)  # type: ignore[assignment]
    os.unlink = wrapped(os.unlink)  # type: ignore[assignment]
    os.rmdir = wrapped(os.rmdir)  # type: ignore[assignment]


def start(output: Path, optimizer: str, keep_last: int, dies: int | None = None) -> int:
    """A process that trains; its number."""
    number = os.fork()
    if number:
        return number
    code = 1
    try:
        if dies is not None:
            die_at(dies)
        tiny(output, **settings(optimizer, keep_last)).train()
        code = 0
    finally:
        os._exit(code)


def ended(number: int) -> int | None:
    """None where it was killed, else its exit code."""
    status = os.waitpid(number, 0)[1]
    return None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def adapter_bits(output: Path) -> dict[str, dict[str, bytes]]:
    """The adapter of the run and those of its steps, by name."""
    return {path.name: file_bits(path) for path in (output / "t", *sorted(output.glob("t-0*")))}


def check(output: Path, expected: dict[str, dict[str, bytes]], keep_last: int) -> None:
    """Everything a user would see, as after a run that was never killed."""
    states = output / "t-state"
    steps_kept = [load_state(checkpoint).step for checkpoint in checkpoints(states)]
    assert steps_kept == list(range(12, 0, -1))[: keep_last or None], f"checkpoints {steps_kept}"
    left = [path.name for path in (*states.iterdir(), *output.iterdir()) if path.name.startswith(".")]
    assert left == [".lock"], f"left behind: {left}"
    adapters = adapter_bits(output)
    names = ["t", *(f"t-{step:06d}" for step in sorted(steps_kept) if step < 12)]
    assert list(adapters) == names, f"adapters {list(adapters)}"
    different = [name for name, bits in adapters.items() if bits != expected[name]]
    assert not different, f"adapters with other bits: {different}"
    steps = [json.loads(line)["step"] for line in (output / "t.jsonl").read_text("utf-8").splitlines()]
    assert steps == sorted(steps) and set(range(1, 13)) <= set(steps), f"the log says {steps}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("prodigyopt", "schedulefree", "torch._dynamo"):
        importlib.import_module(name)  # once, and not in every process
    chance = random.Random(options.seed)
    kills = 0
    with tempfile.TemporaryDirectory(prefix="inweave-soak-") as folder:
        straight: dict[str, tuple[dict[str, dict[str, bytes]], float]] = {}
        for number in range(options.rounds):
            optimizer = OPTIMIZERS[number % len(OPTIMIZERS)]
            if optimizer not in straight:
                whole, started = Path(folder) / optimizer, time.perf_counter()
                assert ended(start(whole, optimizer, 0)) == 0
                straight[optimizer] = adapter_bits(whole), time.perf_counter() - started
            expected, seconds = straight[optimizer]
            keep_last = KEEP_LAST[number // 2 % 2]
            output = Path(folder) / str(number)
            killed = 0
            while True:
                in_save = number % 2 == 0 and killed < MOST_KILLS
                process = start(output, optimizer, keep_last, chance.randrange(1, 60) if in_save else None)
                if not in_save and killed < MOST_KILLS:
                    time.sleep(chance.random() * seconds)
                    os.kill(process, signal.SIGKILL)
                code = ended(process)
                if code is not None:
                    assert code == 0, f"round {number}: a resumed run failed"
                    break
                killed += 1
            check(output, expected, keep_last)
            shutil.rmtree(output)
            kills += killed
            print(f"round {number + 1}: {optimizer}, killed {killed} times, the same bits", flush=True)
    assert kills >= options.rounds, f"only {kills} kills in {options.rounds} rounds"
    print(f"{options.rounds} rounds, {kills} kills, the same bits every time")


if __name__ == "__main__":
    main()
