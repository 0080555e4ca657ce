"""Gradient clipping and the loss scale: on the device, against their formulas."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load, save
from torch import nn

from inweave.errors import ConfigError
from inweave.training.optim.flat import FlatParameters
from inweave.training.optim.loss_scale import LossScaler, clip
from tests.unit.training.optim.test_optimizers import (
    EPS,
    NO,
    YES,
    gradients,
    parameters,
    same,
)


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6])
def test_clip_is_clip_grad_norm(max_norm: float, scale: float) -> None:
    flat, theirs = FlatParameters(parameters()), parameters()
    for p in theirs.values():
        p.grad = torch.zeros_like(p)
    next(zip(gradients(flat.parameters, 1), gradients(theirs, 1), strict=True))
    flat.grads.mul_(scale)
    their_norm = nn.utils.clip_grad_norm_(theirs.values(), max_norm)
    grad_scale, ok, our_norm = clip(flat.grads, max_norm, torch.tensor(scale))
    assert bool(ok) and all(t.dim() == 0 for t in (grad_scale, ok, our_norm))
    # two sums of n squares, and their 1e-6 added to the norm
    off = EPS * flat.grads.numel() ** 0.5 + 1e-6 / float(their_norm)
    assert float(our_norm) == pytest.approx(float(their_norm), rel=off)
    for name, parameter in flat.parameters.items():
        torch.testing.assert_close(parameter.grad * grad_scale, theirs[name].grad, rtol=2 * off, atol=0)


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("max_norm", [None, 1e-2])
def test_clip_by_value_is_clip_grad_value(max_norm: float | None, scale: float) -> None:
    flat, theirs = FlatParameters(parameters()), parameters()
    for p in theirs.values():
        p.grad = torch.zeros_like(p)
    next(zip(gradients(flat.parameters, 1), gradients(theirs, 1), strict=True))
    limit = float(flat.grads.abs().max()) / 4
    norm = float(torch.linalg.vector_norm(flat.grads))
    nn.utils.clip_grad_value_(theirs.values(), limit)
    if max_norm is not None:
        nn.utils.clip_grad_norm_(theirs.values(), max_norm)
    flat.grads.mul_(scale)
    grad_scale, ok, our_norm = clip(flat.grads, max_norm, torch.tensor(scale), limit)
    assert bool(ok) and float(our_norm) == pytest.approx(norm, rel=1e-5)
    for name, parameter in flat.parameters.items():
        torch.testing.assert_close(parameter.grad * grad_scale, theirs[name].grad, rtol=1e-3, atol=0)


def test_an_infinite_gradient_is_seen_before_its_value_is_clipped() -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not bool(clip(torch.tensor([1.0, bad]), None, 1.0, 0.5)[1])


def test_clip_at_the_edges() -> None:
    assert [float(t) for t in clip(torch.zeros(5), 1.0)] == [1.0, 1.0, 0.0]
    assert [float(t) for t in clip(torch.full((4,), 2.0), None, 8.0)] == [0.125, 1.0, 0.5]
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not bool(clip(torch.tensor([1.0, bad]), 1.0)[1])
    with pytest.raises(ConfigError):
        clip(torch.zeros(5), 0.0)


def test_loss_scale_grows_shrinks_and_stays_in_bounds() -> None:
    scaler = LossScaler("cpu", interval=3)
    scales = []
    for ok in (1, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1):
        scaler.update(torch.tensor(bool(ok)))
        scales.append(float(scaler.scale) / 65536)
    assert scales == [1, 1, 2, 2, 2, 1, 1, 1, 0.5, 0.5, 0.5, 1]
    assert int(scaler.skipped) == 2
    other = LossScaler("cpu", interval=3)
    other.load(load(save(scaler.state())))
    assert same(scaler.state(), other.state())
    for _ in range(40):
        scaler.update(NO)
    assert float(scaler.scale) == 1.0 and int(scaler.skipped) == 42
    for _ in range(100):
        scaler.update(YES)
    assert float(scaler.scale) == 2.0**24
    first = LossScaler("cpu")
    for count in range(1, 2001):
        first.update(YES)
        assert float(first.scale) == (65536 if count < 2000 else 131072)
