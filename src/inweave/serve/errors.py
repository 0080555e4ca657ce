"""Errors that only a server has."""

from __future__ import annotations

from inweave.errors import RequestError


class GoneError(RequestError):
    """A request names a job whose results have expired."""
