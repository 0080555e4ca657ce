"""Errors that only a server has."""

from __future__ import annotations

from inweave.errors import InweaveError, RequestError


class GoneError(RequestError):
    """A request names a job whose results have expired."""


class MediaTypeError(RequestError):
    """The body of a request is of a type that this route does not read."""


class StorageError(InweaveError):
    """The disk is full, or the folder of the worker cannot be written."""
