"""What the scheduler needs to know of a waiting job."""

from __future__ import annotations

from dataclasses import dataclass

from inweave.serve.jobs.job import Job, Kind


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job with the model and the adapters (ids of the library) that its device has to hold."""

    id: str
    number: int
    kind: Kind
    model: str
    priority: int = 0
    client: str = ""
    adapters: tuple[str, ...] = ()


def candidate_of(job: Job) -> Candidate:
    """Return what the scheduler needs to know of a job."""
    adapters = () if job.kind == "train" else tuple(sorted(set(job.request.get("loras", {}).values())))
    return Candidate(job.id, job.number, job.kind, job.model, job.priority, job.client, adapters)
