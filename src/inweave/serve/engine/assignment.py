"""Which dispatcher runs which job: one scheduler over all devices of a worker, fed with what their runners report."""

from __future__ import annotations

from collections.abc import Sequence

from inweave.serve.engine.contract import Residency
from inweave.serve.jobs.candidate import Candidate, candidate_of
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

    def add(self, name: str, role: TrainingRole = TrainingRole.MIXED) -> Place:
        """Return the place of another device."""
        view = DeviceView(name, role, ready=False)
        self.devices.append(view)
        return Place(self, view)

    def claim(self, view: DeviceView) -> tuple[Job | None, float | None]:
        """Start the job that a device runs next; without one, return the seconds after which to ask again."""
        choice = Choice(None)

        def chosen(candidates: Sequence[Candidate]) -> str | None:
            nonlocal choice
            choice = self.scheduler.choose(candidates, view, self.devices)
            if choice.job is None:
                return None
            view.job = choice.job
            view.free_at = self.scheduler.clock() + self.scheduler.costs.run_seconds(choice.job)
            return choice.job.id

        job = self._store.claim(chosen, WINDOW)
        if job is None:
            view.job = None
        return job, choice.seconds

    def reasons(self, jobs: Sequence[Job]) -> dict[str, str]:
        """Return why each of these jobs still waits."""
        if self._store.paused:
            return {job.id: "the queue is paused" for job in jobs}
        return {job.id: self.scheduler.reason(candidate_of(job), self.devices) for job in jobs}


class Place:
    """One device in the assignments, kept up to date by its dispatcher."""

    def __init__(self, assignments: Assignments, view: DeviceView) -> None:
        self._assignments, self.view = assignments, view
        self._models: dict[str, str] = {}  # location -> name, of every model that a job used
        self._adapters: dict[str, str] = {}  # path -> id

    @property
    def shared(self) -> bool:
        """Whether the worker has other devices."""
        return len(self._assignments.devices) > 1

    def claim(self) -> tuple[Job | None, float | None]:
        """See `Assignments.claim`."""
        return self._assignments.claim(self.view)

    def ended(self, seconds: float) -> None:
        """Record that the job of the device ended after ``seconds``."""
        if self.view.job is not None:
            self._assignments.scheduler.costs.observe_run(self.view.job, seconds)
        self.view.job = None

    def lost(self) -> None:
        """Record that the runner is gone, and with it everything that it held."""
        self.view.job, self.view.ready = None, False
        self.view.models = self.view.adapters = frozenset()

    def sends(self, job: Job, model: str, adapters: dict[str, str]) -> None:
        """Remember the names of the files of a job: ``model`` is a location, ``adapters`` maps references to paths."""
        self._models[model] = job.model
        ids = job.request.get("loras", {})
        self._adapters |= {path: ids[label] for label, path in adapters.items() if label in ids}

    def holds(self, resident: Residency) -> None:
        """Record what the runner holds now."""
        self.view.models = frozenset(self._models[each] for each in resident.models if each in self._models)
        self._adapters = {path: self._adapters[path] for path in resident.adapters if path in self._adapters}
        self.view.adapters = frozenset(self._adapters.values())

    def loaded(self, name: str, location: str, seconds: float) -> None:
        """Record that the device holds a model now, which took ``seconds`` to load."""
        self._models[location] = name
        self.view.models |= {name}
        self._assignments.scheduler.costs.observe_load(name, seconds)

    def read(self, seconds: float) -> None:
        """Record how long an adapter took that the device did not hold."""
        self._assignments.scheduler.costs.observe_read(seconds)
