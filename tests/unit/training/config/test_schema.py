"""A training configuration: defaults, presets, other names, all problems at once, and TOML there and back."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import typing
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inweave.errors import ConfigError, FormatError
from inweave.training.config.fields import names_where
from inweave.training.config.importers.kohya import KOHYA
from inweave.training.config.presets import KINDS, PRESETS
from inweave.training.config.reference import update_markdown
from inweave.training.config.schema import TrainConfig
from inweave.training.config.types import Rule


def of(**fields: Any) -> TrainConfig:
    """Notes about ignored settings are tested where they matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TrainConfig.of(**{"dataset": "pictures", **fields})


def problems(**fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        of(**fields)
    return "\n".join(caught.value.problems)


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


@pytest.mark.parametrize("family", PRESETS)
def test_presets_fill_unset_fields(family: str) -> None:
    filled = of().with_preset(family)
    for name, value in PRESETS[family].items():
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
    assert of(steps=None).with_preset("sd").steps == PRESETS["sd"]["steps"]
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
    assert set(KINDS) <= set(PRESETS)


#: (their name, their value, what it sets here)
ALIASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("lr", 1e-3, {"learning_rate": 1e-3}),
    ("batch-size", 4, {"batch_size": 4}),
    ("save-every", 9, {"save_every": 9}),
    ("--rank", 9, {"rank": 9}),
    ("fp16", True, {"precision": "fp16"}),
    ("fp16", False, {}),
    ("gradient_accumulation", 3, {"gradient_accumulation": 3}),
    ("network_dim", 8, {"rank": 8}),
    ("network_alpha", 4, {"alpha": 4.0}),
    ("network_alpha", 0, {"alpha": None}),
    ("network_dropout", 0.1, {"dropout": 0.1}),
    ("network_weights", "a.safetensors", {"start_from": "a.safetensors"}),
    ("network_module", "networks.lora", {"network": "lora", "targets": "attention-mlp"}),
    ("network_module", "networks.lora_flux", {"network": "lora", "targets": "attention-mlp"}),
    ("network_module", "lycoris.kohya", {"network": "locon"}),
    ("network_args", ["algo=loha", "conv_dim=4", "conv_alpha=2"], {"network": "loha", "conv_rank": 4, "conv_alpha": 2}),
    ("network_args", ["conv_dim=4"], {"network": "locon", "conv_rank": 4}),
    ("network_args", ["algo=lokr", "factor=8"], {"network": "lokr", "lokr_factor": 8}),
    ("network_args", ["algo=lora", "dora_wd=True", "rs_lora=true"], {"network": "dora", "rslora": True}),
    (
        "network_args",
        "algo=locon preset=attn-only dropout=0.1",
        {"network": "locon", "targets": "attention", "dropout": 0.1},
    ),
    ("network_args", ["preset=full", "algo=loha"], {"targets": "all"}),
    (
        "network_args",
        ["network_reg_dims=attn=8,ff=4", "network_reg_lrs=attn=1e-3"],
        {"rules": (Rule(pattern="attn", rank=8, learning_rate=1e-3), Rule(pattern="ff", rank=4))},
    ),
    ("network_train_unet_only", True, {"train_text_encoders": False}),
    (
        "network_train_text_encoder_only",
        True,
        {"train_denoiser": False, "train_text_encoders": True, "cache_text": False},
    ),
    ("unet_lr", 3e-4, {"learning_rate": 3e-4}),
    ("unet_lr", 0, {"train_denoiser": False, "train_text_encoders": True}),
    ("text_encoder_lr", 5e-5, {"text_encoder_learning_rate": 5e-5, "train_text_encoders": True}),
    ("text_encoder_lr", [5e-5, 5e-5], {"text_encoder_learning_rate": 5e-5}),
    ("text_encoder_lr", 0, {"train_text_encoders": False}),
    ("learning_rate", 2e-4, {"learning_rate": 2e-4}),
    ("max_train_steps", 100, {"steps": 100}),
    ("max_train_epochs", 10, {"epochs": 10}),
    ("train_batch_size", 4, {"batch_size": 4}),
    ("gradient_accumulation_steps", 4, {"gradient_accumulation": 4}),
    ("gradient_checkpointing", True, {"gradient_checkpointing": "full"}),
    ("gradient_checkpointing", False, {"gradient_checkpointing": "off"}),
    ("mixed_precision", "bf16", {"precision": "bf16"}),
    ("mixed_precision", "no", {"precision": "fp32"}),
    ("min_snr_gamma", 5, {"min_snr_gamma": 5}),
    ("min_snr_gamma", 0, {"min_snr_gamma": None}),
    ("noise_offset", 0.05, {"noise_offset": 0.05}),
    ("caption_dropout_rate", 0.1, {"caption_dropout": 0.1}),
    ("caption_tag_dropout_rate", 0.1, {"tag_dropout": 0.1}),
    ("shuffle_caption", True, {"shuffle_tags": True}),
    ("keep_tokens", 2, {"keep_tokens": 2}),
    ("caption_separator", ";", {"tag_separator": ";"}),
    ("caption_extension", ".caption", {"caption_extensions": (".caption",)}),
    ("caption_extension", "txt", {"caption_extensions": (".txt",)}),
    ("flip_aug", True, {"flip": True}),
    ("random_crop", True, {"crop": "random"}),
    ("enable_bucket", False, {"buckets": False}),
    ("min_bucket_reso", 320, {"min_bucket": 320}),
    ("max_bucket_reso", 2048, {"max_bucket": 2048}),
    ("bucket_reso_steps", 32, {"bucket_step": 32}),
    ("bucket_no_upscale", True, {"upscale": False}),
    ("bucket_no_upscale", False, {"upscale": True}),
    ("resolution", "768,768", {"resolution": 768}),
    ("resolution", "512x2048", {"resolution": 1024}),
    ("resolution", 640, {"resolution": 640}),
    ("optimizer_type", "AdamW8bit", {"optimizer": "adamw8bit"}),
    ("optimizer_type", "AdaFactor", {"optimizer": "adafactor"}),
    ("optimizer_type", "Prodigy", {"optimizer": "prodigy"}),
    ("optimizer_type", "AdamWScheduleFree", {"optimizer": "schedulefree"}),
    ("use_8bit_adam", True, {"optimizer": "adamw8bit"}),
    (
        "optimizer_args",
        ["weight_decay=0.1", "betas=0.9,0.99", "eps=1e-6", "d_coef=2", "safeguard_warmup=True"],
        {
            "weight_decay": 0.1,
            "betas": (0.9, 0.99),
            "epsilon": 1e-6,
            "optimizer_args": {"d_coef": 2, "safeguard_warmup": True},
        },
    ),
    ("lr_scheduler", "constant_with_warmup", {"lr_scheduler": "constant"}),
    ("lr_scheduler", "polynomial", {"lr_scheduler": "polynomial"}),
    ("lr_warmup_steps", 0.05, {"warmup": 0.05}),
    ("max_grad_norm", 0.5, {"max_grad_norm": 0.5}),
    ("output_dir", "there", {"output": "there"}),
    ("output_name", "mine", {"name": "mine"}),
    ("save_every_n_steps", 100, {"save_every": 100}),
    ("save_precision", "float", {"save_dtype": "fp32"}),
    ("sample_every_n_steps", 50, {"sample_every": 50}),
    ("sample_prompts", "p.txt", {"sample_prompts": ("p.txt",)}),
    ("resume", "out/state", {"resume": "out/state"}),
    ("seed", 3, {"seed": 3}),
    ("clip_skip", 2, {"clip_skip": 2}),
    ("cache_latents", False, {"cache_latents": False}),
    ("cache_latents_to_disk", True, {"cache_latents": True}),
    ("cache_text_encoder_outputs", False, {"cache_text": False}),
    ("cache_text_encoder_outputs_to_disk", True, {"cache_text": True}),
    ("pretrained_model_name_or_path", "m", {"model": "m"}),
    ("vae", "v", {"parts": {"vae": "v"}}),
    ("ae", "v", {"parts": {"vae": "v"}}),
    ("clip_l", "c", {"parts": {"text_encoder": "c"}}),
    ("clip_g", "c", {"parts": {"text_encoder_2": "c"}}),
    ("t5xxl", "t", {"parts": {"text_encoder_2": "t"}}),
    ("v_parameterization", True, {"objective": "v_prediction"}),
    ("prior_loss_weight", 0.5, {"prior_loss_weight": 0.5}),
    ("masked_loss", True, {"masked_loss": True}),
    ("timestep_sampling", "sigmoid", {"timestep_sampling": "sigmoid"}),
    ("timestep_sampling", "flux_shift", {"timestep_sampling": "shift"}),
    ("timestep_sampling", "sigma", {"timestep_sampling": "uniform"}),
    ("discrete_flow_shift", 3.1582, {"timestep_shift": 3.1582}),
    ("sigmoid_scale", 1.5, {"logit_std": 1.5}),
    ("logit_mean", 0.5, {"logit_mean": 0.5}),
    ("logit_std", 1.5, {"logit_std": 1.5}),
    ("guidance_scale", 3.5, {"guidance": 3.5}),
    ("validation_split", 0.1, {"validation_split": 0.1}),
    ("log_with", "tensorboard", {"tensorboard": True}),
    ("log_with", "wandb", {"wandb": True}),
    ("log_with", "all", {"tensorboard": True, "wandb": True}),
    ("wandb_run_name", "r", {"wandb_run_name": "r"}),
    ("save_model_as", "safetensors", {}),
    ("loss_type", "l2", {}),
    ("max_token_length", 75, {"max_token_length": 75}),
    ("model_prediction_type", "raw", {}),
    ("weighting_scheme", "none", {}),
]


