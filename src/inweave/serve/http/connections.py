"""Time limits of connections: each has to send its request, and to read its answer, in time.

head      the request line and headers within ``HEAD_SECONDS`` of the connection, or of their first byte on a reused one
answer    a reader that takes nothing for ``STALL_SECONDS`` while data is waiting is disconnected
body      see `limits`
"""

from __future__ import annotations

import asyncio
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 15.0
STALL_SECONDS = 60.0


class TimedProtocol(H11Protocol):
    """HTTP/1.1 over one connection, with an end to waiting."""

    _head: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = self.loop.call_later(HEAD_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_head()
        elif self._head is None and self.timeout_keep_alive_task is None:
            self._head = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; a request whose body turns out not to be ends as if its caller had hung up."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()  # the answer has begun

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._start_stall()  # the answer may never be read

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_head()
        self._stop_stall()

    def _start_stall(self) -> None:
        self._stop_stall()
        self._stall = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _stop_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None


def allow_many_connections() -> None:
    """Raise the limit of open files: 1,024, the usual one, are taken by as many idle connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
