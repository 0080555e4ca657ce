"""Out of memory: recognizing it, and reporting it together with the setting to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from inweave.errors import MemoryBudgetError


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one it was raised from, means out of memory: a class on a GPU, a text on a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return True
    return error.__context__ is not None and out_of_memory(error.__context__)


@contextmanager
def oom_hint(what: str, advice: str) -> Iterator[None]:
    """Turn running out of memory inside the block into a `MemoryBudgetError` that names the work and a remedy."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        reason = " ".join(str(error).split())
    else:
        return
    # outside of the handler: the error holds its frames, and they hold tensors
    raise MemoryBudgetError(f"not enough memory to {what}; {advice} ({reason})")
