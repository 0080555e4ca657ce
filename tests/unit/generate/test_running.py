"""Requests that join and leave a running batch: each gets the images that it gets alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from inweave.errors import CancelledError, ConfigError, RequestError
from inweave.generate import running
from inweave.generate.config import GenerateConfig
from inweave.generate.denoise import Callbacks, Progress
from inweave.generate.pipeline import Pipeline, pipeline
from inweave.generate.running import Member, RunningBatch

SMALL: dict[str, Any] = {"width": 64, "height": 64}
CONFIGS = [
    GenerateConfig(prompt="a cat", seed=1, steps=6, loras=["pixel:0.8"], **SMALL),  # type: ignore[arg-type]
    GenerateConfig(prompt="[a dog:a fish:0.5]", seed=2, steps=3, sampler="heun", loras=["ink:1.0"], **SMALL),  # type: ignore[arg-type]
    GenerateConfig(prompt="a sun", seed=3, steps=5, sampler="euler", guidance=1.0, count=2, **SMALL),
    GenerateConfig(prompt="a tree", seed=4, steps=6, sampler="dpmpp_2m_sde", loras=["pixel:0.8"], **SMALL),  # type: ignore[arg-type]
]


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    yield pipeline("inweave/emoji", device="cpu")


@pytest.fixture
def batch(pipe: Pipeline) -> RunningBatch:
    return pipe.running_batch(8)


def member(pipe: Pipeline, config: GenerateConfig, callbacks: Callbacks | None = None) -> Member:
    return Member(pipe.prepare(config), callbacks or Callbacks())


def run(batch: RunningBatch) -> list[Member]:
    ended = list[Member]()
    while batch.members:
        ended += batch.step()
    return ended


def assert_equals(mine: Member, pipe: Pipeline, *, bits: bool) -> None:
    assert mine.error is None
    single = pipe(mine.request.config)
    assert mine.result.records == single.records
    for one, two in zip(mine.result.images, single.images, strict=True):
        apart = np.abs(np.asarray(one, int) - np.asarray(two, int))
        assert apart.max() <= (0 if bits else 2) and (apart > 0).mean() < 0.02


def test_a_request_alone_in_a_batch_has_the_bits_of_a_call(pipe: Pipeline, batch: RunningBatch) -> None:
    for config in CONFIGS[:2]:
        mine = member(pipe, config)
        assert batch.join(mine) == ""
        assert run(batch) == [mine]
        assert_equals(mine, pipe, bits=True)
        assert mine.result.batches == [1] and not mine.result.added


def test_requests_join_and_leave_at_any_step_with_their_own_samplers_and_loras(
    pipe: Pipeline, batch: RunningBatch
) -> None:
    seen: dict[int, list[tuple[int, int]]] = {}
    members, ended = list[Member](), list[Member]()
    for number, config in enumerate(CONFIGS):

        def report(at: Progress, number: int = number) -> None:
            seen.setdefault(number, []).append((at.done, at.work))

        members.append(member(pipe, config, Callbacks(report)))
        assert batch.join(members[-1]) == ""
        ended += batch.step()
    assert len(batch.members) == 4 and not ended
    ended += run(batch)
    assert [each.request.config.seed for each in ended] == [1, 2, 3, 4]
    for number, mine in enumerate(members):
        assert_equals(mine, pipe, bits=False)
        steps = [done for done, _ in seen[number]]
        work = mine.request.config.steps * mine.request.config.count  # type: ignore[operator]
        assert steps == sorted(steps) and steps[-1] == work and {each for _, each in seen[number]} == {work}
    assert members[0].result.added == ["pixel"] and max(members[2].result.batches) == 5
    assert pipe("a cat", seed=1, steps=1, **SMALL).images[0] == pipe("a cat", seed=1, steps=1, **SMALL).images[0]


def test_one_stack_is_merged_and_merged_again_when_the_others_have_left(pipe: Pipeline, batch: RunningBatch) -> None:
    long, short = CONFIGS[3], CONFIGS[0].model_copy(update={"loras": CONFIGS[1].loras, "steps": 1})
    assert batch.join(member(pipe, long)) == ""
    same = member(pipe, long.model_copy(update={"seed": 9}))
    assert batch.join(same) == "" and not same.result.added
    batch.step()
    assert batch.join(member(pipe, short)) == "" and same.result.added == ["pixel"]
    assert len(batch.step()) == 1
    batch.step()
    assert pipe.model.row_adapters.active == 0, "the stack that is left is merged"
    run(batch)
    assert_equals(same, pipe, bits=False)


def test_what_cannot_join_says_why(pipe: Pipeline, batch: RunningBatch) -> None:
    assert batch.join(member(pipe, CONFIGS[0])) == ""
    larger = member(pipe, CONFIGS[0].model_copy(update={"width": 128}))
    assert batch.join(larger) == "images of another size are being made"
    full = pipe.running_batch(2)
    for seed in (1, 2):
        assert full.join(member(pipe, CONFIGS[2].model_copy(update={"seed": seed, "count": 1}))) == ""
    assert full.join(member(pipe, CONFIGS[2])) == running.FULL
    full.close()
    batch.close()
    costs = pipe.running_batch("auto")
    native = [each.model_copy(update={"width": 128, "height": 128}) for each in CONFIGS[:2]]
    assert costs.join(member(pipe, native[0])) == ""
    assert "costs less than adding" in costs.join(member(pipe, native[1]))
    mine = costs.members[0]
    run(costs)
    assert_equals(mine, pipe, bits=True)


def test_many_images_of_one_request_leave_room_for_others(pipe: Pipeline) -> None:
    batch = pipe.running_batch(3)
    many = member(pipe, CONFIGS[2].model_copy(update={"count": 6, "steps": 2}))
    assert batch.join(many) == ""
    batch.step()
    one = member(pipe, CONFIGS[2].model_copy(update={"seed": 50, "count": 1, "steps": 1}))
    assert batch.join(one) == ""
    ended = run(batch)
    assert ended == [one, many] and len(many.result.images) == 6
    assert [record["config"]["seed"] for record in many.result.records] == list(range(3, 9))


def test_cancellation_and_failures_end_one_request_alone(
    pipe: Pipeline, batch: RunningBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = False
    plain = member(pipe, CONFIGS[0])
    stopped = member(pipe, CONFIGS[2], Callbacks(cancelled=lambda: cancelled))

    def fail(at: Progress) -> None:
        raise RequestError("this one")

    failing = member(pipe, CONFIGS[3], Callbacks(fail))
    broken = member(pipe, CONFIGS[1])
    for each in (plain, stopped, failing, broken):
        assert batch.join(each) == ""
    assert batch.step() == [failing] and isinstance(failing.error, RequestError)
    cancelled = True
    broken.samplings[0].latents.fill_(float("nan"))
    ended = run(batch)
    assert ended[0] is stopped and isinstance(stopped.error, CancelledError)
    assert isinstance(broken.error, RequestError) and "not finite" in str(broken.error)
    assert_equals(plain, pipe, bits=False)


@pytest.mark.parametrize("memory", [False, True])
def test_a_call_that_fails_is_repeated_for_halves(
    pipe: Pipeline, batch: RunningBatch, monkeypatch: pytest.MonkeyPatch, memory: bool
) -> None:
    """Out of memory for more than one image, or an error that one image alone causes."""
    members = [member(pipe, CONFIGS[2].model_copy(update={"seed": seed, "count": 1})) for seed in (1, 2, 3)]
    for each in members:
        assert batch.join(each) == ""
    own, bad = running.evaluate, members[1]  # type: ignore[attr-defined]

    def evaluate(model: Any, samplings: Any, conditioning: Any) -> None:
        if memory and len(samplings) > 1:
            raise torch.OutOfMemoryError("no memory")
        if not memory and any(each in bad.samplings for each in samplings):
            raise ValueError("this image")
        own(model, samplings, conditioning)

    monkeypatch.setattr(running, "evaluate", evaluate)
    ended = run(batch)
    monkeypatch.undo()
    if memory:
        assert not any(each.error for each in ended) and batch.most == 1
        assert any("not enough memory for 3 images" in text for text in members[0].result.warnings)
    else:
        assert isinstance(bad.error, ValueError) and [each.error for each in ended].count(None) == 2
    for each in members if memory else (members[0], members[2]):
        assert_equals(each, pipe, bits=False)


def test_a_request_whose_lora_is_broken_leaves_the_others_as_they_are(
    pipe: Pipeline, batch: RunningBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = member(pipe, CONFIGS[0])
    assert batch.join(first) == ""
    batch.step()
    other = member(pipe, CONFIGS[1])
    monkeypatch.setattr(batch, "_condition", lambda request, added: (_ for _ in ()).throw(ConfigError("broken")))
    with pytest.raises(ConfigError, match="broken"):
        batch.join(other)
    monkeypatch.undo()
    run(batch)
    assert_equals(first, pipe, bits=True)
