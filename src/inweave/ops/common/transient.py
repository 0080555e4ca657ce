"""Work whose results are used at once: gradient checkpointing stores none of them, whatever their operations are.

A weight that is computed for a product (`inweave.layers.qat`) is made of products itself, each as large as the weight.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_depth = threading.local()


@contextmanager
def transient() -> Iterator[None]:
    """Mark the operations inside the block, or function, as such work."""
    _depth.value = getattr(_depth, "value", 0) + 1
    try:
        yield
    finally:
        _depth.value -= 1


def is_transient() -> bool:
    """Return whether this thread does such work now."""
    return getattr(_depth, "value", 0) > 0
