"""The rounded copies that a step computes with: never those of other values, and gradients at float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inweave.layers import fused
from inweave.models.families.base import Tensors
from inweave.training.loop import Run
from inweave.training.tasks.base import generators_for
from tests.unit.training.tiny import TinyRun, TinyTask, config, make_run

BF16 = torch.bfloat16


class HalfTask(TinyTask):
    """The tiny network in bfloat16."""

    def __init__(self, settings: object) -> None:
        super().__init__(settings, dtype=BF16)  # type: ignore[arg-type]
        self.networks["model"].to(BF16)

    def loss(self, inputs: Tensors) -> torch.Tensor:
        return super().loss({name: value.to(BF16) for name, value in inputs.items()})


@pytest.fixture(autouse=True)
def fused_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DEVICES", frozenset({"cpu"}))


def half_run(output: Path, **settings: object) -> TinyRun:
    chosen = config(output, **settings)
    return make_run(chosen, task=HalfTask(chosen))


def batch(run: Run) -> Tensors:
    return run.task.sample_batch((1, 2), generators_for(3, [(0, 1), (0, 2)]))


def gradients(run: Run) -> torch.Tensor:
    run.step._accumulate(0, [batch(run)])
    return run.flat.grads.clone()


def plain_gradients(run: Run) -> torch.Tensor:
    """Without copies: every layer rounds its own factors, from the parameters, in every forward pass."""
    run.flat.zero_grads()
    run.task.loss(batch(run)).backward()
    return run.flat.grads.clone()


def test_copies_are_those_of_the_values_whatever_wrote_them(tmp_path: Path) -> None:
    run = half_run(tmp_path, ema_decay=0.5, scale_weight_norms=0.1)
    other = half_run(tmp_path / "other", seed=5)

    def check(what: str) -> None:
        assert torch.equal(gradients(run), plain_gradients(run)), what
        assert all(branch.rounded == {} for branch in run.step._branches), "outside of a step there are none"

    def check_loss(what: str) -> None:
        inputs = batch(run)
        with torch.no_grad():
            expected = run.task.loss(inputs)
        assert torch.equal(run.step.eval_loss(inputs), expected), what

    run.train_step()
    check("after an update")
    for _ in range(2):
        run.train_step()
        check("after another")
    check_loss("evaluation")
    with run.step.ema.eval_weights():
        check_loss("of the average")
        check("of the average")
    check("after it")
    run.flat.load(other.flat.state())
    check("of loaded values")
    run.flat.values.normal_()
    check("of the buffer")
    next(iter(run.flat.parameters.values())).data.fill_(0.5)
    check("of a parameter")
    saved = {name: value.clone() for name, value in run.step.state().items()}
    run.train_step()
    run.step.load(saved)
    check("of a resumed run")


def test_gradients_are_those_of_autograd_and_accumulate(tmp_path: Path) -> None:
    run = half_run(tmp_path)
    for _ in range(2):
        run.train_step()
    once = gradients(run)
    run.step._accumulate(0, [batch(run), batch(run)])  # each with half of the weight
    torch.testing.assert_close(run.flat.grads, once, rtol=2e-2, atol=2e-2 * float(once.abs().max()))
    for name, parameter in run.flat.parameters.items():
        assert parameter.grad is not None
        assert parameter.grad.data_ptr() == run.flat.gradients()[name].data_ptr(), "still the flat buffer's view"
    assert bool(once.any())


def test_copies_are_dropped_when_a_step_fails(tmp_path: Path) -> None:
    run = half_run(tmp_path)
    run.task.limit = 0
    with pytest.raises(torch.OutOfMemoryError):
        run.step.micro_step(batch(run))
    assert all(branch.rounded == {} for branch in run.step._branches)
