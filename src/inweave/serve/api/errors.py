"""Errors over HTTP: each API renders them in its own shape, all of them with the same status, code and message."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from inweave.errors import BusyError, ConfigError, InweaveError, Problem
from inweave.serve.http.limits import BodyTooLarge, BodyTooSlow
from inweave.serve.jobs.errors import NotReadyError, QuotaError, StorageError
from inweave.serve.jobs.failures import failure_of, status_of
from inweave.serve.jobs.job import Failure
from inweave.serve.jobs.private_paths import public
from inweave.serve.service.loras import MismatchError

log = logging.getLogger("inweave.serve")
RETRY_AFTER = 5


@dataclass(frozen=True, slots=True)
class Api:
    """One HTTP API: its routers, and the errors of their routes.

    ``error`` documents the body that ``render`` returns for a status, a failure and further details of it.
    """

    routers: tuple[APIRouter, ...]
    error: type[BaseModel]
    render: Callable[[int, Failure, dict[str, Any]], dict[str, Any]]

    def include_in(self, app: FastAPI) -> None:
        """Add the routers to an application."""
        refused: dict[int | str, dict[str, Any]] = {
            "4XX": {"model": self.error, "description": "refused; the message says why"},
            503: {"model": self.error, "description": "not ready yet; Retry-After says when to ask again"},
            507: {"model": self.error, "description": "the disk of the worker is full or cannot be written"},
        }
        for router in self.routers:
            app.include_router(router, responses=refused)

    @property
    def routes(self) -> list[APIRoute]:
        """The routes of all routers."""
        return [route for router in self.routers for route in router.routes if isinstance(route, APIRoute)]

    def likeness(self, path: str) -> int:
        """Return how many leading parts of a path are those of a route."""
        routes = [zip(path.split("/"), route.path.split("/"), strict=False) for route in self.routes]
        return max(len([*takewhile(lambda parts: parts[0] == parts[1], pairs)]) for pairs in routes)


class ErrorHandlers:
    """Renders errors in the shape of the API whose route was called.

    A path without a route has the shape of the API with the most similar route; the last one, if several are.
    """

    def __init__(self, apis: Sequence[Api]) -> None:
        self._apis = tuple(reversed(apis))
        self._owners = {route.endpoint: api for api in apis for route in api.routes}

    def document(self, scope: Scope, status: int, failure: Failure, **more: Any) -> dict[str, Any]:
        """Return the body of an answer that is an error; ``more``: further details."""
        endpoint = scope.get("endpoint")
        owner = self._owners.get(endpoint) if endpoint is not None else None
        api = owner or max(self._apis, key=lambda api: api.likeness(scope["path"]))
        return api.render(status, failure, more)

    def install(self, app: FastAPI) -> None:
        """Handle every error of an application."""
        app.add_exception_handler(InweaveError, self._inweave_error)
        app.add_exception_handler(RequestValidationError, self._invalid)
        app.add_exception_handler(HTTPException, self._http_error)
        for ended in (ClientDisconnect, BodyTooLarge, BodyTooSlow):
            app.add_exception_handler(ended, self._cut_short)
        app.add_exception_handler(sqlite3.OperationalError, self._storage_error)
        app.add_exception_handler(OSError, self._storage_error)
        app.add_exception_handler(Exception, self._bug)

    def _response(
        self, request: Request, status: int, failure: Failure, more: dict[str, Any], headers: dict[str, str]
    ) -> JSONResponse:
        return JSONResponse(self.document(request.scope, status, failure, **more), status, headers)

    async def _inweave_error(self, request: Request, error: Exception) -> JSONResponse:
        more: dict[str, Any] = {}
        if isinstance(error, ConfigError):
            more["problems"] = [public(str(problem)) for problem in error.problems]
        if isinstance(error, MismatchError):
            more["report"] = error.report
        seconds = error.seconds if isinstance(error, QuotaError) else RETRY_AFTER
        headers = {"Retry-After": str(seconds)} if isinstance(error, BusyError | NotReadyError) else {}
        return self._response(request, status_of(error), failure_of(error), more, headers)

    async def _invalid(self, request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        fields = [(".".join(map(str, each["loc"][1:])), each["msg"]) for each in error.errors()]
        problems = [Problem(field[:300], text[: max(0, 298 - len(field))]) for field, text in fields]
        return await self._inweave_error(request, ConfigError(problems))

    async def _http_error(self, request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        path, status = request.url.path[:200], error.status_code
        failure = Failure("invalid_request", "the request cannot be served")
        if status == 404:
            failure = Failure("not_found", f"no route matches {request.method} {path}")
        elif status == 405:
            failure = Failure("method_not_allowed", f"{request.method} is not allowed for {path}")
        return self._response(request, status, failure, {}, dict(error.headers or {}))

    async def _cut_short(self, request: Request, error: Exception) -> JSONResponse:
        """Answer a caller that hung up, or that `http.security` answers: the body ended early."""
        log.debug("%s %s: the body ended early: %s", request.method, request.url.path, type(error).__name__)
        return self._response(request, 400, Failure("invalid_request", "the request ended early"), {}, {})

    async def _storage_error(self, request: Request, error: Exception) -> JSONResponse:
        """Answer that the disk refuses: nothing was queued, and the client may try again later."""
        log.error("%s %s: %s", request.method, request.url.path, error)
        full = StorageError("the disk of the worker is full or cannot be written")
        return await self._inweave_error(request, full)

    async def _bug(self, request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return await self._inweave_error(request, error)
