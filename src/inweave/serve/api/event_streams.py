"""Events of a job as server-sent events: numbered, resumable, for any number of readers.

A reader that comes back with `Last-Event-ID` gets the events it missed and then the following ones, so that all pieces
together are the stream of a reader that never left. Readers only read the store: a slow one does not delay any other.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable

from sse_starlette import EventSourceResponse, ServerSentEvent

from inweave.errors import ConfigError, Problem
from inweave.serve.jobs.job import Job, StoredEvent
from inweave.serve.service import Service

HEARTBEAT = 10
Translate = Callable[[Job, StoredEvent], Iterable[ServerSentEvent]]


def event_stream(service: Service, job: Job, after: int, translate: Translate) -> EventSourceResponse:
    """Send everything that happens to ``job`` after event ``after``, up to its end."""
    return EventSourceResponse(_events(service, job, after, translate), ping=HEARTBEAT)


async def _events(service: Service, job: Job, after: int, translate: Translate) -> AsyncIterator[ServerSentEvent]:
    async for event in service.jobs.follow(job.id, after):
        for sent in await service.jobs.patiently(_all, translate, job, event):
            yield sent


def _all(translate: Translate, job: Job, event: StoredEvent) -> list[ServerSentEvent]:
    return [*translate(job, event)]


def event_number(text: str | None) -> int:
    """Return the number in a `Last-Event-ID` header; 0 without one."""
    if text is None or text == "":
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > 15:
        raise ConfigError(Problem("Last-Event-ID", f"expected the number of an event, got {text[:20]!r}"))
    return int(text)


def native(job: Job, event: StoredEvent) -> Iterable[ServerSentEvent]:
    """Yield an event in the form of the native API."""
    data = json.dumps({**event.data, "job": job.id, "event": event.number, "type": event.type})
    yield ServerSentEvent(data, event=event.type, id=str(event.number))
