"""One layer around every route: who may call, from which pages, and how much they may send.

    token      Authorization: Bearer TOKEN, or Basic with TOKEN as the password, or the cookie that a browser got for it
               (`sessions`); without a token any header is accepted
    origin     a browser's request that changes something must come from this worker's own pages, or from `origins`
    body       refused as soon as it is longer than the limit, whatever its headers say, or stops for long, or trickles
    answers    Content-Security-Policy, nosniff, no framing, no referrer, no caching of API answers

Requests are matched by their Host too: a page that made its name resolve to this machine is not this worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inweave.serve.http import page_files, sessions
from inweave.serve.settings import ServeSettings

#: how long a body may pause between two pieces
BODY_SECONDS = 30.0
#: bytes per second, on average, of a body that takes longer than that
BODY_RATE = 1024
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
#: what a load balancer must see without a token, and what a browser needs to ask its user for one
OPEN_PATHS = ("/health", "/ready", "/v1/ready", "/")
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", CSP.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)


TOO_SLOW = (
    f"the body did not arrive: it may pause for {BODY_SECONDS:g} s, and comes with {BODY_RATE:,} bytes a second or more"
)

#: what pages of allowed origins may send, told to the browser before
PREFLIGHT = (
    (b"access-control-allow-methods", b"GET, POST, PUT, PATCH, DELETE"),
    (b"access-control-allow-headers", b"authorization, content-type, idempotency-key, last-event-id, x-client-id"),
    (b"access-control-max-age", b"600"),
)


class BodyTooLarge(Exception):
    """A request is longer than the limit."""


class BodyTooSlow(Exception):
    """A request has stopped in the middle of its body."""


class Security:
    """ASGI middleware; the outermost one, so that no route is reached around it."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        shared = self._shared(headers)
        if shared and scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await send({"type": "http.response.start", "status": 204, "headers": [*HEADERS, *shared, *PREFLIGHT]})
            await send({"type": "http.response.body", "body": b""})
            return
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _answer(send, *refusal, prompt=not _from_script(headers))
            return
        upload = scope["method"] == "POST" and scope["path"] == "/v1/loras"  # goes to the disk as it comes
        limited = _Limit(receive, self._settings.lora_bytes if upload else self._settings.body_bytes)
        if (length := headers.get(b"content-length")) and (
            not (length.isascii() and length.isdigit()) or int(length) > limited.limit
        ):
            await _answer(send, 413, "too_large", f"the body is longer than {limited.limit:,} bytes")
            return
        started = False

        async def respond(message: Message) -> None:
            nonlocal started
            if (limited.exceeded or limited.late) and not started:
                return  # whatever the route makes of it, the answer is about the body
            if message["type"] == "http.response.start":
                started = True
                present = {name for name, _ in message["headers"]}
                extra = [(name, value) for name, value in (*shared, *HEADERS) if name not in present]
                if shared:
                    extra.remove((b"cross-origin-resource-policy", b"same-origin"))
                if b"cache-control" not in present:
                    extra.append((b"cache-control", b"no-store"))
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        with contextlib.suppress(BodyTooLarge, BodyTooSlow):
            await self._app(scope, limited, respond)
        if limited.late and not started:
            await _answer(send, 408, "too_slow", TOO_SLOW)
        elif limited.exceeded and not started:
            await _answer(send, 413, "too_large", f"the body is longer than {limited.limit:,} bytes")

    def _shared(self, headers: dict[bytes, str]) -> list[tuple[bytes, bytes]]:
        """What lets a page of an allowed origin read an answer; a browser asks for it before it sends a request."""
        origin = headers.get(b"origin")
        if origin is None or origin not in self._settings.origins:
            return []
        return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin")]

    def _refusal(self, scope: Scope, headers: dict[bytes, str]) -> tuple[int, str, str] | None:
        if not self._host_allowed(headers.get(b"host", "")):
            return 421, "wrong_host", "this worker does not answer for that host name"
        if not _open(scope) and not sessions.authorized(self._settings, headers):
            return 401, "unauthorized", "a token is needed: send it as Authorization: Bearer TOKEN"
        if scope["method"] not in SAFE_METHODS and not self._origin_allowed(headers):
            return 403, "wrong_origin", "requests from pages of other origins are not accepted"
        return None

    def _host_allowed(self, host: str) -> bool:
        """On loopback only loopback names: a page elsewhere may have made its own name resolve here."""
        if not self._settings.loopback:
            return True
        name = urlsplit(f"//{host}").hostname or ""
        return name in ("localhost", "127.0.0.1", "::1", self._settings.host)

    def _origin_allowed(self, headers: dict[bytes, str]) -> bool:
        if headers.get(b"sec-fetch-site", "none") not in ("none", "same-origin") and b"origin" not in headers:
            return False
        origin = headers.get(b"origin")
        if origin is None:
            return True  # not a browser's request from a page
        if origin in self._settings.origins:
            return True
        parts = urlsplit(origin)
        return bool(parts.netloc) and parts.netloc == headers.get(b"host")


class _Limit:
    """A body that ends with an error once it is too long, or has been waited for too long."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive, self.limit, self._length, self._waited = receive, limit, 0, 0.0
        self.exceeded = self.late = self._complete = False

    async def __call__(self) -> Message:
        started = time.monotonic()
        try:
            async with asyncio.timeout(None if self._complete else self._patience()):
                message = await self._receive()
        except TimeoutError:
            self.late = True
            raise BodyTooSlow from None
        self._waited += time.monotonic() - started
        if message["type"] == "http.request":
            self._complete = not message.get("more_body", False)
            self._length += len(message.get("body", b""))
            if self._length > self.limit:
                self.exceeded = True
                raise BodyTooLarge
        return message

    def _patience(self) -> float:
        """Seconds until the next piece: a pause, but not one after the other."""
        return max(0.0, min(BODY_SECONDS, BODY_SECONDS + self._length / BODY_RATE - self._waited))


def _open(scope: Scope) -> bool:
    """Whether a request needs no token: health, and the files of the page."""
    return scope["path"] in OPEN_PATHS or scope["path"].startswith(page_files.PREFIX)


def _from_script(headers: dict[bytes, str]) -> bool:
    """Whether a script of a page sent it: the page asks for the token itself, in a form of its own."""
    mode = headers.get(b"sec-fetch-mode", "navigate")
    return mode != "navigate" or b"x-requested-with" in headers


async def _answer(send: Send, status: int, code: str, text: str, *, prompt: bool = True) -> None:
    body = json.dumps({"error": {"code": code, "message": text}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *HEADERS]
    if status == 401:
        challenge = b'Bearer realm="inweave"' + (b', Basic realm="inweave"' if prompt else b"")
        headers.append((b"www-authenticate", challenge))
    if status in (408, 413):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
