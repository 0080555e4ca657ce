"""What the scheduler needs to know of a waiting job.

`shape` is what image jobs of one model have in common that may share a batch: the size that they ask for, if that alone
decides it; `stack` are their LoRAs with strengths, as written. A job of several passes has none, nor one that was
started before: it may have killed its process, and would take others with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from inweave.serve.jobs.job import Job, Kind


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job, with the model and adapters (`adapter_keys`) that its device has to hold; ``client`` takes turns."""

    id: str
    number: int
    kind: Kind
    model: str
    priority: int = 0
    client: str = ""
    adapters: tuple[str, ...] = ()
    shape: tuple[int | None, int | None] | None = None
    stack: str = ""


def candidate_of(job: Job) -> Candidate:
    """Return what the scheduler needs to know of a job."""
    adapters = () if job.kind == "train" else tuple(sorted(set(adapter_keys(job).values())))
    # all clients of one account take its turns: a client may call itself anything
    client = f"account {job.account}" if job.account else f"client {job.client}"
    return Candidate(job.id, job.number, job.kind, job.model, job.priority, client, adapters, _shape(job), _stack(job))


def _stack(job: Job) -> str:
    if job.kind == "train":
        return ""
    loras = job.request.get("config", {}).get("loras") or []
    return json.dumps([sorted(adapter_keys(job).items()), loras], sort_keys=True, default=str)


def _shape(job: Job) -> tuple[int | None, int | None] | None:
    config = job.request.get("config", {})
    passes = job.request.get("sheet") or config.get("upscale") or config.get("outpaint")
    if job.kind == "train" or job.attempts > 0 or passes:
        return None
    size = config.get("width"), config.get("height")
    return size if job.kind == "image_generation" or None not in size else None


def adapter_keys(job: Job) -> dict[str, str]:
    """Return what identifies the adapter of each reference at every worker: its content, else its id in a library."""
    files = job.request.get("lora_files", {})
    return {label: files.get(label, {}).get("sample") or entry for label, entry in job.request.get("loras", {}).items()}
