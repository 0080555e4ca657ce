"""Events of a job as server-sent events: numbered, resumable, for any number of readers.

A reader that comes back with `Last-Event-ID` gets what it missed and then what follows, so that all pieces together are
the stream of a reader that never left. Readers only read the store: a slow one delays nobody.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable

from sse_starlette import EventSourceResponse, ServerSentEvent

from inweave.serve.jobs.job import FINAL, Job, StoredEvent
from inweave.serve.service import Service

HEARTBEAT = 10
Translate = Callable[[Job, StoredEvent], Iterable[ServerSentEvent]]


def event_stream(service: Service, job: Job, after: int, translate: Translate) -> EventSourceResponse:
    """Everything that happens to ``job`` after event ``after``, up to its end."""
    return EventSourceResponse(_events(service, job, after, translate), ping=HEARTBEAT)


async def _events(service: Service, job: Job, after: int, translate: Translate) -> AsyncIterator[ServerSentEvent]:
    async for event in follow(service, job, after):
        for sent in translate(job, event):
            yield sent


async def follow(service: Service, job: Job, after: int = 0) -> AsyncIterator[StoredEvent]:
    """Stored events of a job as they come, up to the final one."""
    while True:
        change = asyncio.ensure_future(service.signals.wait_for_change(job.id, 1.0))
        try:
            events = await asyncio.to_thread(service.store.events, job.id, after)
            for event in events:
                after = event.number
                yield event
                if event.type in FINAL:
                    return
            if not events:
                current = await asyncio.to_thread(service.store.job, job.id)
                if current.expired or (
                    current.final and not await asyncio.to_thread(service.store.events, job.id, after)
                ):
                    return
                await change
        finally:
            change.cancel()


def native(job: Job, event: StoredEvent) -> Iterable[ServerSentEvent]:
    """An event as the native API sends it."""
    data = json.dumps({**event.data, "job": job.id, "event": event.number, "type": event.type})
    yield ServerSentEvent(data, event=event.type, id=str(event.number))
