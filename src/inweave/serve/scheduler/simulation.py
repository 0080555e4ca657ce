"""A simulation of 1 to 1,000 runners with the scheduler of the worker; `inweave bench cluster` prints its figures.

    service     run, + read if the LoRA is not among the ``capacity`` that the runner used last, + load of the model if
                the runner is new
    failures    each node of ``runners_per_node`` runners fails after exponential times of mean ``node_hours``; the jobs
                of its runners wait again after ``lease_seconds``, and the runners are back, with nothing in memory,
                after ``restart_seconds`` or the lease, whichever is longer

A free runner asks for work when a job arrives, when a job ends and when a wait for another runner is over, as the
dispatchers do. If jobs wait for other runners that are free, those ask next. See `workload` for the jobs.
"""

from __future__ import annotations

import heapq
import random
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from inweave.serve.jobs.candidate import Candidate
from inweave.serve.scheduler.device import DeviceView
from inweave.serve.scheduler.scheduler import WINDOW, Scheduler
from inweave.serve.scheduler.workload import MODEL, Arrival, Case, Outcome, arrivals, outcome_of


def simulate(case: Case, jobs: Sequence[Arrival] | None = None) -> Outcome:
    """Run the jobs of a case to their end and return the figures."""
    return Simulation(case, arrivals(case) if jobs is None else jobs).run()


@dataclass(slots=True)
class _Runner:
    """A runner: what the scheduler sees, its LoRAs in the order of their last use, and its job."""

    view: DeviceView
    adapters: OrderedDict[str, None] = field(default_factory=OrderedDict)
    arrival: Arrival | None = None
    since: float = 0.0  # when its job was started
    start: float = 0.0  # seconds until its job could run
    turn: int = 0  # number of its job: events of others are void
    alive: bool = True


