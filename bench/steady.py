"""Measure an image of the embedded model with and without `inweave.models.sd.steady`: `python bench/steady.py`.

Both in turn, in one process: processor seconds of the calling thread, so run it with OMP_NUM_THREADS=1 (with more
threads `--wall` measures elapsed seconds, on an idle machine). The least and the median of ``--runs``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import inweave
from inweave.models.sd import steady


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--wall", action="store_true")
    options = parser.parse_args()
    clock = time.perf_counter if options.wall else time.thread_time
    pipe, is_faster = inweave.pipeline("inweave/emoji", device="cpu"), steady.is_faster
    ways: dict[str, Callable[..., bool]] = {"without": lambda network: False, "with": is_faster}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.runs + 1):
        for name, way in ways.items():
            steady.is_faster = way
            started = clock()
            pipe("a red apple", seed=7, steps=options.steps)
            if number:  # the first one warms up
                seconds[name].append(clock() - started)
    for name, each in seconds.items():
        print(f"{name:8} least {min(each):.3f} s, median {statistics.median(each):.3f} s")
    ratios = sorted(one / other for one, other in zip(seconds["with"], seconds["without"], strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    print(f"with / without, pair by pair: median {statistics.median(ratios):.3f}, quartiles {low:.3f} and {high:.3f}")


if __name__ == "__main__":
    main()
