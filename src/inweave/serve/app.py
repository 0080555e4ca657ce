"""The web application: routes of every API, errors as JSON, the security layer around all of it."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from inweave.errors import BusyError, ConfigError, InweaveError
from inweave.serve.api.a1111 import generate as sdapi
from inweave.serve.api.a1111 import lists as sdapi_lists
from inweave.serve.api.a1111 import progress as sdapi_state
from inweave.serve.api.a1111.options import SdOptions
from inweave.serve.api.native import datasets as dataset_routes
from inweave.serve.api.native import images as picture_routes
from inweave.serve.api.native import jobs as native
from inweave.serve.api.native import loras as lora_routes
from inweave.serve.api.native import queue as queue_routes
from inweave.serve.api.native import training as train_routes
from inweave.serve.api.native import uploads as upload_routes
from inweave.serve.api.openai import images as openai
from inweave.serve.api.openapi import describe_interface
from inweave.serve.http import page_files, sessions
from inweave.serve.http.security import Security
from inweave.serve.jobs.errors import StorageError
from inweave.serve.jobs.failures import failure_of, public, status_of
from inweave.serve.jobs.job import Failure
from inweave.serve.service import MismatchError, Service
from inweave.serve.settings import ServeSettings, model_name
from inweave.version import __version__

log = logging.getLogger("inweave.serve")
RETRY_AFTER = 5


def create_app(
    settings: ServeSettings, identity: dict[str, Any] | None = None, service: Service | None = None
) -> ASGIApp:
    """A worker as an ASGI application; ``service``: opened already. It starts and stops its processes with the server."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service: Service = app.state.service or Service.open(settings)
        app.state.service = service
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(title="inweave", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.openapi = partial(describe_interface, app)  # type: ignore[method-assign]
    app.state.service = service
    app.state.identity = {"port": settings.port, **(identity or {})}
    app.state.sd_options = SdOptions(model_name(settings.model))
    app.state.tasks = {}
    app.state.settings = settings
    app.state.page = page_files.Page()
    for module in (
        native, queue_routes, lora_routes, dataset_routes, train_routes, sessions, picture_routes, upload_routes, openai, sdapi, sdapi_lists,
        sdapi_state, page_files,
    ):  # fmt: skip
        app.include_router(module.router)
    app.include_router(lora_routes.conversions)
    app.add_exception_handler(InweaveError, _our_error)  # type: ignore[arg-type]
    app.add_exception_handler(RequestValidationError, _invalid)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _http_error)  # type: ignore[arg-type]
    app.add_exception_handler(sqlite3.OperationalError, _storage_error)
    app.add_exception_handler(OSError, _storage_error)
    app.add_exception_handler(Exception, _bug)
    return Security(app, settings)


async def _our_error(request: Request, error: InweaveError) -> JSONResponse:
    return error_response(request, error)


def error_response(request: Request, error: Exception) -> JSONResponse:
    """An error in the shape of the API that was called."""
    status = status_of(error)
    failure = failure_of(error)
    body: dict[str, Any] = {}
    if isinstance(error, ConfigError):
        body["problems"] = [public(str(problem)) for problem in error.problems]
    if isinstance(error, MismatchError):
        body["report"] = error.report
    headers = {"Retry-After": str(RETRY_AFTER)} if isinstance(error, BusyError) else {}
    return JSONResponse(_shape(request.url.path, status, failure, body), status, headers)


def _shape(path: str, status: int, failure: Failure, more: dict[str, Any]) -> dict[str, Any]:
    """Return an error in the shape of the API that was called; all of them hold the same message."""
    if path.startswith(("/v1/images", "/v1/models")):
        return {"error": {**more, **openai.error_body(failure, status)}}
    if path.startswith(("/sdapi/", "/internal/")):
        return {"error": failure.code, "detail": failure.message, "body": "", "errors": failure.message, **more}
    return {"error": {**failure.as_dict(), **more}}


async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    problems = [f"{'.'.join(str(part) for part in each['loc'][1:])}: {each['msg']}"[:300] for each in error.errors()]
    return error_response(request, ConfigError(problems))


async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    codes = {
        404: ("not_found", "there is nothing here"),
        405: ("method_not_allowed", "this method is not allowed here"),
    }
    code, text = codes.get(error.status_code, ("invalid_request", "the request cannot be served"))
    body = _shape(request.url.path, error.status_code, Failure(code, text), {})
    return JSONResponse(body, error.status_code, dict(error.headers or {}))


async def _storage_error(request: Request, error: Exception) -> JSONResponse:
    """The disk refuses: nothing was queued, and the client may try again later."""
    log.error("%s %s: %s", request.method, request.url.path, error)
    return error_response(request, StorageError("the disk of the worker is full or cannot be written"))


async def _bug(request: Request, error: Exception) -> JSONResponse:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(request, error)
