"""How the adapter's backward pass is best divided (`inweave.ops.linear.triton.plan`): every division of both launches, timed.

PYTHONPATH=src:.:.gpu-bundle/site python3 bench/adapter_plans.py 1024x1280x1280x32x3 4096x3072x12288x16x1

ROWSxINTOxOUTxRANKxLAYERS   bf16, S saved, gradients added to float32, in a CUDA graph. The launches are independent: first the division of
rows in the first one is varied, then that of the second. Kernels are compiled before, by a process per core.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from itertools import product

import torch

from inweave.bench.timing import captured_seconds
from inweave.ops.linear import composed
from inweave.ops.linear import triton as kernel

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
FIRST = [*product((16, 32, 64), (64, 128, 256))]
SECOND = [*product((32, 64, 128), (32, 64, 128), (1, 2, 4, 8, 16))]


class Case:
    """The tensors of one shape."""

    def __init__(self, name: str) -> None:
        rows, into, out, rank, count = map(int, name.split("x"))
        generator = torch.Generator(DEVICE).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE).to(DTYPE)

        self.x, self.grad = random(rows, into), random(rows, count * out)
        self.down, self.up = random(count * rank, into), random(count * out, rank)
        self.hidden = torch.mm(self.x, self.down.T)
        self.totals = torch.zeros(self.down.shape, device=DEVICE), torch.zeros(self.up.shape, device=DEVICE)
        self.plan = kernel.plan(rows, out, into, rank, count)

    def launch(self, plan: kernel.Plan) -> object:
        return kernel.backward(
            self.grad, self.x, self.hidden, self.down, self.up, 1.0,
            grad_down=self.totals[0], grad_up=self.totals[1], chosen=plan,
        )  # fmt: skip

    def products(self) -> object:
        return composed.backward(
            self.grad, self.x, self.hidden, None, self.down, self.up, 1.0,
            grad_down=self.totals[0], grad_up=self.totals[1],
        )  # fmt: skip

    def candidates(self, base: kernel.Plan) -> tuple[list[kernel.Plan], list[kernel.Plan]]:
        """Divisions of the first launch, and of the second, where the other is that of ``base``."""
        first = [base._replace(block_rows=rows, block_depth=depth) for rows, depth in FIRST]
        second = [base._replace(rows=rows, columns=columns, splits=splits) for rows, columns, splits in SECOND]
        return first, second


def prepare(work: tuple[str, int, int]) -> None:
    """Compile a part of the kernels of one shape into the cache on disk."""
    name, part, parts = work
    case = Case(name)
    for plan in [plan for plans in case.candidates(case.plan) for plan in plans][part::parts]:
        attempt(lambda plan=plan: case.launch(plan))  # type: ignore[misc]
    torch.cuda.synchronize(DEVICE)


def attempt(work: Callable[[], object]) -> object:
    try:
        return work()
    except Exception:  # tiles that do not fit the device
        return None


def micros(work: Callable[[], object]) -> float:
    seconds = attempt(lambda: captured_seconds(work, DEVICE, copies=10, replays=20))
    return seconds * 1e6 if isinstance(seconds, float) else float("inf")


def sweep(name: str) -> None:
    case = Case(name)
    times = {case.plan: micros(lambda: case.launch(case.plan))}

    def measure(plans: list[kernel.Plan]) -> kernel.Plan:
        for plan in plans:
            times[plan] = micros(lambda plan=plan: case.launch(plan))  # type: ignore[misc]
        return min(times, key=times.__getitem__)

    best = measure(case.candidates(case.plan)[0])
    measure(case.candidates(best)[1])
    print(f"{name}: cuBLAS {micros(case.products):.1f} us, now {times[case.plan]:.1f} {tuple(case.plan)}", flush=True)
    for plan in sorted(times, key=times.__getitem__)[:4]:
        print(f"    {times[plan]:.1f} {tuple(plan)}", flush=True)


def in_parallel(compile_part: Callable[[tuple[str, int, int]], None], names: Sequence[str], parts: int = 4) -> None:
    """Each shape in so many parts, by a process per core."""
    workers = max(1, (os.cpu_count() or 1) - 2)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(compile_part, [(name, part, parts) for name in names for part in range(parts)], chunksize=1)


if __name__ == "__main__":
    in_parallel(prepare, sys.argv[1:])
    for each in sys.argv[1:]:
        sweep(each)
