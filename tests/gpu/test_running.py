"""Running batches on a GPU: steps wait for nothing, graphs follow members that join and leave, results stay right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

import numpy as np  # noqa: E402
from tests.peers import tiny_models  # noqa: E402

import inweave  # noqa: E402
from inweave.generate.config import GenerateConfig  # noqa: E402
from inweave.generate.pipeline import Pipeline  # noqa: E402
from inweave.generate.running import Member, RunningBatch  # noqa: E402
from inweave.models import recorded as recording  # noqa: E402

SMALL: dict[str, Any] = {"width": 64, "height": 64, "guidance": 4.0}


def pipe_of(variant: str, graph: Any = "auto") -> Pipeline:
    return inweave.pipeline(tiny_models.folder(variant), device="cuda", graph=graph, dtype="fp32", batch=8)


def join(batch: RunningBatch, pipe: Pipeline, **settings: Any) -> Member:
    member = Member(pipe.prepare(GenerateConfig(**{"prompt": "a red apple", "steps": 5, **SMALL, **settings})))
    assert batch.join(member) == ""
    return member


def run(batch: RunningBatch) -> None:
    while batch.members:
        batch.step()


def assert_alone(member: Member, pipe: Pipeline) -> None:
    assert member.error is None
    single = pipe(member.request.config, batch=1)
    for one, two in zip(member.result.images, single.images, strict=True):
        assert np.abs(np.asarray(one, int) - np.asarray(two, int)).max() <= 3


@pytest.mark.parametrize("variant", ["sd1.5", "sdxl", "sd3.5-medium", "flux1-dev"])
@pytest.mark.parametrize("graph", ["auto", "off"])
def test_members_of_any_step_have_the_images_of_single_requests(variant: str, graph: str) -> None:
    pipe, eager = pipe_of(variant, graph), pipe_of(variant, "off")
    for _ in range(3):  # eager, recorded, replayed
        batch, members = pipe.running_batch(), list[Member]()
        for number in range(4):
            members.append(join(batch, pipe, seed=number, steps=3 + 2 * number))
            batch.step()
        run(batch)
        for each in members:
            assert_alone(each, eager)
    if graph == "auto":
        assert pipe.model.recorded is not None and pipe.model.recorded.problem == ""


def test_loras_swapped_and_added_between_recorded_steps_are_those_of_their_images(tmp_path: Path) -> None:
    pipe, eager = pipe_of("sdxl"), pipe_of("sdxl", "off")
    files = [
        str(tiny_models.lora(tmp_path / f"{seed}.safetensors", "sdxl", dialect="diffusers", seed=seed))
        for seed in (1, 2)
    ]
    for _ in range(3):
        batch = pipe.running_batch()
        first = join(batch, pipe, seed=1, steps=8, loras=[f"{files[0]}:0.7"])
        batch.step()
        second = join(batch, pipe, seed=2, steps=2, loras=[f"{files[1]}:0.9"])
        third = join(batch, pipe, seed=3, steps=4)
        run(batch)
        for each in (first, second, third):
            assert_alone(each, eager)


@pytest.mark.parametrize("variant", ["sdxl", "flux1-dev"])
def test_batches_with_a_lora_for_each_image_replay_one_graph(variant: str, tmp_path: Path) -> None:
    """The graph follows rows, strengths and adapters that are written into slots, and waits for nothing."""
    pipe, eager = pipe_of(variant), pipe_of(variant, "off")
    files = [
        str(tiny_models.lora(tmp_path / f"{seed}.safetensors", variant, dialect="diffusers", seed=seed))
        for seed in range(6)
    ]

    def members(own: Pipeline, turn: int) -> list[Member]:
        batch = own.running_batch()
        stacks = [[f"{files[(turn + number) % 6]}:{0.4 + 0.1 * turn}"] for number in range(3)]
        joined = [join(batch, own, seed=number, steps=6, loras=stack) for number, stack in enumerate([*stacks, []])]
        for _ in range(3):  # one eager, one recorded, one replayed
            batch.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            batch.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        run(batch)
        assert joined[0].result.added
        return joined

    recorded = pipe.model.recorded
    assert recorded is not None
    seconds = 0.0
    for turn in range(5):
        for one, two in zip(members(pipe, turn), members(eager, turn), strict=True):
            assert one.error is None and two.error is None
            assert np.array_equal(np.asarray(one.result.images[0]), np.asarray(two.result.images[0])), turn
        if turn == 3:  # all six adapters have their memory now
            seconds = recorded.seconds
    assert recorded.problem == "" and recorded.seconds == seconds > 0


def test_merged_and_added_loras_take_turns_and_keep_their_graphs(tmp_path: Path) -> None:
    pipe = pipe_of("sdxl")
    files = [
        str(tiny_models.lora(tmp_path / f"{seed}.safetensors", "sdxl", dialect="diffusers", seed=seed))
        for seed in (1, 2)
    ]
    recorded = pipe.model.recorded
    assert recorded is not None
    graphs, seconds = list[int](), list[float]()
    for _ in range(3):
        merged = pipe.running_batch()
        join(merged, pipe, seed=1, loras=[f"{files[0]}:0.7"])
        run(merged)
        mixed = pipe.running_batch()
        for seed, file in enumerate(files):
            join(mixed, pipe, seed=seed, loras=[f"{file}:0.7"])
        run(mixed)
        graphs.append(len(recorded))
        seconds.append(recorded.seconds)
    assert graphs == [2, 2, 2] and seconds[0] == seconds[1] == seconds[2]


def test_graphs_that_are_dropped_while_they_run_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used graph leaves at once, with a replay of it still in the queue of the device."""
    monkeypatch.setattr(recording, "MOST", 1)
    pipe, eager = pipe_of("sdxl"), pipe_of("sdxl", "off")
    for _ in range(2):
        batch, members = pipe.running_batch(), list[Member]()
        for number in range(5):
            members.append(join(batch, pipe, seed=number, steps=3))
            batch.step()
        run(batch)
        for each in members:
            assert_alone(each, eager)
    assert pipe.model.recorded is not None and len(pipe.model.recorded) == 1


@pytest.mark.parametrize("sampler", ["ddim", "euler", "dpm_solver_multistep", "ddpm", "uni_pc", "heun"])
def test_a_step_waits_for_no_number_of_the_device(sampler: str) -> None:
    pipe = pipe_of("sd1.5", "off")
    batch = pipe.running_batch()
    members = [join(batch, pipe, seed=number, steps=8, sampler=sampler) for number in (1, 2)]
    for _ in range(3):
        batch.step()  # first steps look up where their times are
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.step()
        batch.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run(batch)
    for each in members:
        assert_alone(each, pipe)


def test_a_value_that_is_not_finite_stays_in_its_image() -> None:
    pipe, eager = pipe_of("sdxl"), pipe_of("sdxl", "off")
    batch = pipe.running_batch()
    broken, whole = join(batch, pipe, seed=1), join(batch, pipe, seed=2)
    batch.step()
    broken.samplings[0].latents.fill_(float("nan"))
    run(batch)
    assert broken.error is not None and "not finite" in str(broken.error)
    assert_alone(whole, eager)
