"""The web application: the routes of every API, inside the security layer."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Scope

from inweave.serve.api.a1111.api import API as A1111
from inweave.serve.api.a1111.options import SdOptions
from inweave.serve.api.errors import ErrorHandlers
from inweave.serve.api.native.api import API as NATIVE
from inweave.serve.api.openai.api import API as OPENAI
from inweave.serve.api.openapi import openapi_document
from inweave.serve.http import page_files
from inweave.serve.http.security import Security
from inweave.serve.jobs.accounts import read_accounts
from inweave.serve.service import Service
from inweave.serve.settings import ServeSettings, model_name
from inweave.version import __version__

log = logging.getLogger("inweave.serve")
APIS = (OPENAI, A1111, NATIVE)  # errors of a path that is like no route have the shape of the last one


def create_app(
    settings: ServeSettings, identity: dict[str, Any] | None = None, service: Service | None = None
) -> ASGIApp:
    """Return a worker as an ASGI application, which starts and stops its processes with the server.

    ``service``: if it is open already.
    """

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
    app.openapi = partial(openapi_document, app)  # type: ignore[method-assign]
    app.state.service = service
    app.state.identity = {"port": settings.port, **(identity or {})}
    app.state.sd_options = SdOptions(model_name(settings.model))
    app.state.tasks = {}
    app.state.settings = settings
    app.state.page = page_files.Page()
    for api in APIS:
        api.include_in(app)
    app.include_router(page_files.router)
    errors = ErrorHandlers(APIS)
    errors.install(app)

    def record(scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unknown" if status == 404 else "refused")
        log.debug("%s %s %d, %.0f ms", scope["method"], scope["path"], status, 1000 * seconds)
        if app.state.service is not None:
            app.state.service.figures.answered(scope["method"], route, status, seconds)

    accounts = () if settings.tokens is None else read_accounts(settings.tokens)
    return Security(app, settings, errors.document, record, accounts, lambda: app.state.service.usage)
