"""Plans that stream, quantize, choose a batch size, and stay within host memory; the table of plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

import torch

from inweave.bench.models import published_blueprint as published
from inweave.errors import ConfigError, MemoryBudgetError
from inweave.training.config.schema import TrainConfig
from inweave.training.config.validation import run_problems
from inweave.training.memory import estimate as estimating
from inweave.training.memory.estimate import (
    GIB,
    HOST,
    RESERVE,
    LanguageModelSpec,
    Measurements,
    moves_inputs,
    sum_up,
)
from inweave.training.memory.meta import Measured
from inweave.training.memory.plan import limit_for, plan_memory, plan_run
from inweave.training.memory.speed import CONVERSION, PASSES, PRODUCTS, Speed, speed_of, speed_of_card
from inweave.training.memory.table import plan_table
from inweave.training.session import check
from inweave.weights.streaming.stream import SLOTS, streamed_blocks
from tests.unit.training.image_sets import make_set

#: bytes per weight; a step without recomputation takes 0.2 s, and all blocks are copied in 0.16 s
SHRINK = {"off": 1.0, "int8": 0.5, "int8-hadamard": 0.5, "nf4": 0.25, "nf4-hadamard": 0.28}
SPEED = Speed(1e14, host=50 * GIB)


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 blocks of half a GiB and a quarter beside them; 2 GiB of encoders; an example keeps 4, 2 and 1 GiB by mode.

    A quarter of the 1 GiB is left on the device if inputs of blocks are in host memory.
    """

    def fake(blueprint: Any, config: TrainConfig, dtype: torch.dtype, *_: Any, **__: Any) -> Measured:
        factor = {"off": 4, "selective": 2, "full": 1}[config.gradient_checkpointing]
        size = GIB // 4 if config.offload_activations == "on" else factor * GIB
        return stored(Measured({}, 1 << 20, size, GIB // 4, 10**13), config.quantize)

    def stored(measured: Measured, format: str) -> Measured:
        block = int(GIB // 2 * SHRINK[format])
        weights = {
            "unet": 8 * block + GIB // 4,
            "vae": GIB // 4,
            "text_encoder": GIB // 2,
            "text_encoder_2": 3 * GIB // 2,
        }
        blocks = {"unet": (block,) * 8, "text_encoder_2": (GIB // 8,) * 12}
        return Measured(
            weights, measured.parameters, measured.activations, measured.encoding, measured.operations,
            quantized=0 if format == "off" else 2 * GIB, blocks=blocks,
        )  # fmt: skip

    monkeypatch.setattr(estimating, "measure", fake)
    monkeypatch.setattr(estimating, "stored_bytes", lambda _, format, __: format)
    monkeypatch.setattr(estimating, "with_weights", stored)
    monkeypatch.setattr("inweave.training.memory.candidates.quantize_problems", no_fp8)


def no_fp8(denoiser: Any, settings: TrainConfig, device: Any) -> list[str]:
    return ["the device cannot"] if settings.quantize == "fp8" else []


def config(**settings: Any) -> TrainConfig:
    return TrainConfig.of(**{"dataset": "-", "precision": "bf16", "steps": 100, "device": "cpu", **settings})


def plan(limit: float, *, speed: Speed = SPEED, **settings: Any) -> Any:
    requested = config(**settings)
    return plan_memory(Measurements(published("sdxl"), requested), requested, int(limit * GIB), speed)


def test_only_what_does_not_fit_otherwise_is_streamed_and_as_little_as_must_be() -> None:
    resident = plan(6.5, gradient_checkpointing="off")
    assert resident.config.offload == "auto" and resident.config.gradient_checkpointing == "full" and resident.staged
    one = plan(6.2, gradient_checkpointing="full", offload_activations="off")
    assert one.config.offload == "blocks" and one.resident == 5 and one.estimate["total_bytes"] <= 6.2 * GIB
    every = plan(3.4, gradient_checkpointing="full")
    assert every.resident == 0
    assert one.estimate["copied_per_step"] == 2 * 3 * GIB // 2 < every.estimate["copied_per_step"] == 2 * 4 * GIB
    reasons = "; ".join(every.reasons)
    assert 'offload "blocks": the base is in host memory, 6.50 GiB with the encoders; a step copies 8.00 GiB' in reasons
    assert "5 blocks stay on the device" in "; ".join(one.reasons)
    with pytest.raises(MemoryBudgetError, match=r"vram: 6.20 GiB is not enough"):
        plan(6.2, offload="off", offload_activations="off")


def test_inputs_of_blocks_leave_the_device_before_blocks_do_and_only_if_they_must() -> None:
    assert plan(6.5).config.offload_activations == "auto", "full recomputation fits"
    moved = plan(6.2)
    assert (moved.config.offload, moved.config.offload_activations) == ("auto", "on")
    assert moved.config.gradient_checkpointing == "full" and moved.estimate["total_bytes"] <= 6.2 * GIB
    assert 'offload_activations "on": the inputs of blocks are in host memory' in "; ".join(moved.reasons)
    slow = Speed(1e14, host=5 * GIB)
    both = plan(4.5, speed=slow)
    assert (both.config.offload, both.config.offload_activations) == ("blocks", "on"), "room for blocks is worth more"
    assert both.resident > plan(4.5, speed=slow, offload_activations="off").resident
    assert plan(4.5).config.offload_activations == "auto", "copies take no longer than the work"
    rows = [row.changes for row in plan_table(Measurements(published("sdxl"), config()), config(), SPEED)]
    assert any("blocks streamed" in row and "inputs of blocks in host memory" in row for row in rows), rows


def test_inputs_in_host_memory_are_counted_there_and_as_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = config(gradient_checkpointing="full", offload_activations="on", batch_size=2, gradient_accumulation=3)
    measurements = Measurements(published("sdxl"), requested)
    measured = replace(measurements.at(requested), inputs=GIB)
    monkeypatch.setattr(measurements, "at", lambda _: measured)
    needs = sum_up(measurements, requested, staged=False)
    assert needs["inputs_bytes"] == 2 * GIB and needs["host_bytes"] == HOST + 2 * GIB
    assert needs["copied_per_step"] == 3 * 2 * GIB, "to the host and back at the same time"
    assert moves_inputs(requested)
    assert not moves_inputs(config(offload_activations="auto", gradient_checkpointing="full"))
    with pytest.raises(ConfigError, match="offload_activations: without gradient checkpointing"):
        config(offload_activations="on", gradient_checkpointing="off")


def test_a_language_model_that_does_not_fit_is_streamed() -> None:
    def measure(config: TrainConfig, dtype: torch.dtype, checkpoint: Any) -> Measured:
        return Measured({"model": 8 * GIB}, 1 << 20, GIB // 4, 0, 10**12, blocks={"model": (GIB // 2,) * 15})

    requested = config(gradient_checkpointing="full")
    measurements = Measurements(LanguageModelSpec(torch.bfloat16, measure), requested)
    resident = plan_memory(measurements, requested, 10 * GIB, SPEED)
    assert resident.config.offload == "auto" and resident.estimate["host_bytes"] == HOST
    streamed = plan_memory(measurements, requested, 5 * GIB, SPEED)
    assert streamed.config.offload == "blocks" and streamed.staged and streamed.resident > 2
    assert streamed.estimate["host_bytes"] == HOST + 8 * GIB and streamed.estimate["total_bytes"] <= 5 * GIB
    assert "the base is in host memory, 8.00 GiB; a step copies" in "; ".join(streamed.reasons)
    assert any("blocks streamed" in row.changes for row in plan_table(measurements, requested, SPEED))


@pytest.mark.parametrize(("batch_size", "more"), [(1, 0.5), (4, 1.0)])
def test_the_time_of_prior_prediction_counts_the_prediction_of_the_base(batch_size: int, more: float) -> None:
    needs = {}
    for prior in (False, True):
        requested = config(batch_size=batch_size, gradient_checkpointing="off", prior_prediction=prior)
        needs[prior] = sum_up(Measurements(published("sdxl"), requested), requested, staged=False)
    added = needs[True]["operations_per_step"] - needs[False]["operations_per_step"]
    assert added == more * 10**13 * batch_size
    assert SPEED.seconds(needs[True]) == pytest.approx((1 + more / PASSES["off"]) * SPEED.seconds(needs[False]))


def test_streaming_is_counted_as_it_is_done() -> None:
    requested = config(offload="blocks", gradient_checkpointing="full", gradient_accumulation=3)
    measurements = Measurements(published("sdxl"), requested)
    for resident in (0, 3, 7):
        needs = sum_up(measurements, requested, staged=True, resident=resident)
        assert needs["weights_bytes"] == GIB // 4 + (resident + SLOTS) * GIB // 2
        assert needs["copied_per_step"] == 2 * 3 * (8 - resident) * GIB // 2
        assert needs["host_bytes"] == HOST + int(6.5 * GIB)
        assert len(streamed_blocks(8, resident)) == 8 - resident
    assert needs["caching_bytes"] == GIB // 2 + SLOTS * GIB // 8, (
        "of the encoders, two blocks of the one that is streamed"
    )
    assert streamed_blocks(8, 4) == [0, 2, 4, 6] and streamed_blocks(3, 0) == [0, 1, 2]


def test_copies_hide_behind_the_work_and_conversions_do_not() -> None:
    needs = {"operations_per_step": 1e13, "launches_per_step": 0}
    assert SPEED.seconds(needs) == pytest.approx(0.1)
    assert SPEED.seconds({**needs, "copied_per_step": 4 * GIB}) == pytest.approx(0.1)
    assert SPEED.seconds({**needs, "copied_per_step": 8 * GIB}) == pytest.approx(0.16)
    assert SPEED.seconds({**needs, "converted_per_step": 4e11}) == pytest.approx(0.2)
    assert PRODUCTS.keys() == PASSES.keys() and set(CONVERSION) >= SHRINK.keys() - {"off"}
    assert speed_of(torch.device("cpu"), config()).host == Speed(1.0).host
    old, new = speed_of_card((8, 6), 28), speed_of_card((12, 0), 170)
    assert old.host < new.host and old.rate < new.rate and new.recorded


def test_quantize_auto_chooses_by_time_and_says_so() -> None:
    loose = plan(12, quantize="auto")
    assert loose.config.quantize == "off" and loose.config.gradient_checkpointing == "off"
    tight = plan(8, quantize="auto", gradient_checkpointing="off")
    assert tight.config.quantize in ("int8", "int8-hadamard") and tight.config.gradient_checkpointing == "off"
    assert "quantize int8" in "; ".join(tight.reasons) and tight.changes["quantize"] == tight.config.quantize
    measured = Measurements(published("sdxl"), config(quantize="auto"))
    resumed = plan_run(measured, config(quantize="auto"), 12 * GIB, SPEED, {"quantize": "nf4", "split": 1}, 1)
    assert resumed.config.quantize == "nf4", "the run was started with it"


def test_a_batch_size_fills_what_is_there() -> None:
    for limit, size in ((11.0, 1), (19.0, 3), (40.0, 8)):
        chosen = plan(limit, batch_size="auto", offload="off")
        assert chosen.config.batch_size == size == chosen.changes["batch_size"], limit
        assert chosen.split == 1 and "batch_size" in chosen.reasons[0]
    requested = config(batch_size="auto")
    measured = Measurements(published("sdxl"), requested)
    assert plan_run(measured, requested, 80 * GIB, SPEED, None, 1, 2).config.batch_size == 2, "two images"
    assert plan_run(measured, requested, 80 * GIB, SPEED, {"batch_size": 4, "split": 1}, 1).config.batch_size == 4
    assert requested.batch_size == 0 and limit_for(requested, torch.device("cpu")) is None
    assert TrainConfig.of(dataset="-", batch_size="3").batch_size == 3
    with pytest.raises(MemoryBudgetError):
        plan(1.5, batch_size="auto")


def test_host_memory_is_a_limit_too() -> None:
    assert plan(3.4, gradient_checkpointing="full", ram="10GiB").config.offload == "blocks"
    with pytest.raises(MemoryBudgetError, match=r"ram: 8.00 GiB is not enough; .* only with 9.50 GiB of host memory"):
        plan(3.4, gradient_checkpointing="full", ram="8GiB")
    smaller = plan(3.4, gradient_checkpointing="full", ram="8GiB", quantize="auto")
    assert smaller.config.quantize in ("int8", "int8-hadamard", "nf4")
    assert smaller.estimate["host_bytes"] <= 8 * GIB
    with pytest.raises(ConfigError, match=r"ram: .*is not an amount of memory"):
        config(ram="much")
    assert any("ram: limits runs that are planned" in problem for problem in run_problems(config(ram="8GiB")))
    assert not run_problems(config(ram="8GiB", vram="8GiB"))


def test_the_table_goes_from_the_smallest_to_the_fastest() -> None:
    requested = config(quantize="auto", batch_size=2)
    rows = plan_table(Measurements(published("sdxl"), requested), requested, SPEED)
    assert len(rows) > 3
    assert [row.total_bytes for row in rows] == sorted(row.total_bytes for row in rows)
    assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)
    assert "nf4" in rows[0].changes and "blocks streamed" in rows[0].changes and "full checkpointing" in rows[0].changes
    assert all(row.total_bytes > RESERVE for row in rows)
    bounded = config(quantize="auto", batch_size=2, ram="6GiB")
    assert all(
        row.host_bytes <= 6 * GIB for row in plan_table(Measurements(published("sdxl"), bounded), bounded, SPEED)
    )
    off = config(offload="off")
    assert not any("streamed" in row.changes for row in plan_table(Measurements(published("sdxl"), off), off, SPEED))


def test_a_check_returns_the_table_and_refuses_what_it_cannot_choose(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.undo()  # the bundled model is measured
    more = {"cache_dir": str(tmp_path / "cache"), "output": str(tmp_path / "out"), "resolution": 64}
    requested = config(dataset=str(make_set(tmp_path / "set")), **more)
    complete, _, needs = check(requested.model_copy(update={"quantize": "auto"}), table=True)
    assert complete.quantize == "off" and needs["host_bytes"] >= HOST
    assert needs["plans"] and {"changes", "total_bytes", "host_bytes", "seconds"} == needs["plans"][0].keys()
    assert any("streamed" in row["changes"] for row in needs["plans"])
    with pytest.raises(ConfigError, match=r"batch_size = .auto. fills the memory of a GPU, or vram"):
        check(requested.model_copy(update={"batch_size": 0}))
    filled, _, _ = check(requested.model_copy(update={"batch_size": 0, "vram": "4GiB"}))
    assert filled.batch_size == 2
