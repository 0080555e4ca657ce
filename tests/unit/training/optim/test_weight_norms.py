"""`scale_weight_norms` and LoRA+: limits of the change, rates of the factors, and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inweave.errors import ConfigError
from inweave.layers import lora_layers
from inweave.training.loop import Run
from tests.unit.training.tiny import EVERYTHING, file_bits, state_bits, tiny


@pytest.mark.parametrize(
    ("network", "settings"),
    [("lora", {"scale_weight_norms": 0.05, "loraplus_lr_ratio": 16.0}), ("loha", {"scale_weight_norms": 0.05})],
)
def test_a_run_with_it_resumes_to_the_same_bits(network: str, settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {**EVERYTHING, **settings, "network": network, "steps": 5}
    straight = tiny(tmp_path / "straight", save_every=1, keep_last=0, **settings)
    done = straight.train()
    plain = tiny(tmp_path / "plain", **{**EVERYTHING, "network": network, "steps": 5}).train()
    assert file_bits(done.path) != file_bits(plain.path), "the setting changes something"
    for step in (1, 3):
        source = str(tmp_path / "straight" / "t-state" / f"step-{step:06d}")
        run = tiny(tmp_path / f"from-{step}", resume=source, **settings)
        assert file_bits(run.train().path) == file_bits(done.path) and state_bits(run) == state_bits(straight)


def norms(run: Run) -> list[float]:
    """|scale * product| of every module, in float64."""
    sizes = []
    for layer in lora_layers(run.task.networks["model"]).values():
        branch = layer.branch("trained")
        roles = {role: value.detach().double() for role, value in branch.roles().items()}
        product = (
            roles["up"] @ roles["down"]
            if "up" in roles
            else (roles["w1_a"] @ roles["w1_b"]) * (roles["w2_a"] @ roles["w2_b"])
        )
        sizes.append(float((product * branch.scale).norm()))
    return sizes


@pytest.mark.parametrize("network", ["lora", "dora", "loha"])
def test_no_module_changes_by_more_than_the_norm(network: str, tmp_path: Path) -> None:
    free = tiny(tmp_path / "free", network=network, alpha=1.0)
    free.train()
    limit = 0.5 * min(norms(free))
    limited = tiny(tmp_path / "limited", network=network, alpha=1.0, scale_weight_norms=limit)
    limited.train()
    assert min(norms(free)) > limit and norms(limited) == pytest.approx([limit, limit], rel=1e-4)
    above = tiny(tmp_path / "above", network=network, alpha=1.0, scale_weight_norms=1e6)
    above.train()
    assert torch.equal(above.flat.values, free.flat.values), "a limit that nothing reaches changes no bit"


def test_one_step_beyond_the_norm_scales_both_factors_alike(tmp_path: Path) -> None:
    free, limited = (tiny(tmp_path / str(s), scale_weight_norms=s, steps=2) for s in (0.0, 1e-4))
    for run in (free, limited):
        run.train_step()
        ratio = torch.tensor(1e-4 / norms(free)[0]).sqrt()
    names = [name for name in free.flat.parameters if "to_q" in name]
    for name in names:
        torch.testing.assert_close(
            limited.flat.parameters[name].detach(), free.flat.parameters[name].detach() * ratio, rtol=1e-4, atol=1e-8
        )


def test_a_skipped_step_scales_nothing(tmp_path: Path) -> None:
    run = tiny(tmp_path, scale_weight_norms=0.0, steps=4)
    run.train_step()
    run.config = run.step.config = run.config.model_copy(update={"scale_weight_norms": 1e-6})
    before = run.flat.values.clone()
    run.task.poison = "nan"
    run.train_step()
    assert torch.equal(run.flat.values, before)
    run.task.poison = ""
    run.train_step()
    assert max(norms(run)) == pytest.approx(1e-6, rel=1e-3)


def test_loraplus_multiplies_the_rate_of_the_up_factors(tmp_path: Path) -> None:
    run = tiny(tmp_path, loraplus_lr_ratio=16.0, rules=[{"pattern": "to_k", "learning_rate": 0.1}])
    rates = {name.removeprefix("model."): 0.05 * factor for name, factor in run.flat.factors.items()}
    assert rates == pytest.approx({"to_q.down": 0.05, "to_q.up": 0.8, "to_k.down": 0.1, "to_k.up": 1.6})


def test_a_first_step_of_adam_moves_by_the_rate(tmp_path: Path) -> None:
    """Adam's first step has the size of the learning rate, whatever the gradient."""
    run = tiny(tmp_path, loraplus_lr_ratio=4.0, weight_decay=0.0)
    before = {name: value.detach().clone() for name, value in run.flat.parameters.items()}
    run.train_step()
    for name, value in run.flat.parameters.items():
        moved = (value.detach() - before[name]).abs().max()
        expected = 0.0 if name.endswith("down") else 0.2  # `up` is zero at first, and so is the gradient of `down`
        assert float(moved) == pytest.approx(expected, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loraplus_lr_ratio": 4.0, "network": "loha"}, "LoRA+ is for lora, locon and dora"),
        ({"loraplus_lr_ratio": 4.0, "optimizer": "prodigy"}, "estimates one learning rate"),
        ({"scale_weight_norms": 1.0, "optimizer": "schedulefree"}, "saves an average"),
        (
            {"text_encoder_stop": 5, "train_text_encoders": True, "optimizer": "schedulefree"},
            "which goes on changing",
        ),
        ({"validate_every": 5}, "set validation_split"),
        ({"validate_every_epochs": 1}, "set validation_split"),
        ({"min_timestep": 5, "max_timestep": 5}, "is not above min_timestep"),
    ],
)
def test_settings_that_do_nothing_together_are_refused(settings: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny(tmp_path, **settings)
    assert message in str(caught.value)
