"""One layer around every route: tokens, origins, limits of bodies, and headers that browsers obey.

answers    Content-Security-Policy, nosniff, no framing, no referrer, no caching of API answers
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inweave.serve.http.forwarded import as_forwarded
from inweave.serve.http.limits import BodyTooLarge, BodyTooSlow, LimitedBody
from inweave.serve.http.origin import PREFLIGHT, host_allowed, origin_allowed, sharing_headers
from inweave.serve.http.tokens import Tokens, challenge
from inweave.serve.jobs.accounts import CURRENT, Account
from inweave.serve.jobs.errors import QuotaError
from inweave.serve.jobs.job import Failure
from inweave.serve.jobs.usage import Usage
from inweave.serve.settings import ServeSettings

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
Refusal = tuple[int, str, str]
Document = Callable[[Scope, int, Failure], dict[str, Any]]
Record = Callable[[Scope, int, float], None]


class Security:
    """ASGI middleware; the outermost one, so that no route is reached around it."""

    def __init__(
        self, app: ASGIApp, settings: ServeSettings, document: Document, record: Record | None = None,
        accounts: Sequence[Account] = (), usage: Callable[[], Usage] | None = None,
    ) -> None:  # fmt: skip
        """Wrap ``app``.

        Args:
            app: the application with the routes.
            settings: of the worker.
            document: makes the body of a refusal.
            record: gets each request, its status and its seconds.
            accounts: whose tokens are accepted besides that of the settings.
            usage: returns where the bodies of these accounts are counted.
        """
        self._app, self._settings, self._document, self._record = app, settings, document, record
        self._tokens, self._usage = Tokens(settings, accounts), usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        scope = as_forwarded(self._settings, scope)
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        shared = sharing_headers(self._settings, headers)
        started, status = time.perf_counter(), 0

        async def respond(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": _with_headers(message["headers"], shared)}
            await send(message)

        try:
            await self._answer(scope, headers, receive, respond, bool(shared))
        finally:
            if self._record is not None:
                self._record(scope, status, time.perf_counter() - started)

    async def _answer(
        self, scope: Scope, headers: dict[bytes, str], receive: Receive, respond: Send, shared: bool
    ) -> None:
        if shared and scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await respond({"type": "http.response.start", "status": 204, "headers": [*PREFLIGHT]})
            await respond({"type": "http.response.body", "body": b""})
            return
        allowed, token, account = self._tokens.identify(scope, headers)
        if (refusal := self._refusal(scope, headers, allowed)) is not None:
            await self._refuse(scope, respond, refusal, challenge(headers))
            return
        scope["token"] = token
        CURRENT.set(account)  # of the task of this request
        upload = scope["method"] == "POST" and scope["path"] == "/v1/loras"  # goes to the disk as it comes
        limit = self._settings.lora_bytes if upload else self._settings.body_bytes
        usage = None if account is None or self._usage is None else self._usage()
        body = LimitedBody(receive, limit, partial(usage.arriving, account) if usage and account else lambda _: None)
        body.declare(headers.get(b"content-length"))
        if usage and account and not body.exceeded:
            body.quota = usage.refusal(account, int(headers.get(b"content-length") or 0))
        started = complete = False

        async def unless_refused(message: Message) -> None:
            nonlocal started, complete
            if body.refusal is not None and not started:
                return  # whatever the route makes of it, the answer is about the body
            started = True
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await respond(message)

        try:
            if body.refusal is None:
                await self._app(scope, body, unless_refused)
        except (BodyTooLarge, BodyTooSlow):
            pass
        except Exception:  # the handlers of errors have logged and answered it
            if not complete:
                raise
        finally:
            if usage and account:
                usage.arrived(account, body.length)
        if body.refusal is not None and not started:
            await self._refuse(scope, respond, body.refusal, discard=body.discard, quota=body.quota)

    def _refusal(self, scope: Scope, headers: dict[bytes, str], allowed: bool) -> Refusal | None:
        if not host_allowed(self._settings, headers):
            return 421, "wrong_host", "this worker does not answer for that host name"
        if not allowed:
            return 401, "unauthorized", "a token is needed: send it as Authorization: Bearer TOKEN"
        if not origin_allowed(self._settings, scope["method"], headers):
            return 403, "wrong_origin", "requests from pages of other origins are not accepted"
        return None

    async def _refuse(
        self,
        scope: Scope,
        respond: Send,
        refusal: Refusal,
        challenge: bytes = b"",
        discard: Callable[[], Awaitable[None]] | None = None,
        quota: QuotaError | None = None,
    ) -> None:
        """Answer with a refusal; ``discard`` reads the rest of the request before the connection is closed."""
        status, code, text = refusal
        failure = Failure(code, text, None if quota is None else quota.field)
        body = json.dumps(self._document(scope, status, failure)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if status == 401:
            headers.append((b"www-authenticate", challenge))
        if quota is not None:
            headers.append((b"retry-after", str(quota.seconds).encode()))
        if status in (408, 413, 429):
            headers.append((b"connection", b"close"))
        await respond({"type": "http.response.start", "status": status, "headers": headers})
        await respond({"type": "http.response.body", "body": body, "more_body": True})
        if status in (413, 429) and discard is not None:
            await discard()
        await respond({"type": "http.response.body", "body": b""})


def _with_headers(headers: list[tuple[bytes, bytes]], shared: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer with those that it lacks."""
    present = {name for name, _ in headers}
    extra = [(name, value) for name, value in (*shared, *HEADERS) if name not in present]
    if shared:
        extra.remove((b"cross-origin-resource-policy", b"same-origin"))
    if b"cache-control" not in present:
        extra.append((b"cache-control", b"no-store"))
    return [*headers, *extra]