@pytest.mark.parametrize(("name", "value", "here"), ALIASES, ids=lambda value: str(value)[:40])
def test_names_of_others(name: str, value: Any, here: dict[str, Any]) -> None:
    fields = {"train_text_encoders": True} if here.get("train_denoiser") is False else {}
    c = of(**{name: value, **({} if name == "network_train_text_encoder_only" else fields)})
    for field, expected in here.items():
        assert getattr(c, field) == expected, field
    assert here or c.model_fields_set == {"dataset"}


def test_every_other_name_is_tested_or_pairs_with_one_that_is() -> None:
    tested = {name.lstrip("-").replace("-", "_") for name, _, _ in ALIASES}
    together = {
        "lr_scheduler_num_cycles",
        "lr_scheduler_power",
        "save_last_n_steps",
        "train_data_dir",
        "dataset_config",
    }
    shared = {"dit", "text_encoder", "training_shift"}  # of scripts for other models, tested with imports
    optional = {
        "save_every_n_epochs", "sample_every_n_epochs", "validate_every_n_epochs", "validate_every_n_steps", "min_timestep",
        "max_timestep", "multires_noise_iterations", "multires_noise_discount", "debiased_estimation_loss",
        "scale_weight_norms", "huber_c", "huber_schedule",
    }  # fmt: skip
    assert {*KOHYA.plain, *KOHYA.readers} - tested - shared - optional == together


