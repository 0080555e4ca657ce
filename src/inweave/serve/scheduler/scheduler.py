"""Which waiting job a free device runs next.

    order    higher priority first; within a priority clients take turns; a client's own jobs by age
    choice   of the jobs of the highest priority, the one that the device can begin soonest (see `costs`)
    bounds   other jobs overtake a job at most ``MAX_OVERTAKES`` times, and it never waits longer for a device that has
             its model and adapters loaded than a free device would need to load them
    training with several devices, at least one stays free for image jobs

A single device follows the order, except that it runs jobs of the loaded model before it loads another (``LOAD_GAIN``).
The scheduler looks at the first ``WINDOW`` jobs of the queue. It has no access to the queue or the devices, so a
simulation can run it with its own clock.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inweave.serve.jobs.candidate import Candidate
from inweave.serve.scheduler.costs import Costs
from inweave.serve.scheduler.device import DeviceView, TrainingRole

WINDOW = 64
MAX_OVERTAKES = 8
#: a single device leaves the order only if it saves this many seconds
LOAD_GAIN = 0.5
#: the same for one of several devices
GAIN = 0.001


@dataclass(frozen=True, slots=True)
class Choice:
    """The job to run. Without one, ``seconds`` until a job stops waiting for another device."""

    job: Candidate | None
    seconds: float | None = None


class Scheduler:
    """Decides for all devices of a worker; the caller makes sure that one decision is made at a time."""

    def __init__(self, costs: Costs | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.costs = costs or Costs()
        self.clock = clock
        self._overtakes: Counter[str] = Counter()
        self._reservations: dict[str, tuple[float, str]] = {}  # job -> (since when it waits for a device, that device)

    def choose(
        self, candidates: Sequence[Candidate], device: DeviceView, devices: Sequence[DeviceView],
        elsewhere: Sequence[Candidate] = (),
    ) -> Choice:  # fmt: skip
        """Return the job that a free device runs next.

        Args:
            candidates: waiting jobs, by priority and age.
            device: the free one.
            devices: those of this worker.
            elsewhere: jobs that other workers of the same queue run.
        """
        self._forget(candidates)
        allowed = [job for job in candidates if self._allowed(job, device, devices)]
        first = [job for job in allowed if job.priority == allowed[0].priority]
        order = fair_order(first, [*(each.job for each in devices if each.job is not None), *elsewhere])
        if not order:
            return Choice(None)
        now = self.clock()
        others = [each for each in devices if each is not device and each.ready]
        waits = {job.id: self._wait(job, device, others, devices, now) for job in order}
        free = [job for job in order if waits[job.id] is None]
        if not free:
            return Choice(None, min(seconds for seconds in waits.values() if seconds is not None))
        chosen = self._soonest(free, device, single=not others)
        for job in free[: free.index(chosen)]:
            self._overtakes[job.id] += 1
        self._overtakes.pop(chosen.id, None)
        self._reservations.pop(chosen.id, None)
        return Choice(chosen)

    def reason(self, job: Candidate, devices: Sequence[DeviceView]) -> str:
        """Return why a job still waits."""
        suited = [each for each in devices if each.takes(job.kind)]
        if not suited:
            return "no device of this worker takes jobs of this kind"
        ready = [each for each in suited if each.ready]
        if not ready:
            return "no device is ready"
        if job.id in self._reservations:
            return f"{self._reservations[job.id][1]} has its model and LoRAs loaded and will be free soon"
        if all(each.job is not None for each in ready):
            return "every device is busy" if len(ready) > 1 else "the device is busy"
        if not any(self._allowed(job, each, devices) for each in ready if each.job is None):
            return "training must leave one device free for image jobs"
        return "it is starting"

    def _soonest(self, jobs: Sequence[Candidate], device: DeviceView, single: bool) -> Candidate:
        """Return the job that can start soonest, or the first one if little is saved or it was overtaken too often."""
        head = jobs[0]
        if self._overtakes[head.id] >= MAX_OVERTAKES:
            return head
        costs = {job.id: self.costs.start_seconds(job, device) for job in jobs}
        best = min(jobs, key=lambda job: costs[job.id])
        return best if costs[head.id] - costs[best.id] >= (LOAD_GAIN if single else GAIN) else head

    def _wait(
        self, job: Candidate, device: DeviceView, others: Sequence[DeviceView], devices: Sequence[DeviceView],
        now: float,
    ) -> float | None:  # fmt: skip
        """Return how long a job should wait for a better device than this one; None if it should not."""
        here = self.costs.start_seconds(job, device)
        better = [
            (max(0.0, each.free_at - now) if each.job is not None else 0.0, self.costs.start_seconds(job, each), each)
            for each in others
            if each.takes(job.kind) and (each.job is not None or self._allowed(job, each, devices))
        ]
        soonest = min(better, key=lambda each: each[0] + each[1], default=None)
        if soonest is None or soonest[0] + soonest[1] + GAIN > here or self._overtakes[job.id] >= MAX_OVERTAKES:
            self._reservations.pop(job.id, None)
            return None
        since, _ = self._reservations.setdefault(job.id, (now, soonest[2].name))
        rest = here - soonest[1] - (now - since)
        return rest if rest > 0 else None

    @staticmethod
    def _allowed(job: Candidate, device: DeviceView, devices: Sequence[DeviceView]) -> bool:
        if not device.takes(job.kind):
            return False
        if job.kind != "train" or device.role is TrainingRole.TRAINING:
            return True
        images = [each for each in devices if each.takes("image_generation")]
        return len(images) == 1 or any(each.ready and not each.training for each in images if each is not device)

    def _forget(self, candidates: Sequence[Candidate]) -> None:
        """Drop what is known of jobs that were cancelled."""
        known = {job.id for job in candidates}
        self._overtakes = Counter({job: count for job, count in self._overtakes.items() if job in known})
        self._reservations = {job: since for job, since in self._reservations.items() if job in known}


def fair_order(jobs: Sequence[Candidate], running: Sequence[Candidate] = ()) -> list[Candidate]:
    """Return jobs of one priority in an order in which clients take turns; running jobs count as turns."""
    turns = Counter(job.client for job in running)
    ranked = []
    for job in sorted(jobs, key=lambda each: each.number):
        ranked.append((turns[job.client], job.number, job))
        turns[job.client] += 1
    return [job for _, _, job in sorted(ranked, key=lambda each: each[:2])]
