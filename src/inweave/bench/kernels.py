"""Single kernels, each compared with plain torch on the same tensors (`inweave.bench.kernel_cases` lists them).

On a GPU a figure is the median over replays of a CUDA graph with many copies; the time of an eager call, mostly host
time at small sizes, is reported too. On the CPU there is only the call. Errors are the largest difference from float64,
relative to the largest float64 value. ``tiny``: the same rows at sizes for a test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from inweave.bench.kernel_cases import GROUPS, KernelCase, Tensors
from inweave.bench.report import BenchRow
from inweave.bench.timing import Rates, captured_seconds, per_call_seconds
from inweave.errors import ConfigError


def measure_kernels(
    groups: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    rates: Rates,
    *,
    tiny: bool = False,
    replays: int = 200,
    progress: Callable[[str], None] | None = None,
) -> list[BenchRow]:
    """Return a row per kernel and size of these groups, in microseconds."""
    ensure_groups(groups)
    rows = []
    for group in groups:
        for case in GROUPS[group](device, dtype, tiny=tiny):
            if progress is not None:
                progress(case.name)
            rows.append(_measure(case, device, rates, replays))
    return rows


def ensure_groups(groups: Sequence[str]) -> None:
    if unknown := [group for group in groups if group not in GROUPS]:
        raise ConfigError(f"no kernels are called {unknown[0]!r}; choose from {', '.join(GROUPS)}")


def _measure(case: KernelCase, device: torch.device, rates: Rates, replays: int) -> BenchRow:
    captured = device.type == "cuda" and case.recordable

    def micros(work: Callable[[], object]) -> float:
        seconds = captured_seconds(work, device, replays=replays) if captured else per_call_seconds(work, device)
        return seconds * 1e6

    details: dict[str, float | str] = {}
    if captured:
        details["eager"] = per_call_seconds(case.ours, device) * 1e6
        details |= {f"{name}, eager": per_call_seconds(work, device) * 1e6 for name, work in case.peers.items()}
    for name, work in case.others.items():
        try:
            details[name] = micros(work)
        except RuntimeError as error:  # a library may refuse a shape
            details[name] = " ".join(str(error).split())[:60]
    exact = case.exact()
    for name, outputs in case.outputs.items():
        details["error" if name == "inweave" else f"{name}, error"] = largest_error(outputs(), exact)
    limit = rates.seconds(case.operations, case.traffic) * 1e6
    return BenchRow(
        case.name, "µs", micros(case.ours), {name: micros(work) for name, work in case.peers.items()}, limit, details
    )


def largest_error(values: Tensors, exact: Tensors) -> float:
    """Return the largest difference, relative to the largest exact value of the same tensor."""
    return max(float((v.double() - e).abs().max() / e.abs().max()) for v, e in zip(values, exact, strict=True))
