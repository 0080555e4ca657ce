"""Waiting inside the web process: a cancellation is never dropped, at any moment."""

from __future__ import annotations

import asyncio
from pathlib import Path

from inweave.serve.jobs import signals
from inweave.serve.jobs.signals import JobSignals


def test_a_cancellation_that_comes_with_the_event_is_not_dropped() -> None:
    """Otherwise a job that ends while it is cancelled keeps its watcher, which kills the model process later."""

    async def outcome(turns: int) -> bool:
        waiters = JobSignals()
        task = asyncio.create_task(waiters.wait_for_change("job", 10.0))
        await asyncio.sleep(0.01)
        waiters.changed("job")
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.cancel():
            return True  # it had ended by then
        await asyncio.wait([task])
        return task.cancelled()

    assert all(asyncio.run(outcome(turns)) for turns in range(8))


def test_an_event_that_does_not_come_ends_the_wait() -> None:
    async def waits() -> list[bool]:
        event = asyncio.Event()
        late = await signals.wait_seconds(event, 0.01)
        event.set()
        return [late, await signals.wait_seconds(event, 0.01)]

    assert asyncio.run(waits()) == [False, True]


def test_nothing_waits_in_the_way_that_drops_cancellations() -> None:
    """`asyncio.wait_for` of Python 3.11 drops them; `asyncio.timeout` does not."""
    for path in Path(signals.__file__).parents[1].rglob("*.py"):
        assert "asyncio.wait_for(" not in path.read_text(), path.name
