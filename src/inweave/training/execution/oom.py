"""Out of memory: recognizing it, and reporting it together with the setting to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from inweave.errors import MemoryBudgetError


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means it, or was raised on the way out of one that does: a GPU raises its own class, a CPU a text."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return True
    return error.__context__ is not None and out_of_memory(error.__context__)


@contextmanager
def oom_hint(what: str, advice: str) -> Iterator[None]:
    """Turn running out of memory inside the block into a `MemoryBudgetError` that says at what, and what helps."""
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
