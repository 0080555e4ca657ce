"""Process settings that torch reads once: when it is imported, or when CUDA starts."""

from __future__ import annotations

import os


def use_expandable_segments() -> None:
    """Turn on expandable segments of torch's CUDA allocator, unless configured; call it before importing torch.

    Without them, images of many sizes fragment memory, and up to 1 MiB at the end of every segment is wasted: 100 MiB
    for SDXL's weights.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
