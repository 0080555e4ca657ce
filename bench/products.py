"""How much of the GPU the GEMMs of frozen layers use, and whether their rows are better divided: cuBLAS whole and in two parts.

PYTHONPATH=src:.:.gpu-bundle/site python3 bench/products.py                      # layers of the models that are trained
PYTHONPATH=src:.:.gpu-bundle/site python3 bench/products.py 4608x15360x3072      # ROWSxINTOxOUT

bf16, added to the output (beta = 1), in a CUDA graph, with a weight of its own for each of several layers, so that weights come from
memory as they do in a step. A GEMM has about ceil(rows / 128) * ceil(columns / 256) tiles; where the last of them leave most
multiprocessors idle, the rows that make it so may be faster as a GEMM of their own, with split-K. "Alone" is the GEMM with beta = 0,
"longer" the same where the rank's columns lie beside those of the input: one sum for layer and adapter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from inweave.bench.timing import captured_seconds

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
#: rows, width of the input, width of the output
SHAPES = {
    "Flux, single block": ("4608x3072x9216", "4608x3072x12288", "4608x15360x3072"),
    "Flux, double block": ("4096x3072x9216", "4096x3072x3072", "4096x3072x12288", "4096x12288x3072"),
    "SD 3.5 Large": ("4096x2432x7296", "4096x2432x2432", "4096x2432x9728", "4096x9728x2432"),
    "SDXL, batch 4": (
        "16384x640x1920", "16384x640x640", "16384x640x5120", "16384x2560x640",
        "4096x1280x3840", "4096x1280x1280", "4096x1280x10240", "4096x5120x1280",
    ),
    "SDXL, batch 1": ("1024x1280x3840", "1024x1280x1280", "1024x1280x10240", "1024x5120x1280", "4096x640x5120", "4096x2560x640"),
}  # fmt: skip
#: rows of the second part
LAST = (128, 256, 384, 512, 768, 1024, 2048)
LAYERS = 8
RANK = 64  # what a sum takes at a time
#: rows and columns that a multiprocessor computes at a time
TILE = (128, 256)
SHORTEST_SUM = 1024
PROCESSORS = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 132


def measure(name: str) -> None:
    rows, into, out = map(int, name.split("x"))
    for what, width, columns in (("y ", into, out), ("dX", out, into)):
        total = random(rows, columns)
        left, rights = random(rows, width), [factor(what, width, columns) for _ in range(LAYERS)]

        def added(last: int, left: torch.Tensor = left, total: torch.Tensor = total) -> None:
            divisions = (rows - last, last) if last else (rows,)
            for right in rights:  # noqa: B023
                for part, target in zip(left.split(divisions), total.split(divisions), strict=True):
                    target.addmm_(part, right)

        def multiply(left: torch.Tensor = left, total: torch.Tensor = total) -> None:
            for right in rights:  # noqa: B023
                torch.mm(left, right, out=total)

        times = {last: seconds(lambda last=last: added(last)) for last in (0, *LAST) if last < rows}  # type: ignore[misc]
        plain = seconds(multiply)
        left, rights = random(rows, width + RANK), [factor(what, width + RANK, columns) for _ in range(LAYERS)]
        longer = seconds(lambda left=left: multiply(left))  # type: ignore[misc]
        best = min(times, key=times.__getitem__)
        print(
            f"    {name:18s} {what} {times[0] * 1e6:7.1f} us, {2e-12 * rows * into * out / times[0]:4.0f} TFLOP/s, alone {plain * 1e6:.1f}, "
            f"longer {longer * 1e6:.1f}; by rule {last_rows(rows, columns, width, PROCESSORS)}, "
            + (f"{100 * (1 - times[best] / times[0]):4.1f} % less in two parts: " if best else "no parts are faster: ")
            + ", ".join(f"{last}: {time * 1e6:.1f}" for last, time in times.items() if last),
            flush=True,
        )


def last_rows(rows: int, columns: int, depth: int, processors: int) -> int:
    """Rows that are better a product of their own, by the tiles that they leave for a last, mostly idle round; 0: none."""
    across = -(-columns // TILE[1])
    tiles = -(-rows // TILE[0]) * across
    rounds, rest = divmod(tiles, processors)
    first = rounds * processors // across * TILE[0]
    worthwhile = rounds > 0 and 0 < rest <= processors // 2 and depth >= SHORTEST_SUM
    return rows - first if worthwhile and 0 < first < rows else 0


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def factor(what: str, width: int, columns: int) -> torch.Tensor:
    """(width, columns), in the memory of the layer's weight."""
    return random(columns, width).T if what == "y " else random(width, columns)


def seconds(work: Callable[[], None]) -> float:
    return captured_seconds(work, DEVICE, copies=2, replays=20) / LAYERS


if __name__ == "__main__":
    for model, names in {"": tuple(sys.argv[1:])}.items() if sys.argv[1:] else SHAPES.items():
        print(model, flush=True)
        for each in names:
            measure(each)
