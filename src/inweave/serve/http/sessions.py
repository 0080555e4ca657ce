"""Sessions of browsers: a cookie for the token, so that images and links work too.

GET    /v1/session     401 without the token or the cookie, else {token_required}; for an account its name and quotas
POST   /v1/session     with the token in Authorization: sets the cookie
DELETE /v1/session     removes the cookie
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from inweave.serve.http.tokens import cookie_name, cookie_value
from inweave.serve.jobs.accounts import CURRENT
from inweave.serve.service import Service
from inweave.serve.settings import ServeSettings

router = APIRouter(prefix="/v1/session")
COOKIE_SECONDS = 30 * 24 * 3600


@router.get("")
async def session(request: Request) -> dict[str, Any]:
    settings: ServeSettings = request.app.state.settings
    document: dict[str, Any] = {"token_required": settings.needs_token}
    if (account := CURRENT.get()) is not None:
        service: Service = request.app.state.service
        used = await asyncio.to_thread(service.usage.used, account)
        quotas = {name: {"limit": limit, "used": used[name]} for name, limit in account.quotas.items()}
        document |= {"account": account.name, "quotas": quotas}
    return document


@router.post("")
async def start_session(request: Request) -> JSONResponse:
    settings: ServeSettings = request.app.state.settings
    response = JSONResponse({"token_required": settings.needs_token})
    if (token := request.scope.get("token")) is not None:
        response.set_cookie(
            cookie_name(settings), cookie_value(token), max_age=COOKIE_SECONDS, httponly=True,
            samesite="strict", secure=request.url.scheme == "https",
        )  # fmt: skip
    return response


@router.delete("")
async def end_session(request: Request) -> JSONResponse:
    settings: ServeSettings = request.app.state.settings
    response = JSONResponse({"token_required": settings.needs_token})
    response.delete_cookie(cookie_name(settings), httponly=True, samesite="strict")
    return response
