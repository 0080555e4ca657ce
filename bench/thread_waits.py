"""Training on the CPU, on an idle machine and beside busy processes: how should OpenMP's threads wait for each other?

    python bench/thread_waits.py [--rounds 5] [--steps 10] [--busy 2] [--way NAME:VARIABLE=VALUE ...]

A thread that waits for the others of its team spins. If another process has the core of one of them, all others spin
for a whole time slice of the scheduler, in every one of the hundreds of parallel regions of a step. After a bounded
number of turns they sleep instead. Every way runs in turn with all others, in a process of its own; the table has
medians, since other programs may run on the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

RUN = """
import sys, time
from inweave.training.config.schema import TrainConfig
from inweave.training.session import train
folder, steps = sys.argv[1:]
stamps = []
def on_record(record):
    if "loss" in record:
        stamps.append(time.perf_counter())
config = TrainConfig.of(model="inweave/emoji", dataset="inweave/pixel", output=folder + "/run", steps=int(steps) + 1,
                        seed=1, warmup=0, cache_dir=folder + "/cache", log_every=1)
train(config, on_record=on_record)
print((stamps[-1] - stamps[0]) / (len(stamps) - 1))
"""
VARIABLES = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
WAYS = (
    "the library's:",
    "inweave's: --inweave",
    "passive: OMP_WAIT_POLICY=PASSIVE",
    "one thread: OMP_NUM_THREADS=1",
)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep ``count`` cores busy."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.2 if count else 0)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def seconds_per_step(way: str, steps: int) -> float:
    """Train for a few steps in a process of its own; ``way``: NAME: and the variables that it sets."""
    from inweave.cli.environment import use_bounded_waits

    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    variables = way.partition(":")[2].split()
    if variables == ["--inweave"]:
        use_bounded_waits(environment)
    else:
        environment |= dict(each.split("=") for each in variables)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", RUN, folder, str(steps)], env=environment, capture_output=True, text=True, check=True
        )
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--busy", type=int, default=os.cpu_count())
    parser.add_argument("--way", action="append", default=[], help="NAME:VARIABLE=VALUE, in addition")
    options = parser.parse_args()
    ways = [*WAYS, *options.way]
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds):
        for busy in (0, options.busy):
            for way in ways:
                with busy_processes(busy):
                    times.setdefault((way, busy), []).append(seconds_per_step(way, options.steps))
                print(f"{way.partition(':')[0]}, {busy} busy: {times[way, busy][-1]:.2f}", file=sys.stderr)
    load = os.getloadavg()[0]
    print(f"seconds per step, median of {options.rounds} (load of the machine at the end: {load:.1f})")
    print(f"{'':<24}{'idle':>8}{f'{options.busy} busy':>10}")
    for way in ways:
        idle, loaded = (statistics.median(times[way, busy]) for busy in (0, options.busy))
        print(f"{way.partition(':')[0]:<24}{idle:>8.2f}{loaded:>10.2f}")


if __name__ == "__main__":
    main()
