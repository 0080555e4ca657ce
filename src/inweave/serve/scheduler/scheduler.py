"""Which waiting job a free device runs next.

    order    higher priority first; within a priority clients take turns (all of one account are one); then by age
    choice   of the jobs of the highest priority, the one that the device can begin soonest (see `costs`)
    bounds   other jobs overtake a job at most ``MAX_OVERTAKES`` times, and it never waits longer for a device that has
             its model and adapters loaded than a free device would need to load them
    training with several devices, at least one stays free for image jobs
    joining  a device that makes images of several jobs together takes those of its model and shape, in the same order;
             each overtakes the jobs before it, so that the device begins with those when the bound is reached

A single device follows the order, except that it runs jobs of the loaded model before it loads another (``LOAD_GAIN``).
The scheduler looks at the first ``WINDOW`` jobs of the queue. It has no access to the queue or the devices, so
`simulation` runs it with its own clock. A choice takes one pass over all devices; of those, each job is compared only
with devices that are free soon enough to be better, the soonest first.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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
    """The job to run. Without one, ``seconds`` until a job stops waiting for another device, one of ``devices``."""

    job: Candidate | None
    seconds: float | None = None
    devices: tuple[str, ...] = ()


class _Rules:
    """Which jobs a device may run: its role, and that training leaves one device free for image jobs."""

    def __init__(self, devices: Sequence[DeviceView]) -> None:
        self._devices = devices

    @cached_property
    def _image_devices(self) -> tuple[int, int]:
        """(devices that make images, how many of them are ready and do not train)."""
        images = [each for each in self._devices if each.takes("image_generation")]
        return len(images), sum(each.ready and not each.training for each in images)

    def allow(self, job: Candidate, device: DeviceView) -> bool:
        if not device.takes(job.kind):
            return False
        if job.kind != "train" or device.role is TrainingRole.TRAINING:
            return True
        count, spare = self._image_devices
        return count == 1 or spare > (device.ready and not device.training)


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
        rules = _Rules(devices)
        allowed = [job for job in candidates if rules.allow(job, device)]
        first = [job for job in allowed if job.priority == allowed[0].priority]
        if not first:
            return Choice(None)
        order = first
        if len(first) > 1:
            order = fair_order(first, [*(job for each in devices for job in each.jobs), *elsewhere])
        starts = {job.id: self.costs.start_seconds(job, device) for job in order}
        waits = self._waits(order, starts, device, devices, rules)
        free = [job for job in order if job.id not in waits]
        if not free:
            return Choice(None, min(rest for rest, _ in waits.values()), tuple({name for _, name in waits.values()}))
        single = not any(each.ready for each in devices if each is not device)
        chosen = self._soonest(free, starts, single)
        for job in free[: free.index(chosen)]:
            self._overtakes[job.id] += 1
        self._overtakes.pop(chosen.id, None)
        self._reservations.pop(chosen.id, None)
        return Choice(chosen)

    def join(
        self, candidates: Sequence[Candidate], device: DeviceView, devices: Sequence[DeviceView],
        elsewhere: Sequence[Candidate] = (),
    ) -> Choice:  # fmt: skip
        """Return the waiting job that joins those of a device; the arguments are those of `choose`."""
        self._forget(candidates)
        running = device.job
        if running is None or running.shape is None:
            return Choice(None)
        rules = _Rules(devices)
        allowed = [job for job in candidates if rules.allow(job, device)]
        first = [job for job in allowed if job.priority == allowed[0].priority]
        order = fair_order(first, [*(job for each in devices for job in each.jobs), *elsewhere])
        idle = [each for each in devices if each.ready and each.job is None and each is not device]
        before = list[Candidate]()
        for job in order:
            if any(rules.allow(job, each) and self.costs.start_seconds(job, each) < LOAD_GAIN for each in idle):
                continue  # it runs there at once
            same = device.mixed or all(job.stack == each.stack for each in device.jobs)
            if same and (job.model, job.shape) == (running.model, running.shape):
                for each in before:
                    self._overtakes[each.id] += 1
                self._overtakes.pop(job.id, None)
                self._reservations.pop(job.id, None)
                return Choice(job)
            if self._overtakes[job.id] >= MAX_OVERTAKES:
                break
            before.append(job)
        return Choice(None)

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
        rules = _Rules(devices)
        if not any(rules.allow(job, each) for each in ready if each.job is None):
            return "training must leave one device free for image jobs"
        return "it is starting"

    def _soonest(self, jobs: Sequence[Candidate], starts: Mapping[str, float], single: bool) -> Candidate:
        """Return the job that can start soonest, or the first one if little is saved or it was overtaken too often."""
        head = jobs[0]
        if self._overtakes[head.id] >= MAX_OVERTAKES:
            return head
        best = min(jobs, key=lambda job: starts[job.id])
        return best if starts[head.id] - starts[best.id] >= (LOAD_GAIN if single else GAIN) else head

    def _waits(
        self, jobs: Sequence[Candidate], starts: Mapping[str, float], device: DeviceView,
        devices: Sequence[DeviceView], rules: _Rules,
    ) -> dict[str, tuple[float, str]]:  # fmt: skip
        """Return the jobs that should wait for another device than this one, where they start in ``starts`` seconds.

        The values are how long to wait, and the name of that device.
        """
        now, latest, waits = self.clock(), max(starts.values()), dict[str, tuple[float, str]]()
        soon: list[tuple[float, int, DeviceView]] = []
        if latest >= GAIN:  # one that is free later is not better for any job
            near = [each for each in devices if each.job is None or each.free_at - now + GAIN <= latest]
            near = [each for each in near if each.ready and each is not device]
            ends = ((max(0.0, each.free_at - now) if each.job is not None else 0.0) for each in near)
            soon = sorted((end, place, near[place]) for place, end in enumerate(ends))
        for job in jobs:
            here = starts[job.id]
            better = self._better(job, here, soon, rules) if self._overtakes[job.id] < MAX_OVERTAKES else None
            if better is None:
                self._reservations.pop(job.id, None)
                continue
            start, other = better
            since, _ = self._reservations.setdefault(job.id, (now, other.name))
            if (rest := here - start - (now - since)) > 0:
                waits[job.id] = (rest, other.name)
        return waits

    def _better(
        self, job: Candidate, here: float, soon: Sequence[tuple[float, int, DeviceView]], rules: _Rules
    ) -> tuple[float, DeviceView] | None:
        """Return (its start, the device) where a job runs soonest, if that is sooner than ``here``."""
        best: tuple[float, int] | None = None
        chosen: tuple[float, DeviceView] | None = None
        start_seconds = self.costs.start_of(job)
        for end, place, each in soon:
            if end + GAIN > here or (best is not None and end > best[0]):
                break
            if not (each.takes(job.kind) if each.job is not None else rules.allow(job, each)):
                continue
            start = start_seconds(each)
            if best is None or (end + start, place) < best:
                best, chosen = (end + start, place), (start, each)
                if start == 0:
                    break  # the others are free later, or listed later
        return chosen if best is not None and best[0] + GAIN <= here else None

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