class Simulation:
    """One run of a case."""

    def __init__(self, case: Case, jobs: Sequence[Arrival]) -> None:
        self.case, self.jobs, self.outcome = case, jobs, outcome_of(jobs)
        self.now = 0.0
        self.scheduler = Scheduler(clock=lambda: self.now)
        self.scheduler.costs.observe_load(MODEL, case.load_seconds)
        self.scheduler.costs.observe_read(case.read_seconds)
        self._randomness = random.Random(case.seed + 1)
        names = [str(number) for number in range(case.runners)]
        self._runners = {name: _Runner(DeviceView(name, models=frozenset([MODEL]))) for name in names}
        self._views = [each.view for each in self._runners.values()]
        self._free = dict.fromkeys(names)  # in the order in which they became free
        self._waiting: list[tuple[int, Candidate]] = []  # by age
        self._first_starts: set[int] = set()
        self._ended = 0
        self._events: list[tuple[float, int, Callable[[], str | None]]] = []
        self._count = 0
        self._again = 0.0

    def run(self) -> Outcome:
        """Run every job to its end and return the figures."""
        self._at(self.jobs[0].at, lambda: self._arrive(0))
        if self.case.node_hours is not None:
            names, size = list(self._runners), self.case.runners_per_node
            for first in range(0, len(names), size):
                self._fail_later(names[first : first + size])
        while self._events and self._ended < len(self.jobs):
            self.now, _, event = heapq.heappop(self._events)
            self._assign(event())
        self.outcome.lost_jobs = len(self.jobs) - self._ended
        return self.outcome

    # events: each returns the name of the runner that asks for work first, if any

    def _at(self, at: float, event: Callable[[], str | None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, event))

    def _arrive(self, number: int) -> None:
        insort(self._waiting, (number, self.jobs[number].job))
        if number + 1 < len(self.jobs):
            self._at(self.jobs[number + 1].at, lambda: self._arrive(number + 1))

    def _end(self, name: str, turn: int) -> str | None:
        runner = self._runners[name]
        if runner.turn != turn or runner.arrival is None:
            return None  # its node failed
        seconds = self.now - runner.since
        self.scheduler.costs.observe_run(runner.arrival.job, seconds)
        self._ended += 1
        self.outcome.finished += self.outcome.covers(self.now)
        if self.outcome.covers(runner.arrival.at):
            self.outcome.busy += seconds
            self.outcome.overhead += runner.start
        runner.arrival = runner.view.job = None
        self._free[name] = None
        return name

    def _fail_later(self, names: Sequence[str]) -> None:
        hours = self.case.node_hours or 0.0
        self._at(self.now + self._randomness.expovariate(1 / (3600 * hours)), lambda: self._fail(names))

    def _fail(self, names: Sequence[str]) -> None:
        absence = max(self.case.lease_seconds, self.case.restart_seconds)
        self.outcome.failures += 1
        self.outcome.lost_time += absence * len(names)
        for name in names:
            runner = self._runners[name]
            runner.alive, runner.turn = False, runner.turn + 1
            runner.adapters.clear()
            self._free.pop(name, None)
            if runner.arrival is None:
                runner.view.ready = False  # the connection of a free runner ends at once
            else:
                self.outcome.reruns += 1
                self.outcome.lost_work += self.now - runner.since
        self._at(self.now + self.case.lease_seconds, lambda: self._miss(names))
        self._at(self.now + absence, lambda: self._return(names))

    def _miss(self, names: Sequence[str]) -> None:
        """Put back the jobs of runners whose lease ended."""
        for runner in (self._runners[name] for name in names):
            if runner.arrival is not None:
                insort(self._waiting, (runner.arrival.job.number, runner.arrival.job))
            runner.arrival = runner.view.job = None
            runner.view.ready = False
            runner.view.models = runner.view.adapters = frozenset()

    def _return(self, names: Sequence[str]) -> None:
        for name in names:
            self._runners[name].alive = self._runners[name].view.ready = True
            self._free[name] = None
        self._fail_later(names)

    # dispatch

    def _assign(self, first: str | None) -> None:
        """Have free runners ask for work, ``first`` before the others, until all that is left has to wait."""
        visited: set[str] = set()
        preferred: Sequence[str] = () if first is None else (first,)
        while self._waiting:
            name = next(
                (each for each in chain(preferred, self._free) if each in self._free and each not in visited), None
            )
            if name is None:
                return
            runner = self._runners[name]
            candidates = [job for _, job in self._waiting[:WINDOW]]
            choice = self.scheduler.choose(candidates, runner.view, self._views)
            if choice.job is not None:
                self._start(name, runner, choice.job)
                preferred = ()
                continue
            visited.add(name)
            preferred = choice.devices
            if not any(each in self._free and each not in visited for each in preferred):
                self._ask_again(choice.seconds)
                return

    def _ask_again(self, seconds: float | None) -> None:
        """Have free runners ask again when the first wait is over, unless they ask sooner anyway."""
        if seconds is not None and not self.now < self._again <= self.now + seconds + 1e-6:
            self._again = self.now + seconds + 1e-6
            self._at(self._again, lambda: None)

    def _start(self, name: str, runner: _Runner, job: Candidate) -> None:
        arrival, case = self.jobs[job.number], self.case
        self._waiting.remove((job.number, job))
        del self._free[name]
        hit = runner.view.adapters.issuperset(job.adapters)
        loaded = MODEL in runner.view.models
        runner.start = (0.0 if hit else case.read_seconds) + (0.0 if loaded else case.load_seconds)
        if self.outcome.covers(arrival.at) and job.number not in self._first_starts:
            self._first_starts.add(job.number)
            self.outcome.started += 1
            self.outcome.hits += hit
            self.outcome.waits.append(self.now - arrival.at)
        for adapter in job.adapters:
            runner.adapters[adapter] = None
            runner.adapters.move_to_end(adapter)
        while len(runner.adapters) > case.capacity:
            runner.adapters.popitem(last=False)
        runner.view.adapters, runner.view.models = frozenset(runner.adapters), frozenset([MODEL])
        runner.arrival, runner.since, runner.turn = arrival, self.now, runner.turn + 1
        runner.view.job = job
        runner.view.free_at = self.now + self.scheduler.costs.run_seconds(job)
        turn = runner.turn
        self._at(self.now + runner.start + arrival.run, lambda: self._end(name, turn))
