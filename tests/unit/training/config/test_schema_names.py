"""Names of other trainers stand for ours, in files and options; those without an equivalent are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from inweave.training.config import aliases
from inweave.training.config.schema import TrainConfig
from inweave.training.config.types import Rule
from tests.unit.training.config.configs import of, problems

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
    ("network_dropout", 0.1, {"hidden_dropout": 0.1}),
    ("network_args", ["rank_dropout=0.1"], {"rank_dropout": 0.1}),
    ("network_args", ["module_dropout=0.1"], {"module_dropout": 0.1}),
    ("network_args", ["algo=loha", "use_tucker=True"], {"network": "loha", "tucker": True}),
    (
        "network_args",
        ["algo=lokr", "rank_dropout=0.1", "module_dropout=0.2"],
        {"network": "lokr", "rank_dropout": 0.1, "module_dropout": 0.2},
    ),
    ("network_args", ["algo=loha", "train_norm=True"], {"network": "loha", "train_norm": True}),
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
        "algo=locon preset=attn-only dropout=0",
        {"network": "locon", "targets": "attention", "dropout": 0.0, "hidden_dropout": 0.0},
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
    ("resolution", "512x2048", {"resolution": (512, 2048), "side": 1024}),
    ("noise_offset_random_strength", True, {"noise_offset_random": True}),
    ("ip_noise_gamma", 0.1, {"input_perturbation": 0.1}),
    ("ip_noise_gamma_random_strength", True, {"input_perturbation_random": True}),
    ("lr_scheduler", "cosine_with_min_lr", {"lr_scheduler": "cosine"}),
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
    ("max_seq_length", 2048, {"max_length": 2048}),
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
    ("enable_wildcard", False, {"wildcards": False}),
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
        "lr_scheduler_type",
        "lr_scheduler_args",
        "lr_scheduler_power",
        "lr_scheduler_min_lr_ratio",
        "save_last_n_steps",
        "train_data_dir",
        "dataset_config",
    }
    #: of scripts for other models, tested with imports
    shared = {"dit", "text_encoder", "training_shift", "dim_from_weights"}
    optional = {
        "save_every_n_epochs", "sample_every_n_epochs", "validate_every_n_epochs", "validate_every_n_steps",
        "min_timestep",
        "max_timestep", "multires_noise_iterations", "multires_noise_discount", "debiased_estimation_loss",
        "scale_weight_norms", "huber_c", "huber_schedule",
    }  # fmt: skip
    known = {name for name, row in aliases.ALIASES.items() if row.kind == "read"}
    assert known - tested - shared - optional == together


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
        ("weighted_captions", True, "captions have no weights"),
        ("zero_terminal_snr", True, "the model's own schedule is used"),
        ("optimizer_type", "AdEMAMix", "'AdEMAMix' is not supported"),
        ("network_args", ["algo=boft"], "'boft' is not supported"),
        ("network_args", ["algo=lora", "use_tucker=True"], "use_tucker"),
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