def test_names_that_need_each_other() -> None:
    assert of(lr_scheduler="cosine_with_restarts", lr_scheduler_num_cycles=3).cosine_cycles == 3
    assert of(lr_scheduler="cosine", lr_scheduler_num_cycles=3).cosine_cycles == 1
    assert of(lr_scheduler="polynomial", lr_scheduler_power=2).polynomial_power == 2
    assert of(lr_scheduler="linear", lr_scheduler_power=2).polynomial_power == 1
    assert of(save_every_n_steps=100, save_last_n_steps=250).keep_last == 3
    assert of(max_train_steps=100, max_train_epochs=3).steps is None
    assert of(t5xxl="t", clip_g="g").parts == {"text_encoder_3": "t", "text_encoder_2": "g"}
    assert of(timestep_sampling="sigma", weighting_scheme="logit_normal").timestep_sampling == "logit_normal"
    c = of(learning_rate=1e-5, unet_lr=3e-4)
    assert (c.learning_rate, c.text_encoder_learning_rate) == (3e-4, 1e-5)
    assert TrainConfig.of(train_data_dir="x").dataset == TrainConfig.of(dataset_config="x").dataset == "x"


@pytest.mark.parametrize("name", ["xformers", "sdpa", "max_data_loader_n_workers", "save_state", "console_log_level"])
def test_ignored_settings_are_reported(name: str) -> None:
    with pytest.warns(UserWarning, match=name):
        TrainConfig.of(dataset="x", **{name: True})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("fp8_base", True, "vram"),
        ("ip_noise_gamma", 0.1, "noise is sampled without it"),
        ("zero_terminal_snr", True, "the model's own schedule is used"),
        ("optimizer_type", "AdEMAMix", "'AdEMAMix' is not supported"),
        ("network_args", ["algo=boft"], "'boft' is not supported"),
        ("network_args", ["algo=loha", "use_tucker=True"], "use_tucker"),
        ("network_module", "networks.oft", "is not supported"),
        ("loss_type", "wavelet", "is not supported"),
        ("text_encoder_lr", [1e-4, 1e-5], "share one learning rate"),
    ],
)
def test_settings_without_an_equivalent_are_refused(name: str, value: Any, message: str) -> None:
    assert message in problems(**{name: value})
    of(fp8_base=False, ip_noise_gamma=0, color_aug="false", max_timestep=1000)  # switched off, they ask for nothing


