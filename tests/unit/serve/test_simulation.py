"""The simulation of many runners: affinity, throughput, lost nodes, with the scheduler of the worker."""

from __future__ import annotations

import pytest

from inweave.errors import ConfigError
from inweave.serve.scheduler.simulation import simulate
from inweave.serve.scheduler.workload import Arrival, Case, arrivals, ideal_outcome
from tests.support import sized


@pytest.mark.parametrize("runners", [3, 8, pytest.param(100, marks=pytest.mark.full)])
def test_nine_of_ten_jobs_of_a_skewed_load_meet_their_lora(runners: int) -> None:
    """200 LoRAs by Zipf's law, 80 % load; a runner holds 100, and reading one takes 2 % of the time of a job."""
    case = Case(runners=runners, loras=200, jobs=6000 + 750 * runners)
    jobs = arrivals(case)
    outcome = simulate(case, jobs)
    assert outcome.started >= case.jobs // 3 and outcome.lost_jobs == 0
    assert outcome.hit_rate >= 0.9
    assert outcome.wait(99) <= ideal_outcome(case, jobs).wait(99) + 2 * case.mean_run
    assert outcome.throughput >= 0.99 * ideal_outcome(case, jobs).throughput


def test_a_hundred_runners_at_80_percent_load_reach_the_ideal_throughput() -> None:
    case = Case(runners=100, jobs=sized(2500, 50_000))
    jobs = arrivals(case)
    outcome = simulate(case, jobs)
    assert outcome.throughput >= 0.95 * ideal_outcome(case, jobs).throughput
    assert outcome.wait(99) <= case.read_seconds + 0.01, "a free runner was left alone for longer than a read takes"


def test_no_job_is_lost_with_the_nodes_that_fail() -> None:
    case = Case(runners=24, jobs=3000, load=0.7, loras=300, node_hours=0.05, runners_per_node=4)
    jobs = arrivals(case)
    outcome = simulate(case, jobs)
    assert outcome.failures > 10 and outcome.reruns > 10 and outcome.lost_jobs == 0
    runners = case.runners_per_node * outcome.failures
    assert outcome.lost_time == pytest.approx(runners * case.restart_seconds)
    longest = max(case.run_seconds) + case.read_seconds + case.load_seconds
    assert 0 < outcome.lost_work <= outcome.reruns * longest
    assert outcome.hit_rate < simulate(Case(runners=24, jobs=3000, load=0.7, loras=300), jobs).hit_rate


def test_one_runner_with_everything_in_memory_is_the_ideal() -> None:
    case = Case(runners=1, jobs=400, loras=1, clients=1)
    jobs = arrivals(case)
    outcome, ideal = simulate(case, jobs), ideal_outcome(case, jobs)
    assert outcome.hit_rate == 1.0
    late = case.read_seconds + 1e-6  # of the first job, the only one that reads
    assert all(mine == pytest.approx(best, abs=late) for mine, best in zip(outcome.waits, ideal.waits, strict=True))


def test_arrivals_follow_the_load_and_zipfs_law() -> None:
    case = Case(runners=50, jobs=20_000, loras=1000)
    jobs = arrivals(case)
    assert jobs == arrivals(case)
    assert sum(each.run for each in jobs) / jobs[-1].at / case.runners == pytest.approx(case.load, rel=0.05)
    assert share(jobs, "lora-0") == pytest.approx(2 * share(jobs, "lora-1"), rel=0.15)


def share(jobs: list[Arrival], lora: str) -> float:
    return sum(each.job.adapters == (lora,) for each in jobs) / len(jobs)


@pytest.mark.parametrize("field", ["runners", "load", "jobs", "loras", "capacity", "node_hours"])
def test_a_case_that_cannot_run_is_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Case(**{field: 0})  # type: ignore[arg-type]
