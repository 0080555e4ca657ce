"""Which job a free device runs next: order, turns, affinity, bounds; and a simulation of a skewed load."""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Sequence

import pytest

from inweave.serve.jobs.candidate import Candidate
from inweave.serve.jobs.job import Kind
from inweave.serve.scheduler.costs import LOAD_SECONDS, READ_SECONDS, Costs
from inweave.serve.scheduler.device import DeviceView, TrainingRole
from inweave.serve.scheduler.scheduler import MAX_OVERTAKES, WINDOW, Scheduler, fair_order


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def job(
    number: int, *, model: str = "m", kind: Kind = "image_generation", priority: int = 0, client: str = "",
    adapters: Sequence[str] = (),
) -> Candidate:  # fmt: skip
    return Candidate(f"job-{number}", number, kind, model, priority, client, tuple(adapters))


def device(name: str, *, models: Sequence[str] = ("m",), adapters: Sequence[str] = ()) -> DeviceView:
    return DeviceView(name, models=frozenset(models), adapters=frozenset(adapters))


def number_of(scheduler: Scheduler, jobs: Sequence[Candidate], here: DeviceView, *others: DeviceView) -> int | None:
    chosen = scheduler.choose(jobs, here, [here, *others]).job
    return None if chosen is None else chosen.number


def test_one_device_runs_jobs_of_one_client_by_priority_and_age() -> None:
    scheduler, here = Scheduler(), device("one", adapters=["b"])
    waiting = sorted((job(n, priority=p) for n, p in ((1, 0), (2, 5), (3, 5), (4, -1))), key=lambda j: -j.priority)
    order = []
    while waiting:
        number = number_of(scheduler, waiting, here)
        order.append(number)
        waiting = [each for each in waiting if each.number != number]
    assert order == [2, 3, 1, 4]
    reads = [job(1, adapters=["a"]), job(2, adapters=["b"])]
    assert number_of(scheduler, reads, here) == 1, "reading an adapter does not change the order"


def test_clients_take_turns_and_one_that_runs_a_job_had_its_turn() -> None:
    many = [job(number, client="many") for number in range(1, 6)]
    few = [job(number, client="few") for number in (6, 7)]
    assert [each.number for each in fair_order([*many, *few])] == [1, 6, 2, 7, 3, 4, 5]
    assert [each.number for each in fair_order([*many, *few], [job(0, client="many")])] == [6, 1, 7, 2, 3, 4, 5]
    busy = device("two")
    busy.job, busy.free_at = job(0, client="many"), 1e9
    assert number_of(Scheduler(clock=Clock()), [*many, *few], device("one"), busy) == 6


def test_a_single_device_finishes_the_jobs_of_its_model_before_it_loads_another_within_a_bound() -> None:
    scheduler, here = Scheduler(), device("one")
    other = job(1, model="other")
    for turn in range(MAX_OVERTAKES):
        assert number_of(scheduler, [other, job(turn + 2)], here) == turn + 2
    assert number_of(scheduler, [other, job(MAX_OVERTAKES + 2)], here) == 1, "overtaken often enough"


def test_a_priority_is_never_overtaken() -> None:
    scheduler, here = Scheduler(), device("one")
    assert number_of(scheduler, [job(1, model="other", priority=1), job(2)], here) == 1


def test_a_device_prefers_the_jobs_whose_loras_it_holds_and_leaves_others_to_their_device() -> None:
    clock = Clock()
    scheduler = Scheduler(clock=clock)
    one, two = device("one", adapters=["a"]), device("two", adapters=["b"])
    jobs = [job(1, adapters=["b"]), job(2, adapters=["a"])]
    assert number_of(scheduler, jobs, one, two) == 2
    assert number_of(scheduler, jobs[:1], two, one) == 1
    two.job, two.free_at = job(0), clock.now + READ_SECONDS / 2
    choice = scheduler.choose(jobs[:1], one, [one, two])
    assert choice.job is None, "its device is free before this one could have read the LoRA"
    assert choice.seconds is not None and 0 < choice.seconds <= READ_SECONDS
    assert scheduler.reason(jobs[0], [one, two]).startswith("two has its model")
    clock.now += choice.seconds + 0.001
    assert number_of(scheduler, jobs[:1], one, two) == 1, "it waited for as long as the reading takes"


def test_a_job_does_not_wait_for_a_device_that_is_busy_longer_than_loading_takes() -> None:
    scheduler = Scheduler(clock=Clock())
    one, two = device("one", models=[]), device("two")
    two.job, two.free_at = job(0), LOAD_SECONDS + 1
    assert number_of(scheduler, [job(1)], one, two) == 1
    two.free_at = LOAD_SECONDS - 1
    assert number_of(scheduler, [job(2)], one, two) is None


