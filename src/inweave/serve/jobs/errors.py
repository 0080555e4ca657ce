"""Errors that only occur in the worker."""

from __future__ import annotations

from inweave.errors import BusyError, InweaveError, Problem, RequestError


class QuotaError(BusyError):
    """A request is beyond a quota of its account, which may have room again after ``seconds``."""

    def __init__(self, problem: Problem, seconds: int) -> None:
        super().__init__(problem)
        self.seconds = seconds


class GoneError(RequestError):
    """A request names a job whose results have expired."""


class NotReadyError(RequestError):
    """The worker cannot answer yet, and soon can."""


class MediaTypeError(RequestError):
    """The body of a request has a media type that its route does not accept."""


class StorageError(InweaveError):
    """The disk is full, or the data folder of the worker is read-only."""


class StoreLost(NotReadyError, ConnectionError):
    """A store on another machine does not answer: callers that must not give up repeat their call later.

    Clients get a general message; ``reason``, with names of hosts and users, is for the log.
    """

    what = "a store of the worker"

    def __init__(self, reason: str) -> None:
        super().__init__(f"{self.what} does not answer; ask again in a moment")
        self.reason = reason


class DatabaseLost(StoreLost):
    """The database of the queue does not answer."""

    what = "the database of the queue"


class BlobsLost(StoreLost):
    """The object store of images does not answer."""

    what = "the store of images"
