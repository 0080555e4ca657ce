"""Which device runs which job: one scheduler for all devices of a worker, kept current by their dispatchers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from inweave.serve.engine.contract import Residency
from inweave.serve.jobs.candidate import Candidate, adapter_keys, candidate_of
from inweave.serve.jobs.job import Job
from inweave.serve.jobs.store import JobStore
from inweave.serve.scheduler.device import DeviceView, TrainingRole
from inweave.serve.scheduler.scheduler import WINDOW, Choice, Scheduler


class Assignments:
    """The devices of a worker and the scheduler that they share. Safe for threads: the store's lock guards it."""

    def __init__(self, store: JobStore, scheduler: Scheduler | None = None) -> None:
        self._store = store
        self.scheduler = scheduler or Scheduler()
        self.devices: list[DeviceView] = []
        self.losses: Counter[str] = Counter()  # job -> runners that it had and that were lost

    def add(self, name: str, role: TrainingRole = TrainingRole.MIXED) -> DeviceSlot:
        """Register another device and return its slot."""
        view = DeviceView(name, role, ready=False)
        self.devices.append(view)
        return DeviceSlot(self, view)

    def remove(self, slot: DeviceSlot) -> None:
        """Forget a device that takes no more jobs."""
        self.devices = [each for each in self.devices if each is not slot.view]

    def claim(self, view: DeviceView) -> tuple[Job | None, float | None]:
        """Start the job that a device runs next; without one, return the seconds after which to ask again.

        Of a device that runs jobs, it is one that joins them.
        """
        choice, choose = Choice(None), self.scheduler.choose if view.job is None else self.scheduler.join

        def chosen(candidates: Sequence[Candidate]) -> str | None:
            nonlocal choice
            choice = choose(candidates, view, self.devices, self._store.running_elsewhere())
            if choice.job is None:
                return None
            view.add(choice.job)
            end = self.scheduler.clock() + self.scheduler.costs.run_seconds(choice.job)
            view.free_at = end if not view.joined else max(view.free_at, end)
            return choice.job.id

        try:
            job = self._store.claim(chosen, WINDOW)
        except BaseException:
            if choice.job is not None:
                view.remove(choice.job.id)
            raise
        if job is None and choice.job is not None:
            view.remove(choice.job.id)
        return job, choice.seconds

    def reasons(self, jobs: Sequence[Job]) -> dict[str, str]:
        """Return why each of these jobs still waits."""
        if self._store.paused:
            return {job.id: "the queue is paused" for job in jobs}
        return {job.id: self.scheduler.reason(candidate_of(job), self.devices) for job in jobs}


class DeviceSlot:
    """What the scheduler knows of one device, kept up to date by its dispatcher."""

    def __init__(self, assignments: Assignments, view: DeviceView) -> None:
        self._assignments, self.view = assignments, view
        self._models: dict[str, str] = {}  # location -> name, of every model that a job used
        self._adapters: dict[str, str] = {}  # path -> id
        self._references: dict[str, str] = {}  # path -> what the last job called it

    @property
    def loras(self) -> tuple[str, ...]:
        """The LoRAs in memory, by what jobs called them."""
        return tuple(sorted({self._references[path] for path in self._adapters if path in self._references}))

    @property
    def shared(self) -> bool:
        """Whether the worker has other devices."""
        return len(self._assignments.devices) > 1

    def claim(self) -> tuple[Job | None, float | None]:
        """See `Assignments.claim`."""
        return self._assignments.claim(self.view)

    def count_loss(self, job: str) -> int:
        """Return how many runners of a job were lost, with this one."""
        self._assignments.losses[job] += 1
        return self._assignments.losses[job]

    def record_end(self, job: str, seconds: float) -> None:
        """Record that a job of the device ended after ``seconds``."""
        if (ended := self.view.remove(job)) is not None:
            self._assignments.scheduler.costs.observe_run(ended, seconds)

    def release(self, job: str) -> None:
        """Record that the device does not run a job that it claimed."""
        self.view.remove(job)

    def record_death(self) -> None:
        """Record that the runner died, and everything that it had loaded with it."""
        self.view.job, self.view.ready = None, False
        self.view.joined.clear()
        self.view.models = self.view.adapters = frozenset()
        self._adapters, self._references = {}, {}

    def record_request(self, job: Job, model: str, adapters: dict[str, str]) -> None:
        """Remember which model and adapters the paths of a job belong to; ``adapters`` maps references to paths."""
        self._models[model] = job.model
        ids = adapter_keys(job)
        self._adapters |= {path: ids[label] for label, path in adapters.items() if label in ids}
        self._references |= {path: label for label, path in adapters.items()}

    def record_residency(self, residency: Residency) -> None:
        """Record which models and adapters the runner has in memory now."""
        self.view.models = frozenset(self._models[each] for each in residency.models if each in self._models)
        self._adapters = {path: self._adapters[path] for path in residency.adapters if path in self._adapters}
        self._references = {path: self._references[path] for path in self._adapters}
        self.view.adapters = frozenset(self._adapters.values())

    def record_load(self, name: str, location: str, seconds: float) -> None:
        """Record that the device has loaded a model, which took ``seconds``."""
        self._models[location] = name
        self.view.models |= {name}
        self._assignments.scheduler.costs.observe_load(name, seconds)

    def record_read(self, seconds: float) -> None:
        """Record how long it took to read an adapter that was not in memory."""
        self._assignments.scheduler.costs.observe_read(seconds)
