"""Which job a free device runs next: order, turns, affinity, bounds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from inweave.serve.jobs.candidate import Candidate
from inweave.serve.jobs.job import Kind
from inweave.serve.scheduler.costs import LOAD_SECONDS, READ_SECONDS, Costs
from inweave.serve.scheduler.device import DeviceView, TrainingRole
from inweave.serve.scheduler.scheduler import GAIN, MAX_OVERTAKES, WINDOW, Scheduler, fair_order
from tests.support import sized


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def job(
    number: int, *, model: str = "m", kind: Kind = "image_generation", priority: int = 0, client: str = "",
    adapters: Sequence[str] = (), shape: tuple[int, int] | None = None, stack: str = "",
) -> Candidate:  # fmt: skip
    return Candidate(f"job-{number}", number, kind, model, priority, client, tuple(adapters), shape, stack)


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


def better_by_definition(
    scheduler: Scheduler, request: Candidate, here: DeviceView, devices: Sequence[DeviceView]
) -> DeviceView | None:
    """Return the device that a job should wait for: of all others, the first of those where it runs soonest."""
    others = [each for each in devices if each is not here and each.ready and each.takes(request.kind)]
    if request.kind == "train":
        images = [each for each in devices if each.takes("image_generation")]
        others = [
            each for each in others
            if each.job is not None or each.role is TrainingRole.TRAINING or len(images) == 1
            or any(other.ready and not other.training for other in images if other is not each)
        ]  # fmt: skip
    costs, now = scheduler.costs, scheduler.clock()

    def total(each: DeviceView) -> float:
        return (max(0.0, each.free_at - now) if each.job is not None else 0.0) + costs.start_seconds(request, each)

    best = min(others, key=total, default=None)
    return best if best is not None and total(best) + GAIN <= costs.start_seconds(request, here) else None


@pytest.mark.parametrize("seed", range(sized(30, 2000)))
def test_the_device_to_wait_for_is_the_best_of_all(seed: int) -> None:
    """Choices look at few devices; the result is that of comparing all of them."""
    randomness, clock, names, costs = random.Random(seed), Clock(), ["a", "b", "c"], Costs()
    costs.observe_read(0.25)
    costs.observe_load("m", 2.0)
    for _ in range(20):
        scheduler, devices = Scheduler(costs, clock), []
        for number in range(randomness.randrange(1, 9)):
            loaded = [name for name in names if randomness.random() < 0.4]
            each = device(str(number), models=[m for m in ("m", "n") if randomness.random() < 0.7], adapters=loaded)
            each.ready, each.role = randomness.random() < 0.9, randomness.choice(list(TrainingRole))
            if randomness.random() < 0.5:
                kind: Kind = "train" if randomness.random() < 0.3 else "image_generation"
                each.job, each.free_at = job(0, kind=kind), clock.now + randomness.choice([-1, 0, 0.25, 0.5, 2, 9])
            devices.append(each)
        here, clock.now = devices[0], clock.now + randomness.choice([0.0, 0.1, 3.0])
        here.job = None
        kind = "train" if randomness.random() < 0.3 else "image_generation"
        request = job(1, kind=kind, model=randomness.choice("mn"), adapters=randomness.sample(names, 2))
        choice = scheduler.choose([request], here, devices)
        best = better_by_definition(scheduler, request, here, devices)
        if choice.seconds is not None:
            assert best is not None and choice.devices == (best.name,)
        elif choice.job is not None:
            assert best is None


SIZE = (64, 64)


def test_jobs_of_one_shape_join_in_order_and_the_others_are_overtaken_a_bounded_number_of_times() -> None:
    scheduler, here = Scheduler(), device("one")
    here.add(job(0, shape=SIZE))
    other = job(1, shape=(128, 64))
    for number in range(2, 2 + MAX_OVERTAKES):
        waiting = [other, job(number, shape=SIZE), job(number + 1, shape=SIZE)]
        joined = scheduler.join(waiting, here, [here]).job
        assert joined is not None and joined.number == number
        here.add(joined)
    assert scheduler.join([other, job(99, shape=SIZE)], here, [here]).job is None, "the other one is next"
    for each in here.jobs:
        here.remove(each.id)
    assert here.job is None and number_of(scheduler, [other, job(99, shape=SIZE)], here) == 1


def test_jobs_join_only_what_they_can_share() -> None:
    scheduler, here = Scheduler(), device("one")
    here.add(job(0, shape=SIZE, stack="a"))
    for waiting in (
        job(1, shape=SIZE, model="other"), job(1, shape=None), job(1, kind="train"), job(1, shape=(64, 65)),
    ):  # fmt: skip
        assert scheduler.join([waiting], here, [here]).job is None
    mixed = job(1, shape=SIZE, stack="b")
    assert scheduler.join([mixed], here, [here]).job == mixed
    here.mixed = False
    assert scheduler.join([mixed], here, [here]).job is None
    urgent = job(2, shape=SIZE, model="other", priority=1)
    assert scheduler.join([urgent, job(3, shape=SIZE, stack="a")], here, [here]).job is None, "it would wait longer"
    idle = device("two")
    idle.add(job(0, shape=None))
    assert scheduler.join([job(1, shape=SIZE)], idle, [idle]).job is None


def test_a_job_does_not_join_where_an_idle_device_has_its_model() -> None:
    scheduler, here, idle = Scheduler(), device("one"), device("two")
    here.add(job(0, shape=SIZE))
    waiting = job(1, shape=SIZE)
    assert scheduler.join([waiting], here, [here, idle]).job is None
    idle.models = frozenset()
    assert scheduler.join([waiting], here, [here, idle]).job == waiting, "loading it there takes longer"
