"""Errors that only occur in the worker."""

from __future__ import annotations

from inweave.errors import InweaveError, RequestError


class GoneError(RequestError):
    """A request names a job whose results have expired."""


class NotReadyError(RequestError):
    """The worker cannot answer yet, and soon can."""


class MediaTypeError(RequestError):
    """The body of a request has a media type that its route does not accept."""


class StorageError(InweaveError):
    """The disk is full, or the data folder of the worker is read-only."""
