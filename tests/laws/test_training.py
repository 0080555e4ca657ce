"""Training against reference implementations, by running both: schedules, averages, optimizers, timesteps, predictions.

What else is compared: samplers and images with diffusers' pipelines (`tests/peers/test_families.py`), noise with
diffusers' schedulers (`tests/unit/training/tasks/test_objective.py`), AdamW and other optimizers with the own classes
of their libraries (`tests/unit/training/optim`), whole runs with PEFT (`tests/peers/test_train_parity.py`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from inweave.training.config.schema import TrainConfig
from inweave.training.optim.adamw import make_optimizer
from inweave.training.optim.ema import Ema
from inweave.training.optim.flat import FlatParameters
from inweave.training.optim.schedules import learning_rate_at
from inweave.training.session import check, prepare
from inweave.training.tasks.losses import image_loss
from inweave.training.tasks.objective import Objective
from tests.unit.training.tiny import tiny

TOTAL = 60
#: our settings -> the schedule of diffusers and transformers, and its arguments
SCHEDULES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"lr_scheduler": "constant"}, "constant_with_warmup", {}),
    ({"lr_scheduler": "linear"}, "linear", {}),
    ({"lr_scheduler": "cosine"}, "cosine", {}),
    ({"lr_scheduler": "cosine", "cosine_cycles": 3}, "cosine_with_restarts", {"num_cycles": 3}),
    ({"lr_scheduler": "polynomial", "polynomial_power": 2.0}, "polynomial", {"power": 2.0}),
    ({"lr_scheduler": "cosine", "lr_min_ratio": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
]


def reference_rates(library: str, name: str, warmup: int, options: dict[str, Any]) -> list[float]:
    """The multipliers of TOTAL steps and of the one after them."""
    module = pytest.importorskip("diffusers.optimization" if library == "diffusers" else "transformers.optimization")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    if name == "polynomial":
        made = module.get_polynomial_decay_schedule_with_warmup(optimizer, warmup, TOTAL, lr_end=0.0, **options)
    elif library == "transformers" and options:
        made = module.get_scheduler(name, optimizer, warmup, TOTAL, scheduler_specific_kwargs=options)
    else:
        made = module.get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=TOTAL, **options)
    rates = []
    for _ in range(TOTAL + 1):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        made.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("library", ["diffusers", "transformers"])
@pytest.mark.parametrize(("settings", "name", "options"), SCHEDULES)
def test_learning_rates_are_the_libraries(
    settings: dict[str, Any], name: str, options: dict[str, Any], library: str, warmup: int
) -> None:
    """After the warmup every rate is theirs; in it ours is a step ahead, because theirs wastes one at a rate of 0."""
    if library == "diffusers" and name == "cosine_with_min_lr":
        pytest.skip("diffusers has no such schedule")
    config = TrainConfig.of(dataset="d", steps=TOTAL, warmup=warmup, **settings)
    theirs = reference_rates(library, name, warmup, options)
    mine = [learning_rate_at(config, step, TOTAL) for step in range(TOTAL)]
    assert mine[warmup:] == pytest.approx(theirs[warmup:TOTAL], abs=1e-12)
    assert mine[:warmup] == pytest.approx(theirs[1 : warmup + 1], abs=1e-12)


@pytest.mark.parametrize("library", ["diffusers", "torch"])
def test_the_average_of_a_run_is_the_libraries(library: str, tmp_path: Path) -> None:
    """Both libraries copy the weights in their first update; from the second on they average."""
    run = tiny(tmp_path, steps=12, ema_decay=0.9)
    values = nn.Parameter(run.flat.values.clone())
    holder = nn.ParameterList([values])
    if library == "diffusers":
        reference: Any = pytest.importorskip("diffusers.training_utils").EMAModel(
            holder.parameters(), decay=0.9, min_decay=0.9
        )
        reference.optimization_step = 1
    else:
        swa = torch.optim.swa_utils
        reference = swa.AveragedModel(holder, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))
        reference.n_averaged += 1
    for _ in range(12):
        run.train_step()
        with torch.no_grad():
            values.copy_(run.flat.values)
        reference.step(holder.parameters()) if library == "diffusers" else reference.update_parameters(holder)
    average = reference.shadow_params[0] if library == "diffusers" else next(reference.parameters())
    assert isinstance(run.step.ema, Ema)
    torch.testing.assert_close(run.step.ema.values, average.detach(), rtol=1e-5, atol=1e-7)
    assert (run.step.ema.values - run.flat.values).abs().max() > 1e-3, "the comparison can fail"


@pytest.mark.parametrize(
    ("name", "module", "kind", "options"),
    [
        ("prodigy", "prodigyopt", "Prodigy", {"betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-7}),
        ("schedulefree", "schedulefree", "AdamWScheduleFree", {"betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-7}),
    ],
)
def test_optimizers_with_a_state_of_the_run_are_their_libraries(
    name: str, module: str, kind: str, options: dict[str, Any]
) -> None:
    """The law of `tests/unit/training/optim/test_library_optimizers.py`, for those whose evaluation weights differ."""
    library = pytest.importorskip(module)
    rate = 1.0 if name == "prodigy" else 0.01
    start = {key: torch.randn(shape) for key, shape in {"a": (8, 5), "b": (5, 8)}.items()}
    ours = {key: nn.Parameter(value.clone()) for key, value in start.items()}
    theirs = {key: nn.Parameter(value.clone()) for key, value in start.items()}
    flat = FlatParameters(ours)
    optimizer = make_optimizer(name, flat, weight_decay=0.1, betas=(0.9, 0.95), epsilon=1e-7, learning_rate=rate)
    peer: Any = getattr(library, kind)(theirs.values(), lr=rate, **options)
    peer.train() if name == "schedulefree" else None
    for _ in range(25):
        for key, parameter in theirs.items():
            parameter.grad = torch.randn(parameter.shape)
            flat.parameters[key].grad.copy_(parameter.grad)  # type: ignore[union-attr]
        optimizer.step(torch.tensor(rate), torch.tensor(1.0), torch.tensor(True))
        peer.step()
    peer.eval() if name == "schedulefree" else None
    with optimizer.eval_weights():
        for key in ours:
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5, atol=1e-7)
    assert all((ours[key] - start[key]).abs().max() > 1e-5 for key in ours)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (-0.5, 0.7)])
def test_noise_levels_are_drawn_as_in_sd3(mean: float, std: float) -> None:
    utilities = pytest.importorskip("diffusers.training_utils")
    theirs = utilities.compute_density_for_timestep_sampling(
        "logit_normal", 500, logit_mean=mean, logit_std=std, generator=torch.Generator().manual_seed(4)
    )
    objective = Objective("flow", None, "logit_normal", logit_mean=mean, logit_std=std)
    mine = objective.draw_times(500, 64, torch.Generator().manual_seed(4))
    torch.testing.assert_close(mine, theirs.to(mine.dtype), rtol=1e-5, atol=1e-6)


def test_min_snr_weights_are_those_of_the_training_scripts() -> None:
    """As diffusers' text-to-image scripts compute them, from diffusers' own signal-to-noise ratio."""
    diffusers = pytest.importorskip("diffusers")
    from diffusers.training_utils import compute_snr

    scheduler, times = diffusers.DDPMScheduler(beta_schedule="scaled_linear"), torch.arange(1000)
    ratio = compute_snr(scheduler, times)
    bounded = torch.stack([ratio, 5.0 * torch.ones(1000)], 1).min(1)[0]
    for kind, expected in (("epsilon", bounded / ratio), ("v_prediction", bounded / (ratio + 1))):
        weights = Objective(kind, scheduler.alphas_cumprod, min_snr_gamma=5.0).weights(times)
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)


def test_a_masked_loss_averaged_over_the_image_is_kohyas() -> None:
    """sd-scripts: loss = mse(reduction="none"); apply_masked_loss: loss * mask; loss.mean([1, 2, 3]); loss.mean()."""
    generator = torch.Generator().manual_seed(0)
    prediction, target = torch.randn(2, 3, 4, 8, 8, generator=generator)
    mask = torch.rand(3, 1, 8, 8, generator=generator)
    kohya = (nn.functional.mse_loss(prediction, target, reduction="none") * mask).mean([1, 2, 3]).mean()
    torch.testing.assert_close(image_loss(prediction, target, None, mask, average="image"), kohya)
    share = float(mask.mean())
    over_mask = image_loss(prediction, target, None, mask, average="mask")
    assert float(over_mask) == pytest.approx(float(kohya) / share, rel=0.05)


def test_the_predicted_time_of_a_step_is_within_a_factor_of_five_on_a_cpu(tmp_path: Path) -> None:
    """Both are timed on the same machine, one after the other; another process may take half of it meanwhile."""
    config = TrainConfig.of(
        dataset="inweave/pixel", output=str(tmp_path), steps=4, device="cpu", precision="fp32", batch_size=4
    )
    _, _, needs = check(config)
    run, _ = prepare(config)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        run.train_step()
        seconds.append(time.perf_counter() - start)
    assert 0.2 < needs["seconds"] / needs["steps"] / min(seconds) < 5
