"""A training configuration: defaults, presets, contradictions, and all problems at once."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.training.config.fields import names_where
from inweave.training.config.presets import preset_objective, presets
from inweave.training.config.reference import update_markdown
from inweave.training.config.schema import TrainConfig
from inweave.training.config.types import Rule
from tests.unit.training.config.configs import of, problems


def test_defaults() -> None:
    c = of()
    assert (c.model, c.output, c.name, c.network, c.rank, c.alpha) == ("inweave/emoji", "out", "lora", "lora", 16, None)
    assert (c.steps, c.epochs, c.learning_rate, c.optimizer, c.lr_scheduler) == (None, None, 1e-4, "adamw", "constant")
    assert (c.precision, c.objective, c.timestep_sampling, c.resume, c.dialect, c.vram) == (
        "auto", "auto", "auto", "never", "kohya", None,
    )  # fmt: skip
    assert c.model_fields_set == {"dataset"}
    with pytest.raises(Exception, match="frozen"):
        c.rank = 3  # type: ignore[misc]


def test_every_field_is_described_in_a_line() -> None:
    for kind in (TrainConfig, Rule):
        for name, field in kind.model_fields.items():
            assert field.description and "\n" not in field.description, name


def test_the_dataset_is_needed() -> None:
    with pytest.raises(ConfigError, match="dataset: is required; a folder"):
        TrainConfig.of()
    assert "dataset" in problems(dataset="")


@pytest.mark.parametrize("family", presets())
def test_presets_fill_unset_fields(family: str) -> None:
    filled = of().with_preset(family)
    for name, value in presets()[family].items():
        assert getattr(filled, name) == value
    assert filled.alpha is None and filled.max_grad_norm == 1.0
    message = of(rank=3, learning_rate=5e-5, epochs=2, precision="fp16").with_preset(family)
    assert (message.rank, message.learning_rate, message.epochs, message.steps, message.precision) == (
        3,
        5e-5,
        2,
        None,
        "fp16",
    )
    assert filled.with_preset(family) == filled


def test_presets_know_the_emoji_model_and_what_suits_an_objective() -> None:
    c = of().with_preset("inweave/emoji")
    assert (c.rank, c.learning_rate, c.steps, c.batch_size, c.resolution, c.targets, c.precision) == (
        8, 2e-3, 300, 2, 128, "attention-mlp", "fp32",
    )  # fmt: skip
    assert (c.min_bucket, of(resolution=256).with_preset("sd").min_bucket, of().with_preset("sd").min_bucket) == (
        64,
        128,
        256,
    )
    assert of(steps=None).with_preset("sd").steps == presets()["sd"]["steps"]
    assert of(objective="flow").with_preset("sdxl").min_snr_gamma is None
    assert of(min_snr_gamma=None).with_preset("sdxl").min_snr_gamma is None
    assert of(timestep_sampling="logit_normal").with_preset("sd3").timestep_shift is None
    assert of(timestep_sampling="shift").with_preset("sd3").timestep_shift == 3.0
    assert of(optimizer="prodigy").with_preset("sdxl").learning_rate == 1.0
    assert of(optimizer="prodigy", learning_rate=0.5).with_preset("sdxl").learning_rate == 0.5
    with pytest.raises(ConfigError, match=r"min_snr_gamma.*flux"):
        of(min_snr_gamma=5).with_preset("flux")
    with pytest.raises(ConfigError, match=r"shift.*sdxl"):
        of(timestep_shift=3.0).with_preset("sdxl")
    with pytest.raises(ConfigError, match="no preset"):
        of().with_preset("sd9")
    assert [name for name in presets() if preset_objective(name) is None] == ["llm"]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("rnak", "rank"), ("learning_rat", "learning_rate"), ("network_dimm", "network_dim"), ("epoch", "epochs")],
)
def test_misspelled_settings(wrong: str, right: str) -> None:
    assert f"{wrong}: there is no such setting; did you mean '{right}'?" in problems(**{wrong: 1})


def test_misspelled_values_and_rules() -> None:
    assert "did you mean 'adamw8bit'?" in problems(optimizer="adamw8bits")
    assert "did you mean 'learning_rate'?" in problems(rules=[{"pattern": "a", "learning_rates": 1}])


def test_all_problems_at_once() -> None:
    text = problems(
        dataset="", steps=3, epochs=4, rank=0, learning_rate=-1, text_encoder_learning_rate=math.inf, caption_dropout=2,
        validation_split=1, train_text_encoders=True, cache_text=True, targets=["to_q", "a[b"], vram="lots", rankk=3,
        objective="flow", min_snr_gamma=5, noise_offset=0.1, rules=[{"pattern": "x(", "rank": 3}, {"pattern": "y"}],
        network_args="?", optimizer_args={"eps": 1}, unet_lr="fast", patience=3, lokr_factor=4, cosine_cycles=2,
    ).split("\n")  # fmt: skip
    expected = [
        "rankk", "dataset", "steps and epochs", "rank:", "text_encoder_learning_rate", "caption_dropout",
        "validation_split",
        "set cache_text = false", "'a[b' is not a valid regular expression: unterminated character set at position 1",
        "vram",
        "min_snr_gamma: is for models that predict noise", "noise_offset", "'x(' is not a valid regular expression",
        "rules.1: sets", "network_args", "unet_lr", "lokr_factor", "cosine_cycles",
    ]  # fmt: skip
    for word in expected:
        assert any(word in each for each in text), word
    assert len(text) == len(set(text))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train_denoiser": False}, "nothing is left to train"),
        ({"conv_rank": 4}, 'network = "locon"'),
        ({"objective": "epsilon", "timestep_shift": 3.0}, "timestep_shift: is for flow models"),
        ({"objective": "v_prediction", "timestep_sampling": "logit_normal"}, "timestep_sampling: is for flow models"),
        ({"objective": "epsilon", "guidance": 3.5}, "guidance: is for flow models"),
        ({"objective": "epsilon", "sigma_weighting": 2.0}, "sigma_weighting: is for flow models"),
        ({"text_encoder_stop": 0.3}, "text_encoder_stop: needs train_text_encoders = true"),
        (
            {"text_encoder_stop": 10.5, "train_text_encoders": True},
            "text_encoder_stop: expected a whole number of steps",
        ),
        ({"patience": 3}, "set validation"),
        ({"min_bucket": 512, "max_bucket": 256}, "below min_bucket"),
        ({"warmup": 10.5}, "whole number of steps"),
        ({"rules": [{"pattern": "a", "skip": True, "rank": 3}]}, "skips its modules"),
        ({"rank": True}, "true or false has no meaning"),
        ({"rank": 10**5000}, "a very large number"),
        ({"optimizer_args": {"a": [1]}}, "optimizer_args"),
        ({"targets": []}, "targets"),
        ({"betas": [0.9, 1.0]}, "betas.1"),
        ({"targets": "(" * 3000}, "nested too deeply"),
    ],
)
def test_contradictions(fields: dict[str, Any], message: str) -> None:
    assert message in problems(**fields)


def test_text_is_not_cached_while_its_encoders_change() -> None:
    assert of(train_text_encoders=True).cache_text is False
    assert "cache_text" in problems(train_text_encoders=True, cache_text=True)


def test_memory_and_warmup() -> None:
    for text, amount in [("12GiB", 12 * 2**30), ("12 gib", 12 * 2**30), ("24G", 24 * 2**30), ("8GB", 8 * 10**9),
                         ("1.5GiB", 3 * 2**29), ("800MiB", 800 * 2**20)]:  # fmt: skip
        assert of(vram=text).vram_bytes == amount
    assert of(vram="auto").vram_bytes is of().vram_bytes is None
    for text in ("12", "GiB", "-1GiB", "0GiB", "nanGiB", "1e3GiB"):
        assert "vram" in problems(vram=text)
    assert (of(warmup=100).warmup_steps(50), of(warmup=0.1).warmup_steps(50), of().warmup_steps(9)) == (100, 5, 0)
    preset = of().with_preset("inweave/emoji")
    assert (preset.warmup_steps(300), preset.warmup_steps(10)) == (20, 5), (
        "a preset's gives way, what the user set does not"
    )
    assert of(warmup=8).with_preset("inweave/emoji").warmup_steps(10) == 8


@pytest.mark.parametrize("name", ["a/b", "..", ".", "a\\b", "a\0", "a\nb"])
def test_a_name_is_a_file_name(name: str) -> None:
    with pytest.raises(ConfigError, match="name: expected a file name without folders"):
        of(name=name)


def test_prodigy_finds_the_rate_of_text_encoders_too() -> None:
    result = of(optimizer="prodigy", train_text_encoders=True).with_preset("sdxl")
    assert (result.learning_rate, result.text_encoder_learning_rate) == (1.0, None)


def test_constructors_raise_every_problem_as_ours() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(rank="y", steps=1, epochs=1, learning_rat=1.0)  # type: ignore[call-arg, arg-type]
    assert [str(problem).partition(":")[0] for problem in caught.value.problems] == [
        "dataset", "rank", "learning_rat", "steps and epochs",
    ]  # fmt: skip
    assert "got 'y'" in str(caught.value) and "did you mean 'learning_rate'?" in str(caught.value)
    for wrong in (lambda: TrainConfig.model_validate({"dataset": "x", "rank": "y"}),
                  lambda: TrainConfig.model_validate(3),
                  lambda: TrainConfig.model_validate_json('{"dataset": "x", "rank": "y"}'),
                  lambda: Rule(pattern="(", skip=True), lambda: of().model_copy(update={"rank": "y"}),
                  lambda: of(steps=3).model_copy(update={"epochs": 2})):  # fmt: skip
        with pytest.raises(ConfigError):
            wrong()


def test_a_copy_remembers_what_the_user_set() -> None:
    filled = of(rank=4).with_preset("sdxl")
    copy = filled.model_copy(update={"precision": "fp32", "alpha": "2"})
    assert copy.explicit_fields == filled.explicit_fields == {"dataset", "rank"}
    assert (copy.precision, copy.alpha, copy.resolution) == ("fp32", 2.0, 1024)
    assert copy.model_fields_set == filled.model_fields_set | {"precision", "alpha"}


def test_settings_carry_their_own_facts() -> None:
    assert names_where(private=True) == {"output", "cache_dir", "resume", "device", "assistant"}
    assert names_where(resume="content") == {"assistant", "model", "parts", "dataset", "control"}
    assert {"rank", "seed", "batch_size", "steps"} <= names_where(resume="same")
    assert {"vram", "shard", "log_every"} <= names_where(resume="free", task="both")
    assert {"resolution", "objective", "caption"} <= names_where(task="image")


def test_every_setting_is_documented() -> None:
    page = (Path(__file__).parents[4] / "docs" / "training.md").read_text("utf-8")
    assert update_markdown(page) == page, "run tools/settings_table.py"
    rows = {name: words for name, _, words in re.findall(r"^\| `(\w+)` \| (.*?) ?\| (.*) \|$", page, re.MULTILINE)}
    assert rows == {name: field.description for name, field in TrainConfig.model_fields.items()}


def test_text_in_optimizer_args_stays_text(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('dataset = "a"\noptimizer_args = { x = "0", y = 0 }\n')
    assert TrainConfig.load(path).optimizer_args == {"x": "0", "y": 0}
    assert TrainConfig.of(dataset="a", optimizer_args=["x=0"]).optimizer_args == {"x": 0}  # kohya's notation