def test_training_leaves_one_device_to_images_unless_there_is_only_one() -> None:
    scheduler, one, two = Scheduler(clock=Clock()), device("one"), device("two")
    train = job(1, kind="train")
    assert number_of(scheduler, [train], one) == 1
    two.job, two.free_at = job(0, kind="train"), 1e9
    assert number_of(scheduler, [train, job(2)], one, two) == 2
    assert number_of(scheduler, [train], one, two) is None
    assert scheduler.reason(train, [one, two]) == "training must leave one device free for image jobs"
    two.job, two.ready = None, False
    assert number_of(scheduler, [train], one, two) is None, "the other one is down"
    two.job, two.ready = job(0, kind="train"), True
    one.role, two.role = TrainingRole.IMAGES, TrainingRole.TRAINING
    two.job = None
    assert number_of(scheduler, [train, job(2)], one, two) == 2
    assert number_of(scheduler, [train, job(2)], two, one) == 1
    two.ready = False
    assert scheduler.reason(train, [one, two]) == "no device is ready"
    assert "no device of this worker" in scheduler.reason(train, [one])


def test_jobs_that_were_cancelled_are_forgotten() -> None:
    scheduler, here = Scheduler(), device("one")
    for number in range(2, 500):
        scheduler.choose([job(1, model="other"), job(number)], here, [here])
        scheduler.choose([job(number + 1000)], here, [here])
    assert len(scheduler._overtakes) <= WINDOW and not scheduler._reservations


def test_costs_follow_what_was_measured() -> None:
    costs, here = Costs(), device("one", models=[], adapters=["a"])
    request = job(1, adapters=["a", "b"])
    assert costs.start_seconds(request, here) == LOAD_SECONDS + READ_SECONDS
    for _ in range(30):
        costs.observe_load("m", 2.0)
        costs.observe_read(0.5)
        costs.observe_run(request, 7.0)
    assert costs.start_seconds(request, here) == pytest.approx(2.5)
    assert costs.run_seconds(request) == pytest.approx(7.0)


@pytest.mark.parametrize("devices", [3, 8])
def test_nine_of_ten_jobs_of_a_skewed_load_meet_their_lora(devices: int) -> None:
    """200 LoRAs by Zipf's law, 80 % load; a device holds 100, and reading one takes 2 % of the time of a job."""
    randomness, clock, count, run, read = random.Random(1), Clock(), 6000 + 750 * devices, 5.0, 0.1
    scheduler = Scheduler(clock=clock)
    scheduler.costs.observe_read(read)
    views = [device(str(number)) for number in range(devices)]
    caches = [OrderedDict[str, None]() for _ in views]
    weights = [1 / (rank + 1) for rank in range(200)]
    at, arrivals = 0.0, []
    for number in range(count):
        at += randomness.expovariate(0.8 * devices / run)
        lora = f"lora-{randomness.choices(range(200), weights)[0]}"
        arrivals.append((at, job(number, client=str(number % 7), adapters=[lora])))
    events = [(at, number, "arrival") for number, (at, _) in enumerate(arrivals)]
    heapq.heapify(events)
    waiting: list[Candidate] = []
    hits = measured = 0
    longest = 0.0
    while events:
        clock.now, number, kind = heapq.heappop(events)
        if kind == "arrival":
            waiting.append(arrivals[number][1])
        elif kind == "end":
            views[number].job = None
        for index, view in enumerate(views):
            if view.job is not None or not waiting:
                continue
            choice = scheduler.choose(waiting[:WINDOW], view, views)
            if choice.job is None:
                if choice.seconds is not None:
                    heapq.heappush(events, (clock.now + choice.seconds + 1e-6, index, "again"))
                continue
            waiting.remove(choice.job)
            (lora,) = choice.job.adapters
            hit = lora in caches[index]
            caches[index][lora] = None
            caches[index].move_to_end(lora)
            while len(caches[index]) > 100:
                caches[index].popitem(last=False)
            view.adapters = frozenset(caches[index])
            if choice.job.number > count // 2:  # warm
                measured, hits = measured + 1, hits + hit
                longest = max(longest, clock.now - arrivals[choice.job.number][0])
            seconds = randomness.uniform(0.5, 1.5) * run + (0 if hit else read)
            view.job, view.free_at = choice.job, clock.now + run
            heapq.heappush(events, (clock.now + seconds, index, "end"))
    assert not waiting and measured > count / 3
    assert hits / measured >= 0.9, hits / measured
    assert longest < 30 * run
