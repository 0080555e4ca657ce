"""How the adapter's backward pass is best divided (`inweave.ops.linear.triton.plan`): every division of both launches, timed.

PYTHONPATH=src:.:.gpu-bundle/site python3 bench/adapter_plans.py 1024x1280x1280x32x3 4096x3072x12288x16x1

ROWSxINTOxOUTxRANKxLAYERS   bf16, S saved, gradients added to float32, in a CUDA graph. The launches are independent: first the division of
rows in the first one is varied, then that of the second.
"""

from __future__ import annotations

import sys
from itertools import product

import torch

from inweave.bench.timing import captured_seconds
from inweave.ops.linear import composed
from inweave.ops.linear import triton as kernel

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
FIRST = [*product((16, 32, 64), (64, 128, 256))]
SECOND = [*product((32, 64, 128), (32, 64, 128), (1, 2, 4, 8))]


def sweep(name: str) -> None:
    rows, into, out, rank, count = map(int, name.split("x"))
    generator = torch.Generator(DEVICE).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE).to(DTYPE)

    x, grad = random(rows, into), random(rows, count * out)
    down, up = random(count * rank, into), random(count * out, rank)
    hidden = torch.mm(x, down.T)
    totals = torch.zeros(down.shape, device=DEVICE), torch.zeros(up.shape, device=DEVICE)

    def micros(work: object) -> float:
        return captured_seconds(work, DEVICE, copies=10, replays=20) * 1e6  # type: ignore[arg-type]

    def launches(plan: kernel.Plan) -> float:
        def work() -> object:
            return kernel.backward(
                grad, x, hidden, down, up, 1.0, grad_down=totals[0], grad_up=totals[1], chosen=plan
            )  # fmt: skip

        try:
            return micros(work)
        except Exception:  # tiles that do not fit the device
            return float("inf")

    def products() -> object:
        return composed.backward(grad, x, hidden, None, down, up, 1.0, grad_down=totals[0], grad_up=totals[1])

    now = kernel.plan(rows, out, into, rank, count)
    times = {now: launches(now)}
    for block_rows, block_depth in FIRST:
        plan = now._replace(block_rows=block_rows, block_depth=block_depth)
        times[plan] = launches(plan)
    best = min(times, key=times.__getitem__)
    for tile_rows, columns, splits in SECOND:
        plan = best._replace(rows=tile_rows, columns=columns, splits=splits)
        times[plan] = launches(plan)
    print(f"{name}: cuBLAS {micros(products):.1f} us, now {times[now]:.1f} {tuple(now)}", flush=True)
    for plan in sorted(times, key=times.__getitem__)[:4]:
        print(f"    {times[plan]:.1f} {tuple(plan)}", flush=True)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        sweep(each)
