"""The runners of a worker in a cluster: as many as its queue needs.

    target = running + waiting jobs, at least ``min_runners``, at most ``max_runners`` (default: one for each device)

Missing runners are placed at once. A runner without a job for ``idle_seconds`` ends if nothing waits, and so does one
that finds no free device while there are more runners than devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inweave.serve.cluster.client import ClusterClient, UnreachableError
from inweave.serve.cluster.endpoint import Placement, RayEndpoint, node_name
from inweave.serve.engine.assignment import Assignments, DeviceSlot
from inweave.serve.engine.contract import RunnerEndpoint
from inweave.serve.engine.dispatcher import Dispatcher
from inweave.serve.engine.wire import WireError
from inweave.serve.jobs.signals import JobSignals
from inweave.serve.jobs.store import JobStore
from inweave.serve.scheduler.device import TrainingRole
from inweave.serve.settings import ServeSettings

log = logging.getLogger("inweave.serve")
NODES_SECONDS = 2.0
GRACE = 5.0
#: makes the dispatcher of an endpoint; the device of its runner is a GPU or a CPU
Make = Callable[[RunnerEndpoint, DeviceSlot, str | None], Dispatcher]


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster."""

    id: str
    name: str
    alive: bool
    cpus: float
    gpus: float


@dataclass(slots=True)
class Member:
    """A runner with its dispatcher."""

    endpoint: RayEndpoint
    dispatcher: Dispatcher
    task: asyncio.Task[None]
    used_at: float  # when it had a job last, on the monotonic clock
    leaving: bool = False


class Fleet:
    """Places runners and ends them; ``dispatchers``: the list that the service shows, kept up to date here."""

    def __init__(
        self, settings: ServeSettings, witness: str, store: JobStore, signals: JobSignals, assignments: Assignments,
        dispatchers: list[Dispatcher], make: Make,
    ) -> None:  # fmt: skip
        assert settings.cluster is not None
        self._settings, self._witness, self._store, self._signals = settings, witness, store, signals
        self._assignments, self._dispatchers, self._make = assignments, dispatchers, make
        self._client = ClusterClient(settings.cluster)
        self._members: list[Member] = []
        self._numbers = itertools.count(1)
        self._tasks: list[asyncio.Task[Any]] = []
        self.nodes: list[Node] = []

    async def run(self) -> None:
        """Keep the number of runners right until `stop`."""
        self._tasks = [asyncio.create_task(self._client.run()), asyncio.create_task(self._refresh())]
        while True:
            try:
                await self._scale()
            except (sqlite3.Error, OSError) as error:  # the disk is full, or the database restarts
                log.error("the number of runners stays: %s", error)
            await self._signals.wait_for_work(1.0)

    @property
    def reason(self) -> str:
        """Why no runner is ready; empty if jobs are taken without one."""
        if self._client.reason:
            return self._client.reason
        if self._settings.min_runners == 0:
            return ""  # a job waits for its runner
        if not self._members:
            return "runners are being placed"
        each = self._members[0]
        return each.dispatcher.reason if each.endpoint.placed else each.endpoint.reason

    def reason_of(self, dispatcher: Dispatcher) -> str:
        """Return why a runner is not ready."""
        for each in self._members:
            if each.dispatcher is dispatcher and not each.endpoint.placed:
                return each.endpoint.reason
        return dispatcher.reason

    async def _refresh(self) -> None:
        while True:
            with contextlib.suppress(UnreachableError, WireError):
                rows = await self._client.call("nodes")
                self.nodes = [
                    Node(each["id"], node_name(each["address"], each["id"]), each["alive"], each["cpus"], each["gpus"])
                    for each in rows
                ]
                self._signals.work()
            await asyncio.sleep(NODES_SECONDS)

    async def _scale(self) -> None:
        waiting = await asyncio.to_thread(lambda: 0 if self._store.paused else self._store.count("queued"))
        now, members = time.monotonic(), [each for each in self._members if not each.leaving]
        for each in members:
            if each.dispatcher.current is not None or each.dispatcher.status in ("starting", "loading"):
                each.used_at = now
        if not self.nodes:
            return  # which devices there are is unknown so far
        capacity = self._settings.max_runners or self.devices
        running = sum(each.dispatcher.current is not None for each in members)
        target = min(max(running + waiting, self._settings.min_runners), capacity)
        for _ in range(target - len(members)):
            self._add()
        spare = len(members) - max(self._settings.min_runners, target if waiting else 0)
        homeless = [each for each in members if not each.endpoint.placed][: max(0, len(members) - capacity)]
        idle = [each for each in members if now - each.used_at > self._settings.idle_seconds]
        for each in [*homeless, *idle[: max(0, spare)]]:
            each.leaving = True
            self._tasks.append(asyncio.create_task(self._remove(each)))
        self._tasks = [each for each in self._tasks if not each.done()]

    @property
    def gpus(self) -> bool:
        """Whether runners use GPUs: those of the cluster, unless the settings say CPU."""
        kinds = self._settings.devices
        return kinds == ("cuda",) or (not kinds and any(each.gpus for each in self.nodes if each.alive))

    @property
    def devices(self) -> int:
        """How many runners have room on the nodes of the cluster."""
        alive = [each for each in self.nodes if each.alive]
        if self.gpus:
            return sum(int(each.gpus) for each in alive)
        return sum(math.floor(each.cpus / self._cpus) for each in alive)

    @property
    def _cpus(self) -> float:
        """The CPUs that Ray reserves for a runner."""
        known = [each.cpus for each in self.nodes if each.alive and each.cpus >= 1]
        return self._settings.runner_cpus or (1.0 if self.gpus else min(known, default=1.0))

    def _add(self) -> None:
        settings = self._settings
        memory = int(settings.memory_gb * 1024**3) if settings.memory_gb is not None and not self.gpus else None
        placement = Placement(
            self._cpus, 1.0 if self.gpus else 0.0, settings.node_cache, int(settings.node_cache_gb * 1e9),
            self._witness, memory,
        )  # fmt: skip
        slot = self._assignments.add(f"runner-{next(self._numbers)}")

        def placed() -> None:
            slot.view.role = TrainingRole.MIXED if endpoint.shares else TrainingRole.IMAGES
            if not endpoint.shares:
                log.warning(
                    "%s on %s does not see %s and trains nothing: mount the folder there under the same path, or name "
                    "one that all nodes share with --shared", slot.view.name, endpoint.node, Path(self._witness).parent,
                )  # fmt: skip

        endpoint = RayEndpoint(self._client, placement, placed)
        dispatcher = self._make(endpoint, slot, "cuda" if self.gpus else "cpu")
        self._dispatchers.append(dispatcher)
        self._members.append(Member(endpoint, dispatcher, asyncio.create_task(dispatcher.run()), time.monotonic()))

    async def _remove(self, member: Member, seconds: float = 0.0) -> None:
        member.leaving = True
        await member.dispatcher.drain(seconds)
        await asyncio.wait({member.task}, timeout=GRACE)  # it ends by itself
        member.task.cancel()
        for error in await asyncio.gather(member.task, return_exceptions=True):
            if isinstance(error, Exception):
                log.error("a runner had failed: %s", error)
        self._assignments.remove(member.dispatcher.slot)
        self._members.remove(member)
        self._dispatchers.remove(member.dispatcher)

    async def stop(self, seconds: float) -> None:
        """End every runner; running jobs have ``seconds``."""
        await asyncio.gather(*(self._remove(each, seconds) for each in [*self._members] if not each.leaving))
        await self._client.close()  # first: a client that is cancelled kills its bridge
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
