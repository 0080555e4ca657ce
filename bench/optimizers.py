"""Optimizer steps on adapters of SDXL's size: milliseconds and megabytes of state, beside the usual libraries.

    PYTHONPATH=src python3 bench/optimizers.py            the table
    PYTHONPATH=src python3 bench/optimizers.py --tune     shapes of the 8-bit kernel's launch

The lower bound of a step is its traffic: float32 AdamW reads x, g, m, v and writes x, m, v (28 bytes a parameter),
8-bit AdamW 16 bytes. "graph" is the same step replayed from a CUDA graph.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.ops.adam8bit import corrections, fresh
from weft.ops.adam8bit import triton as kernel
from weft.train.flat import FlatParameters
from weft.train.optimizers import make_optimizer

SIZES = (46_500_000, 59_800_000)
WIDTHS = (640, 1280, 2048)
RANK = 32


def parameters(total: int) -> dict[str, nn.Parameter]:
    """Pairs of rank 32 on the widths of SDXL's attention, about ``total`` numbers in all."""
    made: dict[str, nn.Parameter] = {}
    for width in itertools.cycle(WIDTHS):
        if sum(p.numel() for p in made.values()) + 2 * RANK * width > total:
            return made
        for name, shape in (("down", (RANK, width)), ("up", (width, RANK))):
            value = nn.Parameter(torch.randn(shape, device="cuda"))
            value.grad = torch.randn(shape, device="cuda") * 1e-3
            made[f"{len(made) // 2}.{name}"] = value
    raise AssertionError


def milliseconds(work: Callable[[], object], turns: int = 10) -> float:
    """Median of five rounds on the GPU's own clock."""
    for _ in range(3):
        work()
    found = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(turns):
            work()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / turns)
    return statistics.median(found)


def captured(work: Callable[[], object]) -> Callable[[], object]:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def megabytes(tensors: list[torch.Tensor]) -> float:
    """Of distinct memory: a table that all entries share counts once."""
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values()) / 1e6


def ours(name: str, total: int) -> list[tuple[str, float, float]]:
    named = parameters(total)
    flat = FlatParameters(named, {each: 16.0 for each in named if each.endswith("up")})
    flat.grads.normal_(std=1e-3)
    optimizer = make_optimizer(name, flat, weight_decay=0.01)
    lr, one, ok = (torch.tensor(value, device="cuda") for value in (1e-4, 1.0, True))

    def work() -> None:
        optimizer.step(lr, one, ok)

    state = megabytes(list(optimizer.state().values()))
    return [
        (f"weft {name}", milliseconds(work), state),
        (f"weft {name}, graph", milliseconds(captured(work)), state),
    ]


def peer(total: int, make: Callable[[list[nn.Parameter]], Any]) -> tuple[float, float]:
    optimizer = make(list(parameters(total).values()))
    spent = milliseconds(optimizer.step)
    return spent, megabytes(
        [part for state in optimizer.state.values() for value in state.values() for part in inner(value)]
    )


def inner(value: object) -> list[torch.Tensor]:
    """The tensors a state entry is made of; a subclass holds its codes and scales as attributes."""
    if not isinstance(value, torch.Tensor):
        return []
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is None:
        return [value] if value.is_cuda else []
    return [part for name in flatten()[0] for part in inner(getattr(value, name))]


def found(*names: str) -> Any:
    """The first class of ``names`` that can be imported."""
    for name in names:
        module, _, kind = name.rpartition(".")
        try:
            return getattr(importlib.import_module(module), kind)
        except (ImportError, AttributeError):
            continue
    return None


def table(total: int) -> None:
    rows: list[tuple[str, float | str, float | str]] = [*ours("adamw", total), *ours("adamw8bit", total)]
    peers: dict[str, Any] = {
        "torch AdamW fused": torch.optim.AdamW,
        "torchao AdamW8bit": found("torchao.optim.AdamW8bit", "torchao.prototype.low_bit_optim.AdamW8bit"),
        "bitsandbytes AdamW8bit": found("bitsandbytes.optim.AdamW8bit"),
    }
    for name, kind in peers.items():
        extra = {"fused": True} if name.endswith("fused") else {}
        try:
            rows.append((name, *peer(total, lambda list_, k=kind, e=extra: k(list_, lr=1e-4, weight_decay=0.01, **e)))
                        if kind is not None else (name, "not installed", ""))  # fmt: skip
        except Exception as error:  # a peer that is broken here must not hide the other rows
            rows.append((name, f"failed: {type(error).__name__}", ""))
        torch.cuda.empty_cache()
    print(f"\n{total / 1e6:.1f} M parameters{'ms':>24}{'state MB':>12}")
    for name, spent, state in rows:
        shown = [f"{each:.3f}" if isinstance(each, float) else each for each in (spent, state)]
        print(f"{name:<28}{shown[0]:>14}{shown[1].removesuffix('.000'):>12}")


def tune(total: int) -> None:
    values, grads = torch.randn(total, device="cuda"), torch.randn(total, device="cuda") * 1e-3
    moments = fresh(total, values.device)
    lr, one, ok = (torch.tensor(value, device="cuda") for value in (1e-4, 1.0, True))
    inverse = corrections(torch.tensor(10, device="cuda"), 0.9, 0.999)
    for rows, warps, coarse in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8), (0, 2, 3, 4)):
        if not 64 <= rows * 256 // warps <= 1024:
            continue  # fewer than 2 or more than 32 values a thread

        def work(rows: int = rows, warps: int = warps, coarse: int = coarse) -> None:
            kernel.step(
                values, grads, *moments, lr=lr, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01,
                inverse=inverse, ok=ok, grad_scale=one, rows=rows, warps=warps, coarse=coarse,
            )  # fmt: skip

        spent = milliseconds(work)
        print(f"  {rows:2d} rows, {warps} warps, coarse {coarse}: {spent:.3f} ms, {total * 16 / spent / 1e9:.2f} TB/s")


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if "--tune" in sys.argv:
        tune(SIZES[0])
        return
    for total in SIZES:
        table(total)


if __name__ == "__main__":
    main()
