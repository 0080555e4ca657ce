"""Noise and masked loss as kohya's scripts compute them (library/custom_train_functions.py), written out again here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inweave.training.config.schema import TrainConfig
from inweave.training.config.validation import run_problems
from inweave.training.tasks.losses import image_loss
from inweave.training.tasks.objective import Objective
from tests.unit.training.image_sets import make_set, sample_inputs, task_on

ALPHAS = torch.linspace(0.999, 0.01, 1000)
SHAPE = (1, 4, 8, 6)


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("scale", [0.2, -0.9])
@pytest.mark.parametrize("random", [False, True])
def test_adaptive_and_random_offsets(scale: float, random: bool) -> None:
    latents = torch.randn(SHAPE, generator=generator(1)) + torch.tensor([0.0, 1.0, -2.0, 0.1]).reshape(1, 4, 1, 1)
    objective = Objective("epsilon", ALPHAS, noise_offset=0.05, noise_offset_random=random, adaptive_noise_scale=scale)
    source = generator()
    noise = torch.randn(SHAPE, generator=source)
    strength = float(torch.rand((), generator=source)) * 0.05 if random else 0.05
    offset = torch.clamp(strength + scale * torch.abs(latents.mean(dim=(2, 3), keepdim=True)), 0.0, None)
    expected = noise + offset * torch.randn((1, 4, 1, 1), generator=source)
    torch.testing.assert_close(objective.draw_noise(SHAPE, generator(), latents[0]), expected)
    assert scale > 0 or float(offset.min()) == 0, "a negative scale is cut at no offset"


def test_the_input_is_perturbed_and_the_target_is_not() -> None:
    objective = Objective("epsilon", ALPHAS, input_perturbation=0.1)
    noise = objective.draw_perturbation(SHAPE, generator())
    torch.testing.assert_close(noise, 0.1 * torch.randn(SHAPE, generator=generator()))
    source = generator()
    strength = float(torch.rand((), generator=source)) * 0.1
    random = Objective("epsilon", ALPHAS, input_perturbation=0.1, input_perturbation_random=True)
    torch.testing.assert_close(
        random.draw_perturbation(SHAPE, generator()), strength * torch.randn(SHAPE, generator=source)
    )


def test_a_perturbed_input_is_trained_against_the_plain_target(tmp_path: Path) -> None:
    data = make_set(tmp_path / "set")
    inputs = sample_inputs(task_on(data, input_perturbation=0.5))
    plain = sample_inputs(task_on(data))
    assert all(torch.equal(plain[name], inputs[name]) for name in plain) and "perturbation" not in plain
    task = task_on(data)
    moved = float(task.loss(inputs))
    assert moved != pytest.approx(float(task.loss(plain)), rel=1e-3)
    nothing = {**inputs, "perturbation": torch.zeros_like(inputs["noise"])}
    assert float(task.loss(nothing)) == pytest.approx(float(task.loss(plain)), rel=1e-6)


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 2.0])])
def test_a_masked_loss_averages_over_the_image_or_the_mask(weights: torch.Tensor | None) -> None:
    prediction, target = torch.randn(2, 2, 4, 8, 6, generator=generator())
    mask = (torch.rand(2, 1, 8, 6, generator=generator(5)) < 0.3).float()
    masked = (prediction - target).square() * mask
    each = masked.mean(dim=[1, 2, 3])  # kohya's: the mask makes values zero, and all of them count
    expected = (each * (1 if weights is None else weights)).mean()
    torch.testing.assert_close(image_loss(prediction, target, weights, mask, average="image"), expected)
    share = mask.mean(dim=[1, 2, 3])
    ours = (each / share * (1 if weights is None else weights)).mean()
    torch.testing.assert_close(image_loss(prediction, target, weights, mask), ours)


def test_what_changes_an_offset_needs_one() -> None:
    for setting in ({"adaptive_noise_scale": 0.01}, {"noise_offset_random": True}):
        (problem,) = run_problems(TrainConfig.of(dataset="x", **setting))
        assert "there is none; set it" in problem
        assert run_problems(TrainConfig.of(dataset="x", noise_offset=0.05, **setting)) == []
