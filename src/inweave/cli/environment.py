"""Settings of this process that torch reads when CUDA starts."""

from __future__ import annotations

import os


def grow_segments() -> None:
    """Let segments of GPU memory grow, unless the user has set something else.

    Otherwise images of many sizes fragment memory, and what is left of a segment counts as used up to 1 MiB: 100 MiB of SDXL's weights.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
