"""Process settings that libraries read once: when torch is imported, or when CUDA starts."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

#: turns that a thread of libgomp (torch's on Linux) waits for its team before it sleeps; its own default is 300,000
SPINS = "1000"
#: milliseconds of LLVM's and Intel's library (torch's on macOS) until a waiting thread sleeps; its own default is 200
BLOCK_TIME = "1"


def use_expandable_segments() -> None:
    """Turn on expandable segments of torch's CUDA allocator, unless configured; call it before importing torch.

    Without them, images of many sizes fragment memory, and up to 1 MiB at the end of every segment is wasted: 100 MiB
    for SDXL's weights.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def use_bounded_waits(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP's threads sleep soon where another process has the cores, unless configured; call it before torch.

    A thread that spins keeps its core from the one that it waits for. `bench/thread_waits.py` measures it.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)
        environment.setdefault("KMP_BLOCKTIME", BLOCK_TIME)
