"""Block shapes of the grouped merge kernel on SDXL's attention weights, rank 32 and 5 x rank 32. Prints milliseconds.

PYTHONPATH=src python3 bench/tune_merge.py
"""

from __future__ import annotations

import itertools

import torch

from inweave.ops.merge.reference import Product, WeightUpdate
from inweave.ops.merge.triton import PreparedMerge
from inweave.targets.bases import known_index


def targets(stack: int, rank: int = 32) -> list[WeightUpdate]:
    merges = []
    for name, shape in known_index("sdxl").components["unet"].shapes.items():
        if ".attn" in name and name.endswith(".weight") and len(shape) == 2:
            base = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            products = tuple(
                Product(torch.randn(shape[0], rank, device="cuda", dtype=torch.bfloat16),
                        torch.randn(rank, shape[1], device="cuda", dtype=torch.bfloat16), 0.01)
                for _ in range(stack)
            )  # fmt: skip
            merges.append(WeightUpdate(base, torch.empty_like(base), products))
    return merges


def milliseconds(launch: PreparedMerge) -> float:
    for _ in range(3):
        launch.run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        launch.run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 10


def main() -> None:
    for stack in (1, 5):
        work = targets(stack)
        size = sum(t.base.numel() for t in work)
        print(f"{len(work)} weights, {size / 1e6:.0f} M elements, {stack} x rank 32")
        blocks = ((64, 128), (128, 64), (128, 128), (32, 256))
        for (rows, columns), warps, stages in itertools.product(blocks, (2, 4), (1, 2, 3)):
            if rows * columns > 8192 and warps == 2:
                continue  # spills
            elapsed = milliseconds(PreparedMerge(work, block=(rows, columns), warps=warps, stages=stages))
            rate = size * 4 / elapsed / 1e9
            print(f"  {rows:4d} x {columns:4d}, {warps} warps, {stages} stages: {elapsed:7.3f} ms, {rate:5.2f} TB/s")


if __name__ == "__main__":
    main()
