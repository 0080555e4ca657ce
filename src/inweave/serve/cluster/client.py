"""The web process's end of the bridge to Ray: calls by number, and another bridge when one ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

from inweave.errors import ConfigError
from inweave.serve.engine.child_process import ChildProcess
from inweave.serve.engine.contract import RunnerLostError
from inweave.serve.engine.wire import Message, WireError

log = logging.getLogger("inweave.serve")
#: seconds until another bridge is started
PAUSE = 1.0
#: seconds in which a bridge ends the cluster that it has started
END_SECONDS = 20.0


class UnreachableError(Exception):
    """A call had no answer; it may be repeated."""


class ClusterClient:
    """Calls to the bridge. A call waits while there is no bridge."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._process = ChildProcess("inweave.serve.cluster.bridge")
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._connected = asyncio.Event()
        self._closing = False
        self.reason = "the Ray cluster is being connected"  # why it is not connected

    async def run(self) -> None:
        """Keep a bridge running until `close`."""
        while not self._closing:
            try:
                await self._process.start(Message("settings", {"address": self._address}))
                await self._read()
            except WireError:
                pass
            finally:
                self._connected.clear()
                self._fail("the connection to the Ray cluster ended")
                if not self._closing:
                    await asyncio.shield(self._process.stop(now=True))
            if self._closing:
                return
            log.error("%s; connecting again", self.reason)
            await asyncio.sleep(PAUSE)

    async def _read(self) -> None:
        while True:
            message = await self._process.receive()
            if message.type == "connected":
                self.reason = ""
                self._connected.set()
            elif message.type == "refused":
                self.reason = f"no Ray cluster answers at {self._address}: {message.data['text']}"
                return
            elif (answer := self._answers.pop(message.data["id"], None)) is not None and not answer.done():
                if message.type == "answer":
                    answer.set_result(message.data["value"])
                else:
                    answer.set_exception(_error(**message.data))

    def _fail(self, reason: str) -> None:
        self.reason = self.reason or reason
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(UnreachableError(reason))
        self._answers.clear()

    async def call(self, name: str, **data: Any) -> Any:
        """Return the answer to a call.

        Raises:
            RunnerLostError: the actor has ended.
            UnreachableError: neither the call nor its answer may have arrived.
            WireError: the actor failed.
            ConfigError: a file of this machine cannot be read.
        """
        await self._connected.wait()
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            try:
                await self._process.send(Message(name, {"id": number, **data}))
            except WireError as error:
                raise UnreachableError(str(error)) from None
            return await answer
        finally:
            self._answers.pop(number, None)

    async def close(self) -> None:
        """End the bridge, and with it the actors and a cluster of its own."""
        self._closing = True
        await self._process.stop(seconds=END_SECONDS)


def _error(id: int, kind: str, text: str) -> Exception:
    kinds: dict[str, type[Exception]] = {"lost": RunnerLostError, "unreachable": UnreachableError, "file": ConfigError}
    return kinds.get(kind, WireError)(text)