def test_conflicting_aliases() -> None:
    assert "rank and network_dim set rank to different values" in problems(rank=8, network_dim=16)
    assert of(rank=8, network_dim=8).rank == 8


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
        "rankk", "dataset", "steps and epochs", "rank:", "text_encoder_learning_rate", "caption_dropout", "validation_split",
        "set cache_text = false", "'a[b' is not a valid regular expression: unterminated character set at position 1", "vram",
        "min_snr_gamma: is for models that predict noise", "noise_offset", "'x(' is not a valid regular expression", "rules.1: sets",
        "network_args", "unet_lr", "lokr_factor", "cosine_cycles",
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


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nmodel = "m"\ndataset = "d"\n[network]\nnetwork_dim = 8\nresolution = "none"\n'
        '[parts]\nvae = "v"\n[[rules]]\npattern = "ff"\nskip = true\n'
    )
    c = TrainConfig.load(path)
    assert (c.model, c.rank, c.resolution, c.parts, c.rules[0].skip) == ("m", 8, None, {"vae": "v"}, True)
    path.write_text('dataset = "d"\n\nnetwork_dim = 0\nstepz = 3\nvram = "x"\n')
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(path)
    text = str(caught.value)
    for word in (f"{path}:3: network_dim (rank)", f"{path}:4: stepz", f"{path}:5: vram"):
        assert word in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('dataset = "d"\nrank = \n', "line 2"),
        ("rank = " + "[" * 20_000, "nested too deeply"),
        ("rank = " + "9" * 10_000, "not valid TOML"),
        ("a" + ".a" * 5_000 + " = 1", "dots"),
        ("[a]\nrank = 1\n[b]\nrank = 2\n", "rank: is set twice"),
        ("".join(f"a{i} = 1\n" for i in range(2_000)), "no such setting"),
    ],
)
def test_files_that_cannot_be_read(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises((ConfigError, FormatError), match=message) as caught:
        TrainConfig.load(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 50_000
    with pytest.raises(ConfigError, match="no such file"):
        TrainConfig.load(tmp_path / "none.toml")


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
SMALL = st.floats(1e-12, 1e6, allow_nan=False)
#: a strategy for every kind of field, so that a new field is covered or noticed
WORDS: dict[str, st.SearchStrategy[Any]] = {
    "targets": st.one_of(st.sampled_from(["attention", "all", r".*\.to_q"]), st.lists(st.just("to_k"), min_size=1)),
    "rules": st.lists(st.builds(lambda rank: {"pattern": 'a"\\.b', "rank": rank}, st.integers(1, 64)), max_size=3),
    "name": st.text("abc \"'=#é", min_size=1, max_size=12),
    "parts": st.dictionaries(TEXT, TEXT, max_size=3),
    "optimizer_args": st.dictionaries(
        TEXT.map(lambda text: f"x{text}"), st.one_of(st.booleans(), st.integers(-9, 9), SMALL, TEXT), max_size=3
    ),
    "betas": st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    "caption_extensions": st.lists(TEXT, min_size=1, max_size=3),
    "sample_prompts": st.lists(TEXT, max_size=3),
    "vram": st.sampled_from(["auto", "12GiB"]),
    "warmup": st.one_of(st.integers(1, 1000), st.floats(0, 0.9)),
    "resolution": st.one_of(st.none(), st.integers(16, 8192)),
    "clip_skip": st.one_of(st.none(), st.integers(1, 12)),
    "min_bucket": st.integers(8, 64),
    "max_bucket": st.one_of(st.none(), st.integers(256, 4096)),
    "bucket_step": st.integers(8, 128),
}  # fmt: skip
#: fields that exclude others, left to the tests above
APART = {
    "epochs", "lokr_factor", "conv_rank", "conv_alpha", "cosine_cycles", "patience", "train_denoiser", "train_text_encoders",
    "objective", "timestep_shift", "dataset", "shard", "text_encoder_stop",
}  # fmt: skip


def values(name: str) -> st.SearchStrategy[Any]:
    if name in WORDS:
        return WORDS[name]
    kind = TrainConfig.model_fields[name].annotation
    if typing.get_origin(kind) is typing.Literal:
        return st.sampled_from(typing.get_args(kind))
    message = str(kind)
    empty = st.none() if "None" in message else st.nothing()
    if kind is bool:
        return st.booleans()
    if "int" in message:
        return st.one_of(empty, st.integers(1, 2**31 - 1))
    if "float" in message:
        return st.one_of(empty, st.floats(1e-12, 0.999))
    return st.one_of(empty, TEXT)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.fixed_dictionaries({}, optional={n: values(n) for n in sorted(TrainConfig.model_fields.keys() - APART)}),
    st.booleans(),
)
def test_toml_there_and_back(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any], everything: bool
) -> None:
    c = TrainConfig.model_validate({"dataset": "a 'b' \"c\"\n\t\x7f", **fields})
    path = tmp_path_factory.mktemp("toml") / "run.toml"
    path.write_text(c.to_toml(everything=everything), "utf-8", newline="\n")
    back = TrainConfig.load(path)
    assert back == c
    unsaid = {name for name in c.model_fields_set if getattr(c, name) is None}  # text fields cannot say so
    assert everything or c.model_fields_set - unsaid <= back.model_fields_set <= c.model_fields_set


