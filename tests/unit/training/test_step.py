"""One update: split batches and micro-batches add up to the large batch, and several processes to one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from inweave.models.families.base import Tensors
from inweave.training.distributed.world import World
from inweave.training.execution.capture import optimizer_problem
from inweave.training.loop import Run
from inweave.training.tasks.base import generators_for
from tests.unit.training.tiny import state_bits, tiny

EPS = 2.0**-24  # half an ulp: what one rounding costs


def batches(run: Run, *rows: tuple[int, ...]) -> list[Tensors]:
    return [run.task.sample_batch(batch, generators_for(3, [(0, number) for number in batch])) for batch in rows]


def joined(parts: list[Tensors]) -> Tensors:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def gradients(run: Run, micro_batches: list[Tensors]) -> tuple[torch.Tensor, float]:
    run.step._accumulate(0, micro_batches)
    return run.flat.grads.clone(), float(run.step.loss)


def rounding_bound(run: Run, micro_batches: list[Tensors]) -> torch.Tensor:
    """How far two orders of the same sums may lie apart.

    A gradient is a sum over all rows of products; those of one row are computed alike in both orders. Each of the n
    additions rounds by EPS of a partial sum, which is at most the sum of the rows' magnitudes; one more rounding a row
    comes from its share of the mean.
    """
    rows = joined(micro_batches)
    count = len(rows["rows"])
    singles = [
        gradients(run, [{name: value[i : i + 1] for name, value in rows.items()}])[0].abs() for i in range(count)
    ]
    length = rows["rows"].shape[1]
    return 2 * (count * length + 2) * EPS * torch.stack(singles).sum(0) / count + 1e-12


@pytest.mark.parametrize("optimizer", ["adamw", "prodigy", "lion"])
def test_parts_that_stopped_keep_their_values_and_have_no_part_in_the_norm(optimizer: str, tmp_path: Path) -> None:
    """Here to_k takes the part of a text encoder: its names begin like theirs."""
    run = tiny(tmp_path, optimizer=optimizer, weight_decay=0.1, train_text_encoders=True, text_encoder_stop=3)
    segments = {name.replace("model.to_k", "te1.to_k"): place for name, place in run.flat.segments.items()}
    run.flat.segments = segments
    stopped = [name for name in segments if name.startswith("te")]
    history = []
    for _ in range(6):
        run.train_step()
        history.append({name: run.flat.values[place].clone() for name, (place, _) in segments.items()})
    assert stopped and all(torch.equal(history[2][name], history[5][name]) for name in stopped)
    assert any(not torch.equal(history[1][name], history[2][name]) for name in stopped)
    others = segments.keys() - set(stopped)
    assert any(not torch.equal(history[4][name], history[5][name]) for name in others)
    own = torch.cat([run.flat.grads[segments[name].place] for name in others])
    torch.testing.assert_close(run.step.norm, own.norm())


@pytest.mark.parametrize("rows", [((1, 2), (4, 5)), ((1,), (2,), (4,), (5,))])
def test_accumulation_is_the_large_batch(rows: tuple[tuple[int, ...], ...], tmp_path: Path) -> None:
    run = tiny(tmp_path)
    for _ in range(2):  # "up" starts at zero, and "down" then has no gradient
        run.train_step()
    parts = batches(run, *rows)
    added, loss = gradients(run, parts)
    at_once, whole = gradients(run, [joined(parts)])
    allowed = rounding_bound(run, parts)
    assert (added - at_once).abs().le(allowed).all()
    assert allowed.max() < 1e-4 * at_once.abs().max(), "the tolerance must be able to fail"
    assert loss == pytest.approx(whole, rel=2 * 4 * 3 * 8 * EPS)
    other, _ = gradients(run, [joined(batches(run, (1, 2), (4, 7)))])
    assert not (added - other).abs().le(allowed).all()


@pytest.mark.parametrize("split", [2, 3, 4])
def test_parts_of_a_batch_are_the_batch(split: int, tmp_path: Path) -> None:
    """Five rows cannot be split evenly: each micro-batch counts by its rows."""
    run = tiny(tmp_path)
    for _ in range(2):
        run.train_step()
    micro_batches = [joined(batches(run, (1, 2), (4, 5, 7)))]
    whole, loss = gradients(run, micro_batches)
    run.step.split = split
    cut, same = gradients(run, micro_batches)
    run.step.split = 1
    assert (whole - cut).abs().le(rounding_bound(run, micro_batches)).all() and same == pytest.approx(
        loss, rel=2 * 4 * 3 * 8 * EPS
    )
    run.step.split = split
    assert float(run.step.eval_loss(micro_batches[0])) == pytest.approx(loss, rel=2 * 4 * 3 * 8 * EPS)


def test_two_processes_are_one_with_twice_the_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients added up by hand: the same bits, dropout included."""
    settings: dict[str, Any] = {"dropout": 0.25, "caption_dropout": 0.5, "steps": 3}
    one = tiny(tmp_path / "one", gradient_accumulation=2, **settings)
    two = [tiny(tmp_path / str(rank), world=World(2, rank), **settings) for rank in (0, 1)]
    for number in range(3):
        gathered: list[list[torch.Tensor]] = [[], []]
        for rank in (0, 1):  # first only to see what each would send
            monkeypatch.setattr(
                World, "add_up", lambda self, tensor, gathered=gathered, **_: gathered[self.rank].append(tensor.clone())
            )
            monkeypatch.setattr(two[rank].step.optimizer, "step", lambda *_: None)
            two[rank].train_step()
            two[rank].number = number
            monkeypatch.undo()
        sums = [first + second for first, second in zip(*gathered, strict=True)]
        for rank in (0, 1):
            reduced = iter(sums)
            monkeypatch.setattr(World, "add_up", lambda self, tensor, reduced=reduced, **_: tensor.copy_(next(reduced)))
            two[rank].train_step()
            monkeypatch.undo()
        one.train_step()
        assert state_bits(two[0]) == state_bits(two[1])
        assert {n: b for n, b in state_bits(two[0]).items() if n != "skipped"} == {
            n: b for n, b in state_bits(one).items() if n != "skipped"
        }
    assert sorted(two[0].task.sampled_batches[1::2] + two[1].task.sampled_batches[1::2]) == sorted(
        one.task.sampled_batches
    )


