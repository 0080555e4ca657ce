"""Timing of work, on a GPU until the GPU is done.

wall        one sample per call, from the host's clock, with a synchronization before and after
captured    many copies of the work in one CUDA graph: the time of its kernels, without launches from Python
rates       the device's speed in a large product and in a copy, from which limits are computed
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Rates:
    """Operations (additions and multiplications) and bytes (read or written) per second."""

    operations: float
    bytes: float

    def seconds(self, operations: float, traffic: float) -> float:
        """Return the least time for both, if they overlap perfectly."""
        return max(operations / self.operations, traffic / self.bytes)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_seconds(
    work: Work, device: torch.device, *, runs: int, warmup: int = 1, before: Work | None = None
) -> list[float]:
    """Return the seconds of each call; ``before`` runs before each, untimed."""
    samples = []
    for number in range(warmup + runs):
        if before is not None:
            before()
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        if number >= warmup:
            samples.append(time.perf_counter() - started)
    return samples


def per_call_seconds(work: Work, device: torch.device, *, calls: int = 20, runs: int = 9) -> float:
    """Return the median seconds of a call among ``calls`` in a row: launches overlap with kernels, as in a program."""

    def many() -> None:
        for _ in range(calls):
            work()

    return statistics.median(wall_seconds(many, device, runs=runs, warmup=2)) / calls


def captured_seconds(work: Work, device: torch.device, *, copies: int = 20, replays: int = 200) -> float:
    """Return the median seconds of one of ``copies`` of the work in a CUDA graph."""
    graph = capture(work, device, copies=copies)
    samples: list[float] = []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for number in range(replays + 20):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number >= 20:
            samples.append(start.elapsed_time(end) / 1e3)
    return statistics.median(samples) / copies


def capture(work: Work, device: torch.device, *, copies: int = 1) -> torch.cuda.CUDAGraph:
    """Record the work as a CUDA graph, after three warm-up rounds that select and compile kernels."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            work()
    return graph


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the 10 % and the 90 % quantile (nearest rank) of the samples."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return statistics.median(ordered), ordered[round(last * 0.1)], ordered[round(last * 0.9)]


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure the best of a few large products and copies."""
    side, size = (8192, 1 << 31) if device.type == "cuda" else (768, 1 << 26)
    factor = torch.randn(side, side, device=device).to(dtype)
    product = min(wall_seconds(lambda: factor @ factor, device, runs=9, warmup=3))
    origin = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(origin)
    copy = min(wall_seconds(lambda: target.copy_(origin), device, runs=9, warmup=2))
    return Rates(2 * side**3 / product, 2 * size / copy)
