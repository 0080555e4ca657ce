"""Tokens: who may call, and with which account.

    Authorization: Bearer TOKEN, or Basic with TOKEN as the password, or the cookie that a browser got for it

    cookie = HMAC-SHA256(token, "inweave session")

The cookie is not the token, pages cannot read it, and other sites cannot send it (HttpOnly, SameSite=Strict). It stays
valid over restarts, until the worker has another token.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from http.cookies import CookieError, SimpleCookie

from starlette.types import Scope

from inweave.serve.http import page_files
from inweave.serve.jobs.accounts import Account
from inweave.serve.settings import ServeSettings

#: for load balancers, and for the page that asks its user for a token
OPEN_PATHS = ("/health", "/ready", "/v1/ready", "/")


class Tokens:
    """The tokens of a worker: the one of its settings, which has no quotas, and those of accounts."""

    def __init__(self, settings: ServeSettings, accounts: Sequence[Account] = ()) -> None:
        self._cookie, self._needed = cookie_name(settings), settings.needs_token
        unlimited = [] if settings.token is None else [(settings.token, None)]
        self._owners: list[tuple[str, Account | None]] = [*unlimited, *((each.token, each) for each in accounts)]

    def identify(self, scope: Scope, headers: Mapping[bytes, str]) -> tuple[bool, str | None, Account | None]:
        """Return (whether a request may pass, its token, its account); the latter None if it has none."""
        sent, cookie = headers.get(b"authorization", ""), headers.get(b"cookie", "")
        if sent or cookie:
            for token, account in self._owners:
                if _header_matches(token, sent) or _cookie_matches(token, self._cookie, cookie):
                    return True, token, account
        is_open = scope["path"] in OPEN_PATHS or scope["path"].startswith(page_files.PREFIX)
        return is_open or not self._needed, None, None


def challenge(headers: Mapping[bytes, str]) -> bytes:
    """Return how a caller may identify itself; scripts of the page are not offered the browser's own form."""
    mode = headers.get(b"sec-fetch-mode", "navigate")
    from_script = mode != "navigate" or b"x-requested-with" in headers
    return b'Bearer realm="inweave"' + (b"" if from_script else b', Basic realm="inweave"')


def cookie_name(settings: ServeSettings) -> str:
    """Return the name of a worker's cookie: browsers send a cookie to every port of a host."""
    return f"inweave_session_{settings.port}"


def cookie_value(token: str) -> str:
    """Return the value of the cookie for a token."""
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


def _cookie_matches(token: str, name: str, header: str) -> bool:
    try:
        cookie = SimpleCookie(header).get(name)
    except CookieError:
        return False
    return cookie is not None and hmac.compare_digest(cookie.value.encode(), cookie_value(token).encode())
