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

A message names the thing, the expected and the actual value, and what to do. All of these are exported, for example
`inweave.FormatError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and the field or setting that it concerns, if it concerns a single one.

    Any InweaveError may be raised with a problem in place of its message: `RequestError(Problem("mask", "..."))`.
    """

    field: str | None
    text: str

    def __str__(self) -> str:
        return self.text if self.field is None else f"{self.field}: {self.text}"

    def renamed(self, names: Mapping[str, str]) -> Problem:
        """Return the problem with its field under another name, if ``names`` has one."""
        return self if self.field is None else replace(self, field=names.get(self.field, self.field))


def amount(count: int, noun: str) -> str:
    """Return a count with its noun: "1 image", "2 images", "2 batches"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith(("ch", "x", "s")) else "s")


class InweaveError(Exception):
    """Base class: catching it catches everything inweave raises on purpose."""

    @property
    def field(self) -> str | None:
        """The field of a request that the error concerns; None if it is unknown or not a single one."""
        cause = self.args[0] if self.args else None
        return cause.field if isinstance(cause, Problem) else None


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

    All problems are collected before it is raised: `problems` holds one `Problem` per problem, and `str` of each of
    them is its message.

    Args:
        problems: one problem or several, each a `Problem` or its text.
    """

    def __init__(self, problems: str | Problem | Sequence[str | Problem]) -> None:
        listed = (problems,) if isinstance(problems, str | Problem) else problems
        self.problems = tuple(each if isinstance(each, Problem) else Problem(None, each) for each in listed)
        super().__init__("\n".join(map(str, self.problems)))

    @property
    def field(self) -> str | None:
        """The field of the first problem."""
        return self.problems[0].field if self.problems else None

    def renamed(self, names: Mapping[str, str]) -> ConfigError:
        """Return the error with fields under the names that a caller uses for them."""
        return ConfigError([problem.renamed(names) for problem in self.problems])


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
