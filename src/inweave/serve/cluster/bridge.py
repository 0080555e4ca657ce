"""The process between the web process and Ray: the only one that imports Ray, and the only one that Ray may end.

Ray ends a process that has lost the head of its cluster. This one keeps nothing, so the web process starts another one,
which finds the actors by their names; jobs run on meanwhile.

    <- settings {address}
    <- CALL {id, ...}        -> answer {id, value} | error {id, kind, text};  several calls at a time

Kinds of errors: ``lost``: the actor has ended; ``unreachable``: this call failed, the next one may not; ``failed``: an
error inside of the actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import traceback
from pathlib import Path
from typing import Any, BinaryIO

from inweave.serve.cluster.files import CHUNK, Hashes, Key
from inweave.serve.cluster.host import RunnerHost
from inweave.serve.engine.rpc_loop import message_pipes
from inweave.serve.engine.wire import Message, WireError, receive_message

NAMESPACE = "inweave"
#: seconds after which a head that does not answer ends this process
HEAD_SECONDS = 15.0
#: the cluster on this machine, and a cluster of this machine alone that ends with the worker
AUTO, LOCAL = "auto", "local"


def connect(address: str) -> Any:
    """Connect to a cluster and return the module `ray`."""
    # whatever these are set to is kept
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    loopback = address == LOCAL or address.split(":")[0] in ("127.0.0.1", "localhost")
    if loopback:  # nodes of one machine that others cannot reach
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    if address == LOCAL:
        if "RAY_AUTH_MODE" not in os.environ:  # other users of this machine can reach the ports
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray gives its processes the lowest priority but four
    import ray

    options: dict[str, Any] = {"_node_ip_address": "127.0.0.1"} if loopback else {}
    if address == LOCAL:
        options["include_dashboard"] = False
    # "local" has to be said: without an address, Ray joins a cluster that somebody else runs on this machine
    options["address"] = address
    ray.init(namespace=NAMESPACE, logging_level="ERROR", log_to_driver=False, configure_logging=False, **options)
    return ray


class Bridge:
    """Calls of the web process as calls of Ray."""

    def __init__(self, ray: Any, answers: BinaryIO) -> None:
        self._ray, self._answers = ray, answers
        self._actors: dict[str, Any] = {}
        self._hashes = Hashes()

    def send(self, message: Message) -> None:
        self._answers.write(message.encode())
        self._answers.flush()

    async def answer(self, call: Message) -> None:
        """Answer one call."""
        data = dict(call.data)
        number = data.pop("id")
        ray = self._ray
        try:
            value = await getattr(self, f"call_{call.type}")(**data)
            message = Message("answer", {"id": number, "value": value})
        except Exception as error:
            kind = "failed"
            if isinstance(error, ray.exceptions.ActorUnavailableError):
                kind = "unreachable"
            elif isinstance(error, ray.exceptions.RayActorError | _NoActor):
                kind = "lost"
            elif not isinstance(error, ray.exceptions.RayTaskError):
                kind = "unreachable"
            message = Message("error", {"id": number, "kind": kind, "text": _reason(error)})
        self.send(message)  # a thread would cost more than the web process takes to read it

    async def call_place(
        self, session: str, host: list[Any], cpus: float, gpus: float, memory: int | None
    ) -> dict[str, Any]:
        """Start an actor on a node with a free device; return facts about its machine."""
        options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus}
        if memory:
            options["memory"] = memory
        actor = await asyncio.to_thread(
            lambda: self._ray.remote(RunnerHost)
            .options(
                name=session, lifetime="detached", max_restarts=0, max_concurrency=100, scheduling_strategy="SPREAD",
                **options,
            )
            .remote(*host)
        )  # fmt: skip
        self._actors[session] = actor
        return dict(await actor.begin.remote())

    async def call_exchange(self, session: str, turn: int, after: int) -> dict[str, Any]:
        return dict(await (await self._actor(session)).exchange.remote(turn, after))

    async def call_command(self, session: str, number: int, message: dict[str, Any], keys: dict[str, Key]) -> list[str]:
        return list(await (await self._actor(session)).command.remote(number, message, keys))

    async def call_end(self, session: str, now: bool) -> int | None:
        code: int | None = await (await self._actor(session)).end.remote(now)
        return code

    async def call_kill(self, session: str) -> None:
        actor = await self._actor(session)
        self._actors.pop(session, None)
        await asyncio.to_thread(self._ray.kill, actor, no_restart=True)

    async def call_hash(self, key: Key) -> str:
        return await asyncio.to_thread(self._hashes.tree, key)

    async def call_copy(self, session: str, key: Key) -> dict[str, Any]:
        """Send a tree of files through Ray's object store; return {} or the {failure}."""
        actor = await self._actor(session)
        opened: dict[str, Any] = await actor.open_copy.remote(key)
        if "part" not in opened:
            return opened
        parent = Path(key["path"]).parent
        for name, _, _ in key["files"]:
            with (parent / name).open("rb") as file:
                offset = 0
                while (content := await asyncio.to_thread(file.read, CHUNK)) or offset == 0:
                    await actor.receive.remote(opened["part"], name, offset, content)
                    offset += len(content)
                    if not content:
                        break
        return dict(await actor.close_copy.remote(opened["part"], key))

    async def call_nodes(self) -> list[dict[str, Any]]:
        """Return every node of the cluster with its resources."""
        nodes = await asyncio.to_thread(self._ray.nodes)
        return [
            {"id": each["NodeID"], "address": each["NodeManagerAddress"], "name": each["NodeName"],
             "alive": each["Alive"], "cpus": each["Resources"].get("CPU", 0.0),
             "gpus": each["Resources"].get("GPU", 0.0)}
            for each in nodes
        ]  # fmt: skip

    async def _actor(self, session: str) -> Any:
        if session not in self._actors:
            try:
                self._actors[session] = await asyncio.to_thread(self._ray.get_actor, session, NAMESPACE)
            except ValueError:
                raise _NoActor("the cluster has no such runner any more") from None
        return self._actors[session]

    async def watch_head(self) -> None:
        """End the process when the head of the cluster does not answer: another one connects to the next head."""
        own = self._ray.get_runtime_context().get_node_id()
        while True:
            await asyncio.sleep(2.0)
            try:
                async with asyncio.timeout(HEAD_SECONDS):
                    nodes = await self.call_nodes()
            except Exception as error:
                print(f"the head of the Ray cluster does not answer: {_reason(error)}", file=sys.stderr)
                os._exit(1)
            if not any(each["alive"] and each["id"] == own for each in nodes):
                print("the Ray node of this machine has left its cluster", file=sys.stderr)
                os._exit(1)

    async def close(self) -> None:
        """End every actor: the web process is gone."""
        for actor in self._actors.values():
            with contextlib.suppress(Exception):
                self._ray.kill(actor, no_restart=True)


class _NoActor(Exception):
    pass


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:500]


async def serve(commands: BinaryIO, answers: BinaryIO) -> None:
    """Answer calls until the input ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), commands)
    settings = await receive_message(reader)
    try:
        ray = connect(settings.data["address"])
    except Exception as error:
        answers.write(Message("refused", {"text": _reason(error)}).encode())
        answers.flush()
        return
    bridge = Bridge(ray, answers)
    bridge.send(Message("connected", {"id": 0}))
    running = {asyncio.create_task(bridge.watch_head())}
    with contextlib.suppress(WireError, OSError):
        while True:
            call = await receive_message(reader)
            task = asyncio.create_task(bridge.answer(call))
            running.add(task)
            task.add_done_callback(running.discard)
    await bridge.close()
    if settings.data["address"] == LOCAL:
        await asyncio.to_thread(ray.shutdown)  # the cluster of this process


def main() -> None:
    pipes = message_pipes()
    try:
        asyncio.run(serve(*pipes))
    except Exception:
        traceback.print_exc()
    os._exit(0)


if __name__ == "__main__":
    main()
