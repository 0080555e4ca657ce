"""The dispatcher's end of a runner in a Ray cluster: each start places another actor on a free device.

The runner is lost when its actor has ended, or has given no answer for ``LEASE`` seconds (see `cluster.host`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Any

from inweave.errors import ConfigError, InweaveError
from inweave.serve.cluster.client import ClusterClient, UnreachableError
from inweave.serve.cluster.files import paths_of
from inweave.serve.engine.child_process import GRACE
from inweave.serve.engine.contract import (
    LEASE,
    Command,
    Finished,
    Load,
    Loaded,
    Report,
    RunnerLostError,
    RunnerSettings,
    RunRequest,
    decode,
    encode,
)
from inweave.serve.engine.model_process import LEASE_OVER
from inweave.serve.engine.wire import WireError, read_message
from inweave.serve.jobs.failures import error_of, failure_of
from inweave.serve.jobs.job import Failure
from inweave.version import __version__

log = logging.getLogger("inweave.serve")
#: seconds between two tries of a call that had no answer
RETRY = 0.2


@dataclass(frozen=True, slots=True)
class Placement:
    """What an actor needs of its node, and where it keeps copies of files; ``witness``: see `RunnerHost`."""

    cpus: float
    gpus: float
    cache: str
    cache_bytes: int
    witness: str
    memory: int | None = None


class RayEndpoint:
    """A `RunnerEndpoint` whose runner is a Ray actor."""

    def __init__(
        self, client: ClusterClient, placement: Placement, on_placed: Callable[[], None] = lambda: None
    ) -> None:
        """Make an endpoint; ``on_placed`` is called whenever an actor is placed, before its first report."""
        self._client, self._placement, self._on_placed = client, placement, on_placed
        self._session: str | None = None
        self._reports: asyncio.Queue[Report | WireError] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._end: WireError | None = None
        self._problem = ""  # with the last placement
        self.node = ""
        self.shares = False  # whether it sees the folder of training
        self.placed = False

    @property
    def alive(self) -> bool:
        return self._session is not None and self._end is None

    @property
    def reason(self) -> str:
        """Why there is no actor so far."""
        return self._client.reason or self._problem or "no device of the cluster is free so far"

    async def start(self, settings: RunnerSettings) -> None:
        self._session, self._end, self.placed = f"inweave-{secrets.token_hex(8)}", None, False
        self._reports, self._numbers = asyncio.Queue(), itertools.count(1)
        session, where = self._session, self._placement
        host = [asdict(settings), where.cache, where.cache_bytes, where.witness]
        try:
            facts = await self._stoppable(
                self._client.call(
                    "place", session=session, host=host, cpus=where.cpus, gpus=where.gpus, memory=where.memory
                )
            )
            if facts["version"] != __version__:
                raise WireError(f"{facts['host']} has inweave {facts['version']}, this worker {__version__}")
        except (UnreachableError, WireError) as error:
            if self._session is not None:
                self._problem = f"no runner could be placed: {error}"
                log.error(self._problem)
            raise RunnerLostError(str(error)) from None
        self.node, self.shares, self.placed = node_name(facts["address"], facts["node"]), facts["shares"], True
        self._problem = ""
        self._on_placed()
        self._begin(self._exchange(session))

    async def _stoppable(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Return the answer to a call that may take any time; raise WireError at once if `stop` is called meanwhile."""
        task = asyncio.ensure_future(call)
        self._tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._session is not None:
                raise
            raise WireError("the runner was stopped while it was being placed") from None
        finally:
            self._tasks.discard(task)

    async def send(self, command: Command) -> None:
        if self._end is not None:
            raise self._end
        if self._session is None:
            raise WireError("the runner is not running")
        self._begin(self._command(self._session, next(self._numbers), command))

    async def receive(self) -> Report:
        if self._end is not None and self._reports.empty():
            raise self._end
        if self._session is None:
            raise WireError("the runner is not running")
        report = await self._reports.get()
        if isinstance(report, WireError):
            raise report
        return report

    async def stop(self, *, now: bool = False) -> int | None:
        session, lost = self._session, isinstance(self._end, RunnerLostError)
        self._session = None
        self._finish(WireError("the runner was stopped"))
        for task in [*self._tasks]:
            task.cancel()
        if session is None:
            return None
        code = None
        with contextlib.suppress(UnreachableError, WireError, TimeoutError):
            async with asyncio.timeout(2 * GRACE):
                if self.placed and not lost:
                    code = await self._client.call("end", session=session, now=now)
        kill = asyncio.create_task(self._kill(session))  # of a node that does not answer: no reason to wait
        self._tasks.add(kill)
        kill.add_done_callback(self._tasks.discard)
        if not lost:
            await asyncio.wait({kill}, timeout=GRACE)
        return code

    async def _kill(self, session: str) -> None:
        with contextlib.suppress(UnreachableError, WireError):
            await self._client.call("kill", session=session)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _finish(self, error: WireError) -> None:
        if self._end is None:
            self._end = error
            self._reports.put_nowait(error)

    # inside of a session

    async def _exchange(self, session: str) -> None:
        """Collect reports, and end the session with the actor or with its lease."""
        turn = after = 0
        while session == self._session:
            try:
                async with asyncio.timeout(LEASE):
                    answer = await self._repeated("exchange", session=session, turn=turn, after=after)
                turn = answer["answer"]
                for number, content in answer["reports"]:
                    after = number
                    report = decode(read_message(BytesIO(content).read))
                    if isinstance(report, Report):
                        self._reports.put_nowait(report)
            except TimeoutError:
                self._finish(RunnerLostError(f"{self.node} has not answered for {LEASE:g} s"))
                return
            except WireError as error:
                self._finish(error)
                return
            if answer["ended"] is not None and not answer["reports"]:
                over = answer["ended"] == LEASE_OVER
                text = f"the model process ended (exit code {answer['ended']})"
                self._finish(RunnerLostError("its lease was over") if over else WireError(text))
                return

    async def _repeated(self, name: str, **data: Any) -> Any:
        """Call until there is an answer; a host ignores what it has had."""
        while True:
            try:
                return await self._client.call(name, **data)
            except UnreachableError:
                await asyncio.sleep(RETRY)

    async def _command(self, session: str, number: int, command: Command) -> None:
        """Send a command, and the files that its node lacks; a request whose files cannot be sent has failed."""
        message = encode(command)
        content = {"type": message.type, "data": message.data}
        try:
            keys = await asyncio.to_thread(paths_of, _paths(command))
            while missing := await self._repeated(
                "command", session=session, number=number, message=content, keys=keys
            ):  # fmt: skip
                for path in missing:
                    if keys[path]["hash"] is None:
                        keys[path]["hash"] = await self._repeated("hash", key=keys[path])
                        continue  # it may have a copy
                    answer = await self._repeated("copy", session=session, key=keys[path])
                    if "failure" in answer:
                        raise error_of(Failure(**answer["failure"]))
        except (InweaveError, OSError) as error:
            failure = failure_of(error if isinstance(error, InweaveError) else ConfigError(str(error)))
            if isinstance(command, RunRequest):
                self._reports.put_nowait(Finished(command.job, "failed", error=failure))
            elif isinstance(command, Load):
                self._reports.put_nowait(Loaded(command.model, failure))
        except WireError as error:
            self._finish(error)


def node_name(address: str, id: str) -> str:
    """Return the name of a node for people: several of them may have one address."""
    return f"{address}-{id[:6]}"


def _paths(command: Command) -> tuple[str, ...]:
    """Return what a command names that may be a file: the model and the adapters."""
    if isinstance(command, RunRequest):
        return (command.model, *command.models.values(), *command.loras.values(), *command.upscalers.values())
    return (command.model,) if isinstance(command, Load) else ()
