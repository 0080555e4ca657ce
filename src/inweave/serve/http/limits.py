"""Limits of request bodies: their length, whatever the headers say, and the time they take."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable

from starlette.types import Message, Receive

from inweave.errors import InweaveError
from inweave.serve.jobs.accounts import Account
from inweave.serve.jobs.errors import StorageError
from inweave.serve.jobs.failures import code_of, message_of, status_of
from inweave.serve.jobs.usage import Usage

log = logging.getLogger("inweave.serve")
#: how long a body may pause between two pieces
BODY_SECONDS = 30.0
#: bytes per second, on average, of a body that takes longer than that
BODY_RATE = 1024
#: how long the rest of a body that is too large is read, and thrown away, so that its sender reads the answer
LINGER_SECONDS = 30.0
#: bytes that a body without a declared length reserves at a time in its quota
BLOCK = 8 * 1024**2
TOO_SLOW = f"request body too slow: send at least {BODY_RATE:,} bytes/s, with no pause over {BODY_SECONDS:g} s"


class BodyTooLarge(Exception):
    """A request is longer than the limit."""


class BodyTooSlow(Exception):
    """A request stopped in the middle of its body."""


class BodyQuota:
    """The bytes of one body, which are reserved in the quota of an account before they are read."""

    def __init__(self, usage: Usage, account: Account) -> None:
        self._usage, self._account = usage, account
        self._left = self._hour = 0

    async def declare(self, length: int) -> None:
        """Reserve a whole body; raise an InweaveError if it has no room."""
        if length:
            await self._reserve(length)

    async def count(self, size: int) -> None:
        """Reserve a piece, unless it was; raise an InweaveError if it has no room."""
        if size > self._left:
            await self._reserve(size - self._left, BLOCK)
        self._left -= size

    async def _reserve(self, *sizes: int) -> None:
        try:
            size, self._hour = await asyncio.to_thread(self._usage.reserve, self._account, *sizes)
        except sqlite3.OperationalError as error:
            raise StorageError("the disk of the worker is full or cannot be written") from error
        self._left += size

    async def close(self) -> None:
        """Give back what did not arrive."""
        if self._left:
            try:
                await asyncio.to_thread(self._usage.give_back, self._account, self._left, self._hour)
            except (InweaveError, sqlite3.Error) as error:
                log.error("%d bytes that did not arrive stay counted for %s: %s", self._left, self._account.name, error)


class LimitedBody:
    """A body that ends with an error once it is too long, too slow or beyond a quota.

    ``count`` is awaited with the bytes of each piece; an InweaveError of it is the answer.
    """

    def __init__(self, receive: Receive, limit: int, count: Callable[[int], Awaitable[None]] | None = None) -> None:
        self._receive, self.limit, self.length, self._waited, self._count = receive, limit, 0, 0.0, count
        self.exceeded = self.late = self._complete = False
        self.failure: InweaveError | None = None

    @property
    def refusal(self) -> tuple[int, str, str] | None:
        """(status, code, message), if the body was refused."""
        if self.late:
            return 408, "too_slow", TOO_SLOW
        if self.failure is not None:
            return status_of(self.failure), code_of(self.failure), message_of(self.failure)
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
                if self._count is not None:
                    await self._count(size)
            except InweaveError as error:
                self.failure = error
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
