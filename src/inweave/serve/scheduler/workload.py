"""What a simulation runs: a skewed load of jobs, their ideal execution, and the figures of a run.

arrivals    Poisson, ``load`` x runners / mean run time a second; LoRA k of ``loras`` with weight 1 / k^``exponent``
run times   drawn from ``run_seconds``
ideal       the same jobs on runners that need no time to start and never fail, the oldest job first
figures     of the middle third of the arrivals: the runners hold LoRAs, and the queue does not run empty yet
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from inweave.errors import ConfigError, Problem
from inweave.serve.jobs.candidate import Candidate

MODEL = "model"
_POSITIVE = (
    "runners", "load", "jobs", "loras", "capacity", "clients", "runners_per_node", "node_hours"
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is simulated; ``capacity``: LoRAs in the memory of a runner; ``node_hours``: mean time between failures."""

    runners: int = 100
    load: float = 0.8
    jobs: int = 20_000
    loras: int = 10_000
    exponent: float = 1.0
    capacity: int = 100
    clients: int = 7
    run_seconds: Sequence[float] = (2.5, 5.0, 7.5)
    read_seconds: float = 0.1
    load_seconds: float = 10.0
    runners_per_node: int = 8
    node_hours: float | None = None
    lease_seconds: float = 10.0
    restart_seconds: float = 30.0
    seed: int = 0

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in _POSITIVE}
        problems = [Problem(name, f"must be positive, got {value}") for name, value in values.items()
                    if value is not None and value <= 0]  # fmt: skip
        if not self.run_seconds or min(self.run_seconds) <= 0:
            problems.append(Problem("run_seconds", "one or several positive times are needed"))
        if problems:
            raise ConfigError(problems)

    @property
    def mean_run(self) -> float:
        """The mean run time of a job, without the time to start it."""
        return sum(self.run_seconds) / len(self.run_seconds)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job: when it arrives, and how long it runs."""

    at: float
    run: float
    job: Candidate


@dataclass(slots=True)
class Outcome:
    """The figures of the jobs that arrived between ``begin`` and ``end``; failures and what they cost: of all jobs."""

    begin: float
    end: float
    finished: int = 0
    started: int = 0
    hits: int = 0  # of them, with their LoRA in memory
    busy: float = 0.0
    overhead: float = 0.0  # of the busy time: reading and loading
    waits: list[float] = field(default_factory=list)
    failures: int = 0  # of nodes
    reruns: int = 0  # of jobs that were cut off
    lost_work: float = 0.0  # runner-seconds of those jobs
    lost_time: float = 0.0  # runner-seconds until the runners were back
    lost_jobs: int = 0  # that never ended

    def covers(self, at: float) -> bool:
        """Return whether a time is in the measured part."""
        return self.begin <= at <= self.end

    @property
    def throughput(self) -> float:
        """Jobs that ended in a second of the measured time."""
        return self.finished / (self.end - self.begin)

    @property
    def hit_rate(self) -> float:
        """The share of jobs whose LoRA was in the memory of their runner."""
        return self.hits / max(1, self.started)

    @property
    def node_cost(self) -> float:
        """Runner-seconds that a lost node costs: work that is done again, and time until its runners are back."""
        return (self.lost_work + self.lost_time) / max(1, self.failures)

    def wait(self, percent: float) -> float:
        """Return a percentile of the times from arrival to start."""
        ordered = sorted(self.waits) or [0.0]
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def arrivals(case: Case) -> list[Arrival]:
    """Return the jobs of a case, by time."""
    randomness = random.Random(case.seed)
    weights = [*accumulate((rank + 1) ** -case.exponent for rank in range(case.loras))]
    rate, at, jobs = case.load * case.runners / case.mean_run, 0.0, []
    for number in range(case.jobs):
        at += randomness.expovariate(rate)
        lora = f"lora-{randomness.choices(range(case.loras), cum_weights=weights)[0]}"
        client = str(randomness.randrange(case.clients))
        job = Candidate(f"job-{number}", number, "image_generation", MODEL, 0, client, (lora,))
        jobs.append(Arrival(at, randomness.choice(case.run_seconds), job))
    return jobs


def outcome_of(jobs: Sequence[Arrival]) -> Outcome:
    """Return figures, all zero, that measure the middle third of these jobs."""
    begin = jobs[len(jobs) // 3].at
    return Outcome(begin, max(jobs[2 * len(jobs) // 3].at, begin + 1e-9))


def ideal_outcome(case: Case, jobs: Sequence[Arrival]) -> Outcome:
    """Return the figures of an ideal execution."""
    outcome, free = outcome_of(jobs), [0.0] * case.runners
    for each in jobs:
        start = max(each.at, heapq.heappop(free))
        heapq.heappush(free, start + each.run)
        outcome.finished += outcome.covers(start + each.run)
        if outcome.covers(each.at):
            outcome.waits.append(start - each.at)
    return outcome
