"""Jobs, and the states they pass through.

    queued -> running -> done | failed | cancelled        a job ends exactly once
    running -> queued                                     once, if the process that ran it died

Every change of state is an event; the events of a job are numbered from 1 and end with one of the three final types.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["queued", "running", "done", "failed", "cancelled"]
Kind = Literal["image_generation", "image_transform", "image_inpaint", "train"]
FINAL: tuple[State, ...] = ("done", "failed", "cancelled")
#: how often a job may be started: once more after a crash; a job that kills its process again has failed
MAX_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job failed: a code for programs, a sentence for people, and the field of the request that is at fault."""

    code: str
    message: str
    field: str | None = None

    def as_dict(self) -> dict[str, str]:
        """Return the code and the message, which clients get."""
        return {"code": self.code, "message": self.message}

    def as_record(self) -> dict[str, str]:
        """Return everything that is known, for the database and for other processes."""
        return self.as_dict() | ({} if self.field is None else {"field": self.field})


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job; ``image`` is the PNG that ``data`` describes."""

    type: str
    data: dict[str, Any] = field(default_factory=dict)
    image: bytes | None = None


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event with its number, as the store returns it."""

    number: int
    type: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated request on its way into the queue.

    ``inputs``: PNG images by name, encoded by the sandbox; ``account``: of the token that sent it, if it has one.
    """

    kind: Kind
    model: str
    request: dict[str, Any]
    inputs: dict[str, bytes] = field(default_factory=dict)
    priority: int = 0
    client: str = ""
    idempotency_key: str | None = None
    fingerprint: str = ""
    account: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """One row of the queue; ``lease``: of the attempt that runs, ``holder``: the web process that has it."""

    id: str
    number: int
    kind: Kind
    model: str
    state: State
    priority: int
    client: str
    request: dict[str, Any]
    attempts: int
    cancel: bool
    created: float
    started: float | None
    finished: float | None
    error: Failure | None
    result: dict[str, Any] | None
    expired: bool
    lease: str | None = None
    holder: str | None = None
    account: str = ""

    @property
    def final(self) -> bool:
        """Whether the job has ended."""
        return self.state in FINAL


def new_id() -> str:
    """Return a job id that cannot be guessed."""
    return f"job-{secrets.token_hex(12)}"
