"""Recorded steps with other adapters for each row: they are played again for other rows, strengths and adapters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from inweave.errors import InweaveError
from inweave.generate.config import GenerateConfig
from inweave.generate.pipeline import Pipeline, pipeline
from inweave.generate.running import Member
from inweave.models.acceleration import record_calls
from inweave.models.recorded import RecordedDenoiser
from inweave.models.sd import steady
from inweave.ops.rowwise import RowTable, SlotFactors
from inweave.weights import layer_slots
from inweave.weights.row_adapters import RowAdapters
from inweave.weights.weaver import Weaver
from tests.tape import TapePool
from tests.unit.weights.test_row_adapters import ONE, ROWS, TWO, WIDE, Network, adapter, inputs

SETTINGS: dict[str, Any] = {"width": 64, "height": 64, "steps": 2}


def add_products(y: Tensor, x: Tensor, factors: SlotFactors, table: RowTable, inner: Any = None) -> Tensor:
    """Compute `reference.add_products` from the tables of the device alone, as the kernels do."""
    slots, strengths = table.slots[: len(y)].long(), table.strengths[: len(y)]
    used = slots.clamp(min=0)
    first, rank = (part.unsqueeze(-1) for part in factors.places[used].unbind(-1))
    numbers = torch.arange(len(factors.down), device=x.device)
    mine = (numbers >= first) & (numbers < first + rank) & (slots >= 0).unsqueeze(-1)
    share = (mine * (strengths * factors.scales[used]).unsqueeze(-1)).sum(1)
    hidden = (inner or torch.nn.functional.linear)(x, factors.down)
    return y + (hidden * share.unsqueeze(1)) @ factors.up


@pytest.fixture(autouse=True)
def device_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_slots, "add_products", add_products)


class Recording:
    """A small network, its adapters, and its recorded calls."""

    def __init__(self) -> None:
        self.network = Network().requires_grad_(False).eval()
        self.weaver = Weaver({"unet": self.network})
        self.adapters = RowAdapters(self.weaver)
        self.pool = TapePool()
        self.recorded = RecordedDenoiser(
            lambda x, t, more: self.network(x, more["time"]), self.network, self.pool,
            lambda x: self.adapters.layout("unet", x),
        )  # fmt: skip

    def predict(self, x: Tensor, time: Tensor) -> Tensor:
        return self.recorded(x, torch.tensor(1.0), {"time": time})

    @torch.no_grad()
    def batch(self, rows: Any, seed: int = 0) -> bool:
        """Predict for rows that are adapters with strengths, compare with an eager call; return if it was played."""
        own = list({id(each): each for row in rows for each, _ in row}.values())
        slots = dict(zip(map(id, own), self.adapters.load(own), strict=True))
        x, time = (each + seed for each in inputs(len(rows)))
        before = self.replays
        with self.adapters.acting("unet", slots.values()) as filled:
            filled.fill([[(slots[id(each)], strength) for each, strength in row] for row in rows])
            actual, expected = self.predict(x, time), self.network(x, time)
        assert torch.equal(actual, expected)
        return self.replays > before

    @property
    def replays(self) -> int:
        return sum(tape.replays for tape in self.pool.tapes)


def turned(rows: Any, by: int) -> Any:
    return rows[by:] + rows[:by]


def test_a_recorded_call_follows_rows_strengths_and_adapters() -> None:
    case = Recording()
    replays = [case.batch(turned(ROWS, number), number) for number in range(6)]
    assert replays == [False, True, True, True, True, True]
    again = [[(each, 0.3 * strength) for each, strength in row] for row in ROWS]
    assert case.batch(again), "strengths are read from memory"
    assert len(case.pool.tapes) == 1 and case.recorded.problem == ""


def test_an_adapter_written_into_a_slot_is_the_one_that_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inweave.weights.row_adapters.MOST_SLOTS", 2)
    case, names = Recording(), ("qkv", "out")
    for number, (left, right) in enumerate(itertools.pairwise(adapter(seed, 8, *names) for seed in range(6))):
        replayed = case.batch([[(left, 1.0)], [(right, 0.5)]])
        assert replayed == (number > 0), number
    assert len(case.pool.tapes) == 1


def test_adding_takes_turns_with_merging_and_both_keep_their_recordings() -> None:
    case = Recording()
    x, time = inputs(2)
    for number in range(4):
        case.weaver.apply([(ONE, 0.2 * number)])
        with torch.no_grad():
            before = case.replays
            assert torch.equal(case.predict(x, time), case.network(x, time))
            assert (case.replays > before) == (number > 0)
        assert case.batch([[(TWO, 1.0)], [(WIDE, number)]]) == (number > 0)
    assert len(case.pool.tapes) == 2
    assert not any(module._forward_hooks for module in case.network.modules())


CHANGES: dict[str, Any] = {
    "another layer adds": [[(ONE, 1.0)], [(adapter(3, 2, "unused"), 1.0)]],
    "a layer less adds": [[(adapter(4, 2, "qkv"), 1.0)], []],
    "more adapters for a row": [[(ONE, 1.0), (adapter(5, 2, "qkv"), 1.0)], []],
    "a larger rank": [[(adapter(6, 90, "qkv"), 1.0)], [(ONE, 1.0)]],
    "more ranks in all": [[(adapter(7, 14, *("conv", "down", "time", "qkv", "out")), 1.0)], [(ONE, 1.0)]],
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_recording_does_not_hold_is_recorded_again(change: str) -> None:
    case = Recording()
    rows: Any = [[(ONE, 1.0)], [(ONE, 0.5)]]
    assert [case.batch(rows) for _ in range(3)] == [False, True, True]
    assert [case.batch(CHANGES[change]) for _ in range(3)] == [False, True, True]


def test_a_changed_network_drops_all_recordings() -> None:
    case = Recording()
    rows: Any = [[(ONE, 1.0)], []]
    assert [case.batch(rows) for _ in range(3)] == [False, True, True]
    handle = case.network.qkv.register_forward_hook(lambda layer, into, output: 2 * output)
    assert [case.batch(rows) for _ in range(3)] == [False, True, True]
    handle.remove()
    case.network.out.weight.data = case.network.out.weight.data.clone()
    assert [case.batch(rows) for _ in range(3)] == [False, True, True]


def test_a_call_with_another_number_of_rows_is_refused_before_it_is_played() -> None:
    case = Recording()
    rows: Any = [[(ONE, 1.0)], []]
    for _ in range(3):
        case.batch(rows)
    (slot,) = case.adapters.load([ONE])
    with case.adapters.acting("unet", [slot]) as filled, torch.no_grad():
        filled.fill([[(slot, 1.0)]])
        with pytest.raises(InweaveError, match="unet: expected an input of 1 rows"):
            case.predict(*inputs(2))


def test_a_step_reads_no_number_of_the_device() -> None:
    """The tape refuses what a graph does, so its pass means something."""
    case = Recording()
    case.network.out.register_forward_hook(lambda layer, into, output: output * bool(output.isfinite().all()))
    for _ in range(2):
        case.batch([[(ONE, 1.0)], []])
    assert "not permitted" in case.recorded.problem


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    own = pipeline("inweave/emoji", device="cpu", batch=8)
    yield own


def test_images_of_mixed_batches_are_those_of_eager_steps(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pool = pipe.model, TapePool()
    monkeypatch.setattr(steady, "is_faster", lambda network: False)  # what is kept between steps is not recorded
    stacks = [["pixel:0.8"], [], ["ink:0.4", "pixel:0.5"]]

    def images(number: int) -> Any:
        requests = [
            GenerateConfig(prompt="a cat", seed=number + own, loras=stack, **SETTINGS)  # type: ignore[arg-type]
            for own, stack in enumerate(turned(stacks, number))
        ]
        batch, members = pipe.running_batch(), [Member(pipe.prepare(each)) for each in requests]
        for each in members:
            assert batch.join(each) == ""
        while batch.members:
            batch.step()
        assert all(each.error is None and each.result.added for each in members if each.request.loras)
        return [np.asarray(image) for each in members for image in each.result.images]

    eager = [images(number) for number in range(2)]
    record_calls(model, pool)
    try:
        recorded = [images(number) for number in range(2)]
    finally:
        model.recorded = None
    assert len(pool.tapes) == 1, "one recording for two batches with other LoRAs in each row"
    assert np.array_equal(eager, recorded)
