"""Python's cyclic garbage collector is paused while thousands of long-lived objects are created.

A full pass over the objects of torch, diffusers and a large model takes about 0.3 s, many times what a swap
costs, and finds nothing: plans, views and parameters are freed by reference counts. So it is paused while
a model is built or a stack is woven, in any thread, and resumes afterwards.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()  # an interrupt may leave it, and its thread must not wait for itself
_holders = 0
_was_enabled = False


@contextmanager
def collector_waits() -> Iterator[None]:
    """Pause garbage collection until the last holder leaves; a collector that was off stays off."""
    global _holders, _was_enabled
    with _lock:
        if _holders == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if _holders == 0 and _was_enabled:
                gc.enable()
