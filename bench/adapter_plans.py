"""A sweep over the tile sizes of the adapter's backward pass (`inweave.ops.linear.triton.tile_sizes`).

PYTHONPATH=src:.:.gpu-bundle/site python3 bench/adapter_plans.py 1024x1280x1280x32 4608x3072x3072x16:alone

A shape is ROWSxINTOxOUTxRANK. bf16, in a CUDA graph; S saved and gradients added to float32, as in a step, or with
"alone" as in `lora_backward`: S recomputed, gradients in bf16. The launches are independent: first the tiles of the
first one are varied, then those of the second, then warps and stages. All candidates are compiled first, by a process
per core.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from functools import partial
from itertools import product

import torch

from inweave.bench.timing import captured_seconds
from inweave.ops.linear import cublas as cublas_products
from inweave.ops.linear import triton as kernel

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
FIRST = [*product((16, 32, 64), (64, 128, 256))]
SECOND = [*product((32, 64, 128), (32, 64, 128), (1, 2, 4, 8, 16))]
THIRD = [*product((4, 8), (2, 3, 4, 5))]
PARTS = 4  # in which a shape's candidates are compiled


class Case:
    """The tensors of one shape."""

    def __init__(self, name: str) -> None:
        shape, _, mode = name.partition(":")
        rows, into, out, rank = map(int, shape.split("x"))
        generator = torch.Generator(DEVICE).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE).to(DTYPE)

        self.x, self.grad = random(rows, into), random(rows, out)
        self.down, self.up = random(rank, into), random(out, rank)
        self.is_alone = mode == "alone"
        self.hidden = None if self.is_alone else torch.mm(self.x, self.down.T)
        dtype = DTYPE if self.is_alone else torch.float32
        self.totals = [torch.zeros(factor.shape, device=DEVICE, dtype=dtype) for factor in (self.down, self.up)]
        self.sizes = kernel.tile_sizes(rows, out, into, rank, keeps_hidden=not self.is_alone)

    def launch(self, sizes: kernel.TileSizes) -> object:
        return kernel.backward(
            self.grad, self.x, self.hidden, self.down, self.up, 1.0,
            grad_down=self.totals[0], grad_up=self.totals[1], fresh=self.is_alone, sizes=sizes,
        )  # fmt: skip

    def products(self) -> object:
        return cublas_products.backward(
            self.grad, self.x, self.hidden, None, self.down, self.up, 1.0,
            grad_down=self.totals[0], grad_up=self.totals[1], fresh=self.is_alone,
        )  # fmt: skip


def candidates(base: kernel.TileSizes) -> tuple[list[kernel.TileSizes], ...]:
    """List tile sizes that differ from ``base`` in the first launch, in the second, and in warps and stages."""
    first = [base._replace(block_rows=rows, block_depth=depth) for rows, depth in FIRST]
    second = [base._replace(rows=rows, columns=columns, splits=splits) for rows, columns, splits in SECOND]
    third = [base._replace(warps=warps, stages=stages) for warps, stages in THIRD]
    return first, second, third


def micros(work: partial[object]) -> float:
    """Return microseconds in a graph; infinity for tiles that do not fit the device."""
    try:
        return captured_seconds(work, DEVICE, copies=10, replays=20) * 1e6
    except Exception:
        return float("inf")


def compile_part(name: str, part: int) -> None:
    case = Case(name)
    for sizes in [sizes for choices in candidates(case.sizes) for sizes in choices][part::PARTS]:
        try:
            case.launch(sizes)
        except Exception:  # does not fit: `micros` says so
            continue
    torch.cuda.synchronize(DEVICE)


def sweep(name: str) -> None:
    case = Case(name)
    times = {case.sizes: micros(partial(case.launch, case.sizes))}

    def measure(choices: list[kernel.TileSizes]) -> kernel.TileSizes:
        times.update({sizes: micros(partial(case.launch, sizes)) for sizes in choices})
        return min(times, key=times.__getitem__)

    best = case.sizes
    for number in range(3):
        best = measure(candidates(best)[number])
    cublas = micros(partial(Case.products, case))
    print(f"{name}: cuBLAS {cublas:.1f} us, now {times[case.sizes]:.1f} {tuple(case.sizes)}", flush=True)
    for sizes in sorted(times, key=times.__getitem__)[:6]:
        print(f"    {times[sizes]:.1f} {tuple(sizes)}", flush=True)


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 1) - 2)) as pool:
        pool.starmap(compile_part, product(sys.argv[1:], range(PARTS)), chunksize=1)
    for each in sys.argv[1:]:
        sweep(each)
