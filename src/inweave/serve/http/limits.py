"""Limits of request bodies: their length, whatever the headers say, and the time they take."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from starlette.types import Message, Receive

from inweave.serve.jobs.errors import QuotaError

#: how long a body may pause between two pieces
BODY_SECONDS = 30.0
#: bytes per second, on average, of a body that takes longer than that
BODY_RATE = 1024
#: how long the rest of a body that is too large is read, and thrown away, so that its sender reads the answer
LINGER_SECONDS = 30.0
TOO_SLOW = f"request body too slow: send at least {BODY_RATE:,} bytes/s, with no pause over {BODY_SECONDS:g} s"


class BodyTooLarge(Exception):
    """A request is longer than the limit."""


class BodyTooSlow(Exception):
    """A request stopped in the middle of its body."""


class LimitedBody:
    """A body that ends with an error once it is too long, too slow or beyond a quota.

    ``count`` is called with the bytes of each piece; it raises QuotaError.
    """

    def __init__(self, receive: Receive, limit: int, count: Callable[[int], None] = lambda _: None) -> None:
        self._receive, self.limit, self.length, self._waited, self._count = receive, limit, 0, 0.0, count
        self.exceeded = self.late = self._complete = False
        self.quota: QuotaError | None = None

    @property
    def refusal(self) -> tuple[int, str, str] | None:
        """(status, code, message), if the body was refused."""
        if self.late:
            return 408, "too_slow", TOO_SLOW
        if self.quota is not None:
            return 429, "quota", str(self.quota)
        return (413, "too_large", f"the body is longer than {self.limit:,} bytes") if self.exceeded else None

    def declare(self, length: str | None) -> None:
        """Refuse a body whose declared length is wrong or too large."""
        if length:
            self.exceeded = not (length.isascii() and length.isdigit()) or int(length) > self.limit

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
            size = len(message.get("body", b""))
            if self.length + size > self.limit:
                self.exceeded = True
                raise BodyTooLarge
            try:
                self._count(size)
            except QuotaError as error:
                self.quota = error
                raise BodyTooLarge from None
            self.length += size
        return message

    async def discard(self) -> None:
        """Read what still comes of a refused body: a connection that is closed on unread data loses the answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                message: Message = {"type": "http.request", "more_body": not self._complete}
                while message["type"] == "http.request" and message.get("more_body", False):
                    message = await self._receive()

    def _patience(self) -> float:
        """Return the seconds until the next piece must arrive: one pause, but not one after the other."""
        return max(0.0, min(BODY_SECONDS, BODY_SECONDS + self.length / BODY_RATE - self._waited))
