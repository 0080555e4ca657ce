"""How the adapter's backward pass is best divided (`inweave.ops.linear.triton.plan`): every division of both launches, timed.

PYTHONPATH=src:.:.gpu-bundle/site python3 bench/adapter_plans.py 1024x1280x1280x32x3 4096x3072x12288x16x1

Shapes as in `bench/layer_cases.py`; bf16, S saved, gradients added to float32, in a CUDA graph. The launches are independent: first the
division of rows in the first one is varied, then that of the second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from bench.layer_cases import DEVICE, LayerCase, compile_in_parallel, micros

from inweave.ops.linear import composed
from inweave.ops.linear import triton as kernel

FIRST = [*product((16, 32, 64), (64, 128, 256))]
SECOND = [*product((32, 64, 128), (32, 64, 128), (1, 2, 4, 8, 16))]


class BackwardCase(LayerCase):
    """With a gradient of the output, and the adapter's gradients to add to."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.grad = self.random(self.rows, self.count * self.out)
        self.hidden = torch.mm(self.x, self.down.T)
        self.totals = torch.zeros(self.down.shape, device=DEVICE), torch.zeros(self.up.shape, device=DEVICE)
        self.plan = kernel.plan(self.rows, self.out, self.into, self.rank, self.count)

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


def launches(name: str) -> list[Callable[[], object]]:
    case = BackwardCase(name)
    return [partial(case.launch, plan) for plans in case.candidates(case.plan) for plan in plans]


def sweep(name: str) -> None:
    case = BackwardCase(name)
    times = {case.plan: micros(partial(case.launch, case.plan))}

    def measure(plans: list[kernel.Plan]) -> kernel.Plan:
        times.update({plan: micros(partial(case.launch, plan)) for plan in plans})
        return min(times, key=times.__getitem__)

    best = measure(case.candidates(case.plan)[0])
    measure(case.candidates(best)[1])
    print(f"{name}: cuBLAS {micros(case.products):.1f} us, now {times[case.plan]:.1f} {tuple(case.plan)}", flush=True)
    for plan in sorted(times, key=times.__getitem__)[:4]:
        print(f"    {times[plan]:.1f} {tuple(plan)}", flush=True)


if __name__ == "__main__":
    compile_in_parallel(launches, sys.argv[1:])
    for each in sys.argv[1:]:
        sweep(each)
