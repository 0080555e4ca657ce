"""Every error inweave raises on purpose.

    InweaveError
    |-- FormatError        a file or its contents cannot be read (names the file and the byte or tensor)
    |-- TargetError        an adapter and a base model do not fit each other
    |-- MergeStateError    the adapters of a model are not in the state an operation needs
    |   |-- AlreadyMerged  merged twice
    |   `-- NotMerged      unmerged before merging
    |-- ConfigError        options or a configuration file; collects all problems before it is raised
    |-- RequestError       a request that cannot be served
    |-- Cancelled          stopped between steps because somebody asked for it
    `-- MemoryBudgetError  the work does not fit the memory it was given

A message names the thing, what was expected, what came and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class InweaveError(Exception):
    """The root: catching it catches everything inweave raises on purpose."""


class FormatError(InweaveError):
    """A file or its contents cannot be read."""


class TargetError(InweaveError):
    """An adapter and a base model do not fit each other."""


class MergeStateError(InweaveError):
    """An adapter is already merged, or not merged yet."""


class AlreadyMerged(MergeStateError):
    """The adapter is merged; merging it again would apply it twice."""


class NotMerged(MergeStateError):
    """There is nothing merged to undo."""


class ConfigError(InweaveError):
    """Options that contradict each other or name nothing; lists every problem found."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class RequestError(InweaveError):
    """A request that cannot be served."""


class Cancelled(InweaveError):
    """The work was stopped on request; nothing is wrong."""


class MemoryBudgetError(InweaveError):
    """The work does not fit the memory it was given."""