def test_the_state_is_all_there_is(tmp_path: Path) -> None:
    run = tiny(tmp_path / "a", ema_decay=0.9, dropout=0.1, dtype=torch.float16)
    for _ in range(3):
        run.train_step()
    run.step.split = 2
    other = tiny(tmp_path / "b", ema_decay=0.9, dropout=0.1, dtype=torch.float16)
    other.step.load({name: value.clone() for name, value in run.step.state().items()})
    other.number = run.number
    for _ in range(2):
        run.train_step()
        other.train_step()
        assert state_bits(run) == state_bits(other) and torch.equal(run.step.loss, other.step.loss)


def test_a_micro_step_is_a_function_of_static_tensors(tmp_path: Path) -> None:
    """Twice on the same tensors adds twice, and nothing it reads or writes has moved."""
    run = tiny(tmp_path)
    for _ in range(2):
        run.train_step()
    step = run.step
    one, other = batches(run, (1, 2), (4, 5))
    inputs = step.inputs.stage(one)
    addresses = {name: value.data_ptr() for name, value in inputs.items()}
    flat = run.flat.values.data_ptr(), run.flat.grads.data_ptr(), step.loss.data_ptr()
    run.flat.zero_grads()
    step.loss.zero_()
    step.share.fill_(0.5)
    step.micro_step(inputs)
    once, loss = run.flat.grads.clone(), float(step.loss)
    step.micro_step(inputs)
    assert torch.equal(run.flat.grads, 2 * once) and float(step.loss) == 2 * loss
    assert once.abs().max() > 0
    staged = step.inputs.stage(other)
    assert {name: value.data_ptr() for name, value in staged.items()} == addresses
    assert torch.equal(staged["rows"], other["rows"]) and staged["rows"] is not other["rows"]
    assert flat == (run.flat.values.data_ptr(), run.flat.grads.data_ptr(), step.loss.data_ptr())


def test_a_replay_is_outside_of_the_kernels_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside, reading an attribute of a tensor takes microseconds, and an update reads those of every parameter."""
    run = tiny(tmp_path)
    entries: list[str] = []

    @contextmanager
    def recorded_entry(device: torch.device, *, deterministic: bool) -> Iterator[None]:
        entries.append(device.type)
        yield

    monkeypatch.setattr("inweave.training.step.step_kernels", recorded_entry)
    run.train_step()
    assert entries == ["cpu"]
    monkeypatch.setattr(run.step.graphs, "run", lambda key, work, **options: None)
    run.train_step()
    assert entries == ["cpu"]


def test_a_run_reports_why_its_update_cannot_be_captured(tmp_path: Path) -> None:
    assert tiny(tmp_path / "a").step.capture_problems == ["device cpu: only NVIDIA GPUs have CUDA graphs"]
    # of an optimizer that cannot be captured, forward and backward passes still can
    step = tiny(tmp_path / "b", optimizer="adafactor").step
    assert step.capture_problems == ["device cpu: only NVIDIA GPUs have CUDA graphs"]
    assert optimizer_problem(step.config) == f"adafactor: {step.optimizer.capture_problem}"
    assert optimizer_problem(tiny(tmp_path / "c").step.config) is None
