"""What the scheduler needs to know of a waiting job."""

from __future__ import annotations

from dataclasses import dataclass

from inweave.serve.jobs.job import Job, Kind


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job with the model and the adapters (see `adapter_keys`) that its device has to hold."""

    id: str
    number: int
    kind: Kind
    model: str
    priority: int = 0
    client: str = ""
    adapters: tuple[str, ...] = ()


def candidate_of(job: Job) -> Candidate:
    """Return what the scheduler needs to know of a job."""
    adapters = () if job.kind == "train" else tuple(sorted(set(adapter_keys(job).values())))
    return Candidate(job.id, job.number, job.kind, job.model, job.priority, job.client, adapters)


def adapter_keys(job: Job) -> dict[str, str]:
    """Return what identifies the adapter of each reference at every worker: its content, else its id in a library."""
    files = job.request.get("lora_files", {})
    return {label: files.get(label, {}).get("sample") or entry for label, entry in job.request.get("loras", {}).items()}
