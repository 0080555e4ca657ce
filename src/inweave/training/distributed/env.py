"""Detect from the environment whether this process was launched alone or as one of several. Needs no torch."""

from __future__ import annotations

import os

#: exit code of a process that stopped because another one did
LOST = 4
#: the variables of torchrun and MPI implementations for the world size and the rank
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


def launched() -> tuple[int, int]:
    """Return (world size, rank)."""
    size, rank = (next((os.environ[name] for name in names if name in os.environ), None) for names in (_SIZES, _RANKS))
    return int(size or 1), int(rank or 0)
