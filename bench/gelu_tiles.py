"""A sweep over the tile sizes of the GELU with tanh (`inweave.ops.activation.triton`), compared with Inductor's
kernels, and over the warps of GELU into fp8 rows (`inweave.ops.fp8.triton`), compared with GELU and quantization.

PYTHONPATH=src:.:.gpu-bundle/site python3 bench/gelu_tiles.py 4608x12288x3072 4096x12288 512x12288 4096x9728

A shape is ROWSxWIDTH[xLEFT]. bf16, in a CUDA graph, microseconds forward and backward; "bytes": every number read and
written once at the speed of a copy. Inductor's backward pass of a result with columns on its left is followed by the
copy of their gradient, as attention needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product

import torch
from torch.nn import functional

from inweave.bench.timing import captured_seconds, measure_rates
from inweave.ops.activation import triton as kernel
from inweave.ops.fp8 import triton as row_kernel

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
BLOCKS, WARPS = (512, 1024, 2048, 4096, 8192), (2, 4, 8)
LARGEST_PART = 64  # numbers of a thread: more do not fit its registers


def plain(x: torch.Tensor, left: torch.Tensor | None) -> torch.Tensor:
    y = functional.gelu(x, approximate="tanh")
    return y if left is None else torch.cat((left, y), -1)


def plain_backward(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    columns = dy.shape[1] - x.shape[1]
    return torch.ops.aten.gelu_backward(dy[:, columns:], x, approximate="tanh"), dy[:, :columns].clone()


def micros(work: Callable[[], object]) -> float:
    return captured_seconds(work, DEVICE, copies=10, replays=20) * 1e6


def sweep(name: str) -> None:
    rows, width, columns = (*map(int, name.split("x")), 0)[:3]
    x, dy = (torch.randn(rows, size, device=DEVICE, dtype=DTYPE) for size in (width, columns + width))
    left = torch.randn(rows, columns, device=DEVICE, dtype=DTYPE) if columns else None
    forward, backward = (torch.compile(each, dynamic=False) for each in (plain, plain_backward))
    rates = measure_rates(DEVICE, DTYPE)
    limits = [rates.seconds(0, 2 * rows * (numbers * width + 2 * columns)) * 1e6 for numbers in (2, 3)]
    inductor = micros(lambda: forward(x, left)), micros(lambda: backward(dy, x))
    print(f"{name}: bytes {limits[0]:.1f} and {limits[1]:.1f} us, Inductor {inductor[0]:.1f} and {inductor[1]:.1f}")
    times = {}
    for block, warps in product(BLOCKS, WARPS):
        if block <= LARGEST_PART * 32 * warps:
            kernel._GELU_BLOCK, kernel._GELU_WARPS = block, warps
            times[block, warps] = (
                micros(lambda: kernel.tanh_gelu(x, left)),
                micros(lambda: kernel.tanh_gelu_backward(dy, x, True, left is not None)),
            )
    for (block, warps), (one, two) in sorted(times.items(), key=lambda item: sum(item[1])):
        print(f"    {one:.1f} and {two:.1f}: {block} numbers, {warps} warps", flush=True)


def sweep_rows(name: str) -> None:
    rows, width, columns = (*map(int, name.split("x")), 0)[:3]
    z, d = (torch.randn(rows, size, device=DEVICE, dtype=DTYPE) for size in (width, columns + width))
    left = torch.randn(rows, columns, device=DEVICE, dtype=DTYPE) if columns else None
    rates = measure_rates(DEVICE, DTYPE)
    limits = [
        rates.seconds(0, rows * size) * 1e6 for size in (3 * (width + columns), 5 * width + 4 * columns)
    ]  # 16 bits in, 8 out; of the gradient two matrices in, and what is on the left copied
    forward = micros(lambda: row_kernel.quantize_rows(kernel.tanh_gelu(z, left)))
    backward = micros(lambda: row_kernel.quantize_rows(gradient(d, z, columns)))
    print(
        f"{name}, rows: bytes {limits[0]:.1f} and {limits[1]:.1f} us, "
        f"one after the other {forward:.1f} and {backward:.1f}"
    )
    for warps in (*WARPS, 16, 32):
        row_kernel._GELU_WARPS = row_kernel._GRADIENT_WARPS = warps
        one = micros(lambda: row_kernel.gelu_rows(z, left))
        two = micros(lambda: row_kernel.gelu_gradient_rows(d, z, columns > 0))
        print(f"    {one:.1f} and {two:.1f}: {warps} warps", flush=True)


def gradient(d: torch.Tensor, z: torch.Tensor, columns: int) -> torch.Tensor:
    dz, _ = kernel.tanh_gelu_backward(d, z, True, columns > 0)
    assert dz is not None
    return dz


if __name__ == "__main__":
    for each in sys.argv[1:]:
        sweep(each)
        sweep_rows(each)
