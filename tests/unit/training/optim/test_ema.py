"""The moving average of the weights: on the device, against its formula."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load, save

from inweave.errors import ConfigError
from inweave.training.optim.ema import Ema
from tests.unit.training.optim.test_optimizers import (
    EPS,
    LR,
    ONE,
    SHAPES,
    built,
    gradients,
    same,
    spoil,
)


def test_ema_is_its_formula_and_swaps_without_loss() -> None:
    flat, optimizer = built("adamw")
    ema, want = Ema(flat, 0.9), flat.values.double()
    for count, _ in enumerate(gradients(flat.parameters, 20)):
        ok = torch.tensor(count % 4 != 3)
        if not ok:
            spoil(flat, float("nan"))
            average = ema.values.clone()
        optimizer.step(LR, ONE, ok)
        ema.update(ok)
        want = 0.9 * want + 0.1 * flat.values if ok else want
        assert ok or torch.equal(ema.values, average)
    assert ((ema.values - want).abs() <= 20 * 2 * EPS * want.abs().max()).all()
    before = flat.values.clone()
    with pytest.raises(KeyError), ema.eval_weights():
        assert torch.equal(flat.values, ema.values) and not torch.equal(flat.values, before)
        assert torch.equal(flat.parameters["a"], ema.values[flat.segments["a"].place].view(SHAPES["a"]))
        raise KeyError
    assert torch.equal(flat.values, before)
    other = Ema(flat, 0.9)
    other.load(load(save(ema.state())))
    assert same(ema.state(), other.state())
    with pytest.raises(ConfigError):
        Ema(flat, 1.0)