def test_reading_a_configuration_needs_no_torch() -> None:
    program = "import sys, inweave.training.config.schema, inweave.training.config.importers.detect; sys.exit('torch' in sys.modules or 'yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_options_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "style.toml"
    file.write_text("rank = 4\nepochs = 1\nlearning_rate = 1e-3\n")
    result = TrainConfig.load(file, dataset="d", network_dim=8, max_train_steps=5)
    assert (result.dataset, result.rank, result.steps, result.epochs, result.learning_rate) == ("d", 8, 5, None, 1e-3)
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(file, dataset="d", rnk=3, rank="many")
    text = "\n".join(caught.value.problems)
    assert "did you mean 'rank'?" in text and "rank: " in text and len(caught.value.problems) == 2
    file.write_text("rank = 4\nrnk = 1\n")
    with pytest.raises(ConfigError, match=r"style\.toml:2: rnk: there is no such setting"):
        TrainConfig.load(file, dataset="d")


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
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "dataset", "rank", "learning_rat", "steps and epochs",
    ]  # fmt: skip
    assert "got 'y'" in str(caught.value) and "did you mean 'learning_rate'?" in str(caught.value)
    for wrong in (lambda: TrainConfig.model_validate({"dataset": "x", "rank": "y"}), lambda: TrainConfig.model_validate(3),
                  lambda: TrainConfig.model_validate_json('{"dataset": "x", "rank": "y"}'), lambda: Rule(pattern="(", skip=True),
                  lambda: of().model_copy(update={"rank": "y"}), lambda: of(steps=3).model_copy(update={"epochs": 2})):  # fmt: skip
        with pytest.raises(ConfigError):
            wrong()


def test_a_copy_remembers_what_the_user_set() -> None:
    filled = of(rank=4).with_preset("sdxl")
    copy = filled.model_copy(update={"precision": "fp32", "alpha": "2"})
    assert copy.explicit_fields == filled.explicit_fields == {"dataset", "rank"}
    assert (copy.precision, copy.alpha, copy.resolution) == ("fp32", 2.0, 1024)
    assert copy.model_fields_set == filled.model_fields_set | {"precision", "alpha"}


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("gradient_checkpointing", "selective", "selective"),
        ("gradient_checkpointing", "off", "off"),
        ("gradient_checkpointing", "true", "full"),
        ("timestep_sampling", "auto", "auto"),
        ("timestep_sampling", "logit_normal", "logit_normal"),
        ("lr_scheduler", "linear", "linear"),
        ("prior_loss_weight", 0.5, 0.5),
        ("validation_split", 0.1, 0.1),
    ],
)
def test_names_shared_with_kohya_take_both_notations(name: str, value: Any, ours: Any) -> None:
    assert getattr(of(**{name: value}), name) == ours


def test_settings_carry_their_own_facts() -> None:
    assert names_where(private=True) == {"output", "cache_dir", "resume", "device"}
    assert names_where(resume="content") == {"model", "parts", "dataset"}
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
