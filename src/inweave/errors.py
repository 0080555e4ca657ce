"""Every error inweave raises on purpose.

    InweaveError
    |-- FormatError        a file or its contents cannot be read
    |-- TargetError        an adapter and a base model do not fit each other
    |-- MergeStateError    the adapters of a model are not in the state an operation needs
    |   |-- AlreadyMerged  merged twice
    |   `-- NotMerged      unmerged before merging
    |-- ConfigError        invalid options or settings; lists every problem, not only the first
    |-- RequestError       a request that cannot be served
    |   |-- MissingError   it names something that does not exist
    |   |-- ConflictError  the thing it names is not in a state that allows it
    |   `-- BusyError      there is no room for it now; trying again later may work
    |-- MemoryBudgetError  the work does not fit in the memory it may use
    |-- CancelledError     stopped between two steps because the caller asked for it
    `-- LostPeerError      another process of a distributed run ended

A message names the thing, what was expected, what came and what to do. All of these are exported: `inweave.FormatError`.
"""

from __future__ import annotations

from collections.abc import Sequence


class InweaveError(Exception):
    """Base class: catching it catches everything inweave raises on purpose."""


class FormatError(InweaveError):
    """A file or its contents cannot be read; the message names the file and the byte or tensor."""


class TargetError(InweaveError):
    """An adapter and a base model do not fit each other; the message names the tensors."""


class MergeStateError(InweaveError):
    """The adapters of a model are not in the state that an operation needs."""


class AlreadyMerged(MergeStateError):
    """The adapter is already merged; merging it again would apply it twice."""


class NotMerged(MergeStateError):
    """No adapter is merged, so there is nothing to unmerge."""


class ConfigError(InweaveError):
    """Options or settings that are unknown, invalid or contradict each other.

    All problems are collected before it is raised: `problems` holds one message per problem.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class RequestError(InweaveError):
    """A request that cannot be served."""


class MissingError(RequestError):
    """A request names something that does not exist."""


class ConflictError(RequestError):
    """The thing that a request names is not in a state that allows it."""


class BusyError(RequestError):
    """There is no room for a request now; trying again later may work."""


class MemoryBudgetError(InweaveError):
    """The work does not fit in the memory it may use."""


class CancelledError(InweaveError):
    """The work was stopped because the caller asked for it; nothing is wrong."""


class LostPeerError(InweaveError):
    """Another process of a distributed run ended, so this one cannot continue; that process reports the cause."""
