"""Out of memory, wherever it happens: known by its signs, and told with the setting to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from inweave.errors import MemoryBudgetError


def out_of_memory(error: BaseException) -> bool:
    """A GPU says so by its own error, a CPU by words."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


@contextmanager
def needing(what: str, advice: str) -> Iterator[None]:
    """What runs out of memory inside ends with `MemoryBudgetError`: what there was none for, and what helps."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        words = " ".join(str(error).split())
    else:
        return
    raise MemoryBudgetError(f"no memory to {what}; {advice} ({words})")
