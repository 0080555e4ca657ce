"""Events of a running job on their way into the store: images become files, or part of the event."""

from __future__ import annotations

import asyncio
import base64

from inweave.serve.jobs.errors import StoreLost
from inweave.serve.jobs.job import Event, Job
from inweave.serve.jobs.store import JobStore


async def record(store: JobStore, job: Job, event: Event, files: list[str]) -> None:
    """Store an event, and add the file of an image to ``files``.

    A database or a store of images that does not answer is waited for; a disk that refuses raises the error that ends
    the job.
    """
    stored, again = None, False
    while True:
        try:
            if stored is None:
                stored = await asyncio.to_thread(_with_stored_image, store, job, event, files)
            else:
                await asyncio.to_thread(store.append, job.id, stored, lease=job.lease, again=again)
                return
        except StoreLost:
            again = stored is not None
            await asyncio.sleep(0.5)


def _with_stored_image(store: JobStore, job: Job, event: Event, files: list[str]) -> Event:
    """Return the event to store: images of a result become files, previews are part of the event."""
    if event.image is None:
        return event
    data = dict(event.data)
    # a process that has lost the job may still write: not over the files of a later attempt
    suffix = ".png" if job.attempts <= 1 or not store.shared else f"-{job.attempts}.png"
    if event.type == "image":
        data["file"] = f"{data['index']}{suffix}"
        store.files.write(job.id, data["file"], event.image)
        files.append(data["file"])
    elif event.type == "sample":  # a run has many of them, and readers load each one again and again
        name = f"{data['step']:06d}-{data['index']}{suffix}"
        store.files.write(job.id, name, event.image)
        data |= {"file": name, "url": f"/v1/jobs/{job.id}/files/{name}"}
    else:
        data |= {"image": base64.b64encode(event.image).decode(), "format": "png"}
    return Event(event.type, data)
