"""Who may call: a token in a header, or the cookie that a browser got for it.

    GET    /v1/session     401 without the token or the cookie, else {token_required}
    POST   /v1/session     with the token in Authorization: sets the cookie, so that pictures and links work too
    DELETE /v1/session     removes the cookie

    cookie = HMAC-SHA256(token, "inweave session")

The cookie is not the token, pages cannot read it, and other sites cannot send it (HttpOnly, SameSite=Strict). It stays
valid over restarts, until the worker has another token.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from inweave.serve.settings import ServeSettings

router = APIRouter(prefix="/v1/session")
COOKIE_SECONDS = 30 * 24 * 3600


def authorized(settings: ServeSettings, headers: Mapping[bytes, str]) -> bool:
    """Whether a request carries the token or its cookie; without a token every request does."""
    if settings.token is None:
        return True
    return _header_matches(settings.token, headers.get(b"authorization", "")) or _cookie_matches(
        settings, headers.get(b"cookie", "")
    )


def cookie_name(settings: ServeSettings) -> str:
    """Browsers send a cookie to every port of a host: each worker has a name of its own."""
    return f"inweave_session_{settings.port}"


def cookie_value(token: str) -> str:
    return hmac.new(token.encode(), b"inweave session", hashlib.sha256).hexdigest()


def _header_matches(token: str, header: str) -> bool:
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "basic":
        try:
            value = base64.b64decode(value, validate=True).decode("utf-8").partition(":")[2]
        except (binascii.Error, ValueError):
            return False
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(value.strip().encode(), token.encode())


def _cookie_matches(settings: ServeSettings, header: str) -> bool:
    try:
        cookie = SimpleCookie(header).get(cookie_name(settings))
    except CookieError:
        return False
    return (
        cookie is not None
        and settings.token is not None
        and hmac.compare_digest(cookie.value.encode(), cookie_value(settings.token).encode())
    )


@router.get("")
async def session(request: Request) -> dict[str, Any]:
    settings: ServeSettings = request.app.state.settings
    return {"token_required": settings.token is not None}


@router.post("")
async def start_session(request: Request) -> JSONResponse:
    settings: ServeSettings = request.app.state.settings
    response = JSONResponse({"token_required": settings.token is not None})
    if settings.token is not None:
        response.set_cookie(
            cookie_name(settings), cookie_value(settings.token), max_age=COOKIE_SECONDS, httponly=True, samesite="strict",
            secure=request.headers.get("x-forwarded-proto", request.url.scheme) == "https",
        )  # fmt: skip
    return response


@router.delete("")
async def end_session(request: Request) -> JSONResponse:
    settings: ServeSettings = request.app.state.settings
    response = JSONResponse({"token_required": settings.token is not None})
    response.delete_cookie(cookie_name(settings), httponly=True, samesite="strict")
    return response
