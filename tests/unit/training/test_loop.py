"""A run ends with the same bits however often it was stopped, and logs what it does."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from inweave.errors import ConfigError, FormatError, InweaveError, MemoryBudgetError
from inweave.training.checkpoint.store import checkpoints, load_state
from inweave.training.loop import Run
from inweave.training.output.result import DONE, STOPPED
from inweave.training.output.samples import SampleImage
from tests.unit.training.tiny import EVERYTHING, OPTIMIZERS, config, file_bits, log, make_run, state_bits, tiny


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_resumed_after_any_step_is_the_straight_one(optimizer: str, tmp_path: Path) -> None:
    settings = {**EVERYTHING, "hidden_dropout": 0.2, "rank_dropout": 0.2, "optimizer": optimizer}
    straight = tiny(tmp_path / "straight", save_every=1, keep_last=0, **settings)
    report = straight.train()
    assert report.step == 8 and len(report.losses) == 8
    assert len({tuple(sorted(batch)) for batch in straight.task.sampled_batches}) > 4, (
        "the order must have something to get wrong"
    )
    for k in range(1, 8):
        folder = tmp_path / f"from-{k}"
        (folder / "t-state").mkdir(parents=True)
        shutil.copytree(tmp_path / "straight" / "t-state" / f"step-{k:06d}", folder / "t-state" / f"step-{k:06d}")
        torch.manual_seed(k)  # a new process has another global generator
        run = tiny(folder, resume="auto", **settings)
        again = run.train()
        assert run.task.sampled_batches == straight.task.sampled_batches[2 * k :]
        assert again.losses == report.losses[k:]
        assert state_bits(run) == state_bits(straight)
        assert file_bits(again.path) == file_bits(report.path)


def test_the_steps_change_something_and_so_does_every_source_of_randomness(tmp_path: Path) -> None:
    """What the test above compares is not constant."""
    adapters = [file_bits(tiny(tmp_path / "all", **EVERYTHING).train().path)]
    others: tuple[dict[str, Any], ...] = (
        {"dropout": 0.0},
        {"hidden_dropout": 0.2},
        {"rank_dropout": 0.2},
        {"dropout": 0.0, "hidden_dropout": 0.2},  # on its own
        {"ema_decay": 0.0},
        {"caption_dropout": 0.0},
        {"seed": 1},
        {"gradient_accumulation": 1},
        {"lr_scheduler": "constant"},
    )
    for number, other in enumerate(others):
        adapters.append(file_bits(tiny(tmp_path / str(number), **{**EVERYTHING, **other}).train().path))
    assert len({tuple(sorted(bits.items())) for bits in adapters}) == len(adapters)


def test_no_random_value_is_sampled_twice(tmp_path: Path) -> None:
    run = tiny(tmp_path, gradient_accumulation=2)
    original, numbers = run.task.sample_batch, list[float]()

    def sample_batch(*arguments: Any) -> Any:
        inputs = original(*arguments)
        numbers.extend(inputs["noise"].flatten().tolist())
        return inputs

    run.task.sample_batch = sample_batch  # type: ignore[method-assign, assignment]
    run.train()
    assert len(numbers) > 500 and len(set(numbers)) > 0.999 * len(numbers)


def test_the_file_holds_the_ema_weights(tmp_path: Path) -> None:
    averaged = tiny(tmp_path / "a", ema_decay=0.5)
    path = averaged.train().path
    assert averaged.step.ema is not None
    with averaged.step.ema.eval_weights():
        expected = {value.numpy().tobytes() for value in averaged.flat.state().values()}
    assert set(file_bits(path).values()) == expected
    assert expected != {value.numpy().tobytes() for value in averaged.flat.state().values()}
    free = tiny(tmp_path / "f", optimizer="schedulefree")
    path = free.train().path
    with free.step.optimizer.eval_weights():
        expected = {value.numpy().tobytes() for value in free.flat.state().values()}
    assert set(file_bits(path).values()) == expected
    assert expected != {value.numpy().tobytes() for value in free.flat.state().values()}


def test_training_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    run = tiny(tmp_path, dropout=0.5)
    before = torch.random.get_rng_state()
    run.train()
    assert torch.equal(before, torch.random.get_rng_state())


# interrupts


def interrupting(run: Run, at: int, times: int) -> None:
    original, count = run.task.sample_batch, iter(range(10**6))

    def sample_batch(*arguments: Any) -> Any:
        if next(count) == at:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments)

    run.task.sample_batch = sample_batch  # type: ignore[method-assign, assignment]


def test_one_interrupt_finishes_the_step_and_saves(tmp_path: Path) -> None:
    straight = tiny(tmp_path / "straight").train()
    run = tiny(tmp_path / "stopped")
    interrupting(run, at=2, times=1)
    report = run.train()
    assert (report.reason, report.step, report.path.name) == (STOPPED, 3, "t-000003")
    assert len(report.losses) == 3
    assert [path.name for path in checkpoints(tmp_path / "stopped" / "t-state")] == ["step-000003"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handler of before is back"
    assert file_bits(tiny(tmp_path / "stopped", resume="auto").train().path) == file_bits(straight.path)


def test_two_interrupts_stop_now_and_leave_the_last_checkpoint_whole(tmp_path: Path) -> None:
    run = tiny(tmp_path, save_every=1)
    interrupting(run, at=4, times=2)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert load_state(checkpoints(tmp_path / "t-state")[0]).step == 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert tiny(tmp_path, resume="auto", save_every=1).train().reason == DONE


# numbers that are not finite


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("poison", ["nan", "inf", "gradient", "loss"])
def test_a_skipped_step_changes_nothing_and_is_counted(poison: str, optimizer: str, tmp_path: Path) -> None:
    run = tiny(tmp_path, ema_decay=0.9, optimizer=optimizer)
    run.train_step()
    before = state_bits(run)
    run.task.poison = poison
    run.train_step()
    after = state_bits(run)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"skipped", "skipped_in_a_row"} and (int(run.step.skipped), int(run.step.skipped_in_a_row)) == (
        1,
        1,
    )
    run.task.poison = ""
    run.train_step()
    assert (int(run.step.skipped), int(run.step.skipped_in_a_row)) == (1, 0)
    assert state_bits(run) != after


def test_consecutive_skipped_steps_stop_the_run_and_keep_the_good_weights(tmp_path: Path) -> None:
    run = tiny(tmp_path, max_skipped_steps=3, log_every=100)
    for _ in range(2):
        run.train_step()
    good = state_bits(run)
    run.task.poison = "nan"
    with pytest.raises(
        InweaveError,
        match=r"3 steps in a row .*t-000005.*start_from.*learning rate is too high, or the data contains NaN",
    ):
        run.train()
    saved = load_state(checkpoints(tmp_path / "t-state")[0]).tensors
    assert all(
        saved[name].numpy().tobytes() == bits for name, bits in good.items() if name.startswith(("values", "optim"))
    )
    assert log(tmp_path)[-1]["event"] == "stopped"
    assert tiny(tmp_path, resume="auto").train().reason == DONE


def test_half_precision_scales_the_loss_and_reports_what_it_skips(tmp_path: Path) -> None:
    run = tiny(tmp_path, dtype=torch.float16, steps=20, batch_size=1)
    assert run.step.scaler is not None
    run.step.scaler.scale.fill_(2.0**24)
    report = run.train()
    assert 1 <= report.skipped_steps < 15 and report.skipped_steps == log(tmp_path)[-2]["skipped_steps"]
    scales = [record["loss_scale"] for record in log(tmp_path) if "loss" in record]
    assert scales[0] == 2.0**23 and scales[-1] == 2.0 ** (24 - report.skipped_steps)
    assert all(value.isfinite().all() for value in run.flat.state().values())
    assert report.losses[-1] < report.losses[0]


# memory


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_step_that_does_not_fit_is_split_into_micro_batches(limit: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "batch_size": 4,
        "gradient_accumulation": 2,
        "steps": 4,
        "learning_rate": 1e-3,
        "save_every": 2,
    }
    whole = tiny(tmp_path / "whole", **settings)
    losses = whole.train().losses
    small = tiny(tmp_path / "small", **settings)
    small.task.limit = limit
    report = small.train()
    # sums of at most 4 * 3 * 8 squares in another order: each addition rounds by half an ulp of a sum below 8
    assert report.losses == pytest.approx(losses, abs=96 * 8 * 2**-24)
    # a step of Adam moves a weight by at most the rate, whichever way rounding turns a gradient near zero; it does so
    # only there, so all but a few agree to the rounding of the gradients
    apart = (small.flat.values - whole.flat.values).abs()
    assert apart.max() <= 2 * 4 * 1e-3 and (apart > 1e-5).float().mean() < 0.02
    assert {record["split"] for record in log(tmp_path / "small") if "loss" in record} == {2 if limit > 1 else 4}
    again = tiny(tmp_path / "small", resume=str(tmp_path / "small" / "t-state" / "step-000002"), **settings)
    assert again.train().losses == report.losses[2:], (
        "a resumed run uses the same micro-batches, without running out of memory again"
    )


def test_one_example_that_does_not_fit_says_what_to_change(tmp_path: Path) -> None:
    tiny(tmp_path, steps=1).train()
    run = tiny(tmp_path, steps=2, resume="auto")
    run.task.limit = 0
    with pytest.raises(MemoryBudgetError, match=r'one example.*gradient_checkpointing = "full".*resolution.*1 GiB'):
        run.train()
    assert load_state(checkpoints(tmp_path / "t-state")[0]).step == 1


def test_an_optimizer_that_does_not_fit_says_what_to_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("no")

    run = tiny(tmp_path)
    monkeypatch.setattr(run.step.optimizer, "step", short)
    with pytest.raises(MemoryBudgetError, match="adamw8bit"):
        run.train()


def test_an_adapter_that_cannot_be_gathered_leaves_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr("inweave.training.loop.collect_adapters", short)
    with pytest.raises(MemoryBudgetError, match="with --resume"):
        tiny(tmp_path).train()
    monkeypatch.undo()
    assert tiny(tmp_path, resume="auto").train().losses == [], "the steps are done; only the file was missing"


def test_a_run_whose_steps_were_all_skipped_is_not_finished(tmp_path: Path) -> None:
    run = tiny(tmp_path, steps=3)
    run.task.poison = "nan"
    with pytest.raises(InweaveError, match="3 steps in a row had a loss or gradients that are not finite"):
        run.train()
    assert not (tmp_path / "t").exists()


def test_an_adapter_beyond_fp16_is_kept_in_float32_when_a_run_stops(tmp_path: Path) -> None:
    run = tiny(tmp_path, steps=9, save_dtype="fp16", max_skipped_steps=2)
    run.flat.values[:4] = 1e6
    run.task.poison = "nan"
    with pytest.raises(
        InweaveError, match=r"the adapter from before them is .*t-000002.*Likely cause: the learning rate"
    ):
        run.train()
    assert max(abs(np.frombuffer(raw, np.float32)).max() for raw in file_bits(tmp_path / "t-000002").values()) == 1e6


# samples


def test_samples_change_no_bit_and_see_the_average_without_dropout(tmp_path: Path) -> None:
    plain = tiny(tmp_path / "plain", **EVERYTHING)
    plain.train()
    run = tiny(tmp_path / "shown", sample_every=2, **EVERYTHING)
    steps: list[int] = []

    def draw(step: int) -> list[SampleImage]:
        torch.rand(step)  # moves the global generator, as a library may
        assert not any(module.training for module in run.task.networks["model"].modules())
        assert run.step.ema is not None and torch.equal(run.flat.values, run.step.ema.values)
        steps.append(step)
        return [SampleImage(tmp_path / f"{step}.png", ("in tiles",) if step == 4 else ())]

    run.train(sample=draw)
    assert steps == [2, 4, 6, 8]
    assert state_bits(run) == state_bits(plain)
    samples = [record for record in log(tmp_path / "shown") if record.get("event") == "sample"]
    assert [(record["step"], Path(record["path"]).name) for record in samples] == [(n, f"{n}.png") for n in steps]
    assert [record.get("text") for record in samples] == [None, "in tiles", None, None]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), FormatError("no file"), RuntimeError("no luck")]
)
def test_a_sample_that_fails_does_not_end_the_run(error: Exception, tmp_path: Path) -> None:
    plain = tiny(tmp_path / "plain", ema_decay=0.9)
    plain.train()
    run = tiny(tmp_path / "failing", ema_decay=0.9, sample_every=4)

    def draw(step: int) -> list[SampleImage]:
        raise error

    assert run.train(sample=draw).reason == DONE
    assert state_bits(run) == state_bits(plain)
    failed = [record for record in log(tmp_path / "failing") if record.get("event") == "sample failed"]
    assert [record["step"] for record in failed] == [4, 8] and str(error) in failed[0]["text"]


# validation


def test_validation_is_deterministic_and_of_the_weights_that_are_saved(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**EVERYTHING, "validation_split": 0.3, "save_every": 2}
    one, two = tiny(tmp_path / "1", **settings), tiny(tmp_path / "2", **settings)
    validation = one.train().validation
    torch.manual_seed(99)
    assert two.train().validation == validation and [step for step, _ in validation] == [2, 4, 6, 8]
    assert one.validate() == validation[-1][1] == one.validate(), "dropout must be off"
    held_out = {number for batch in one.task.held_out for number in batch}
    assert held_out == {7, 8, 9}
    trained = one.task.sampled_batches[: len(one.task.sampled_batches)]
    assert {number for batch in trained if batch not in one.task.held_out for number in batch} == set(range(7))
    with one._eval_weights():
        averaged = one.flat.values.clone()
    assert not torch.equal(averaged, one.flat.values)
    recorded = [record["validation"] for record in log(tmp_path / "1") if record.get("event") == "validation"]
    assert recorded == [loss for _, loss in validation]


def test_patience_ends_a_run_that_gets_no_better_also_after_a_resume(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "validation_split": 0.3,
        "save_every": 1,
        "patience": 3,
        "steps": 40,
        "learning_rate": 0.5,
        "keep_last": 0,
    }
    straight = tiny(tmp_path / "straight", **settings).train()
    assert straight.reason.startswith("no better validation loss for 3 times; the best was") and straight.step < 40
    losses = [loss for _, loss in straight.validation]
    best = losses.index(min(losses))
    assert len(losses) - 1 - best >= 3 and f"at step {straight.validation[best][0]}" in straight.reason
    then = tmp_path / "straight" / f"t-{straight.validation[best][0]:06d}"
    assert file_bits(tmp_path / "straight" / "t-best") == file_bits(then)
    middle = straight.step - 1
    checkpoint = tmp_path / "straight" / "t-state" / f"step-{middle:06d}"
    resumed = tiny(tmp_path / "resumed", resume=str(checkpoint), **settings).train()
    assert (resumed.step, resumed.validation) == (straight.step, straight.validation)
    assert straight.reason == f"{resumed.reason}, saved as t-best", "the resumed run started in another folder"
    over = tiny(tmp_path / "straight", **{**settings, "resume": "auto"}).train()
    assert (over.step, over.losses) == (straight.step, []), "what has ended stays ended"


def test_without_checkpoints_validation_runs_once_per_epoch(tmp_path: Path) -> None:
    run = tiny(tmp_path, validation_split=0.2, steps=9)
    assert len(run.task.order) == 5
    assert [step for step, _ in run.train().validation] == [5, 9]


def test_a_validation_split_of_no_example_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"validation_split: a share of 0.01"):
        tiny(tmp_path, validation_split=0.01)


def test_the_hashes_of_the_base_are_in_the_file(tmp_path: Path) -> None:
    """They are computed in the background, and the run waits for them at the end."""
    base = tmp_path / "base.safetensors"
    save_file({"weight": torch.arange(400_000, dtype=torch.float32)}, base)
    report = make_run(config(tmp_path / "out", steps=1), base_file=base).train()
    with safe_open(report.path / "adapter_model.safetensors", "pt") as file:
        metadata = file.metadata()
    raw = base.read_bytes()
    assert metadata["ss_new_sd_model_hash"] == hashlib.sha256(raw).hexdigest()
    assert metadata["ss_sd_model_hash"] == hashlib.sha256(raw[0x100000:0x110000]).hexdigest()[:8]


def test_what_was_to_be_ignored_stays_ignored(tmp_path: Path) -> None:
    """A run in a shell's background does not end with the Ctrl-C that was meant for another process."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = tiny(tmp_path, steps=2)
        run.task.sample_batch = _interrupting(run.task.sample_batch)  # type: ignore[method-assign]
        assert run.train().reason == DONE
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupting(original: Any) -> Any:
    def sample_batch(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments)

    return sample_batch
