"""How this process was started, as its environment says: alone, or as one of several. Needs no torch to tell."""

from __future__ import annotations

import os

#: what torchrun and the MPIs call the number of processes, and which of them one is
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


def launched() -> tuple[int, int]:
    """(how many processes were started, which of them this is)."""
    size, rank = (next((os.environ[name] for name in names if name in os.environ), None) for names in (_SIZES, _RANKS))
    return int(size or 1), int(rank or 0)
