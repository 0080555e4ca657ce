"""ai-toolkit's settings, by their place in the first process of its YAML ("network.linear").

`implied` holds its defaults where they differ from ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from inweave.training.config.importers.translate import (
    ELSEWHERE,
    LOSS,
    MEMORY,
    OWN_FILE,
    SPEED,
    Reader,
    SettingsDialect,
    Translation,
    choice,
    largest_resolution,
    lr_scheduler,
    normalize_name,
    optimizer,
    parse_bool,
    parse_int,
    parse_number,
    parse_scalar,
    precision,
    sample_prompt,
    save_dtype,
    substring_patterns,
    switch,
    used_if,
)

OtherSettings = Mapping[str, Any]


def _timesteps(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    if normalize_name(settings.get("train.noise_scheduler", "ddpm")) != "flowmatch":
        out.note(name, "only used by flow models")
    else:
        known = {"sigmoid": "sigmoid", "linear": "uniform", "shift": "shift", "fluxshift": "shift"}
        choice("timestep_sampling", known, "an import leaves it to the model's preset")(out, name, value, settings)


def _other_dataset(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    """All other datasets: their folders have no equivalent, their options do not matter then."""
    if name.rpartition(".")[2] in ("folder_path", "dataset_path"):
        out.unsupported(name, "a dataset is one folder; list several in a dataset .toml")
    else:
        out.note(name, "belongs to a dataset that is not used")


def _cached(ours: str) -> Reader:
    """Without caching the same is trained, so only caching is translated."""
    return lambda out, name, value, settings: out.put(name, ours, True) if parse_bool(value) else out.unset.append(name)


def _conv(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    if not parse_scalar(value) or normalize_name(settings.get("network.type", "lora")) == "lokr":
        out.unset.append(name)
        return
    out.put(name, "conv_alpha" if name.endswith("alpha") else "conv_rank", parse_scalar(value))


def _network(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    plain = "locon" if parse_scalar(settings.get("network.conv") or 0) else "lora"
    choice("network", {"lora": plain, "locon": "locon", "lokr": "lokr", "dora": "dora"}, "an import uses lora")(
        out, name, value, settings
    )


def _betas(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    out.put(name, "betas", tuple(parse_number(each) for each in value))


def implied(settings: OtherSettings) -> dict[str, Any]:
    defaults: dict[str, Any] = {"train.steps": 1000, "train.dtype": "fp32", "train.gradient_checkpointing": True}
    defaults |= {} if "network.rank" in settings else {"network.linear": 4}
    defaults |= {} if "network.alpha" in settings else {"network.linear_alpha": 1.0}
    defaults |= {} if "train.unet_lr" in settings else {"train.lr": 1e-6}
    flow = normalize_name(settings.get("train.noise_scheduler")) == "flowmatch"
    return defaults | ({"train.timestep_type": "sigmoid"} if flow else {}) | {"network.type": "lora"}


_SET = "datasets.0."
AI_TOOLKIT: Final = SettingsDialect(
    plain={
        "config.name": "name", "training_folder": "output", "device": "device", "trigger_word": "trigger",
        "network.linear": "rank", "network.rank": "rank", "network.linear_alpha": "alpha", "network.alpha": "alpha",
        "network.dropout": "dropout", "network.lokr_factor": "lokr_factor", "save.save_every": "save_every",
        "save.max_step_saves_to_keep": "keep_last", "train.batch_size": "batch_size", "train.steps": "steps",
        "train.gradient_accumulation": "gradient_accumulation", "train.unet_lr": "learning_rate",
        "train.train_unet": "train_denoiser", "train.train_text_encoder": "train_text_encoders",
        "train.text_encoder_lr": "text_encoder_learning_rate", "train.noise_offset": "noise_offset",
        "train.max_grad_norm": "max_grad_norm",
        "train.optimizer_params.weight_decay": "weight_decay", "train.optimizer_params.eps": "epsilon",
        "train.reg_weight": "prior_loss_weight", "train.seed": "seed", "model.name_or_path": "model",
        "sample.prompts": "sample_prompts", "sample.seed": "sample_seed", "sample.sample_steps": "sample_steps",
        "sample.guidance_scale": "sample_guidance", "logging.log_every": "log_every",
        f"{_SET}folder_path": "dataset", f"{_SET}dataset_path": "dataset", f"{_SET}caption_ext": "caption_extensions",
        f"{_SET}caption_dropout_rate": "caption_dropout", f"{_SET}shuffle_tokens": "shuffle_tags",
        f"{_SET}token_dropout_rate": "tag_dropout", f"{_SET}keep_tokens": "keep_tokens", f"{_SET}flip_x": "flip",
        f"{_SET}buckets": "buckets", f"{_SET}bucket_tolerance": "bucket_step", f"{_SET}alpha_mask": "masked_loss",
         f"{_SET}trigger_word": "trigger",
    },
    readers={
        "datasets.[!0]*": _other_dataset,
        "train.cache_text_embeddings": _cached("cache_text"), f"{_SET}cache_text_embeddings": _cached("cache_text"),
        "network.type": _network, "network.conv": _conv, "network.conv_alpha": _conv,
        "network.network_kwargs.only_if_contains": lambda out, name, value, settings: substring_patterns(out, name, value, "targets"),
        "network.network_kwargs.ignore_if_contains": lambda out, name, value, settings: substring_patterns(out, name, value, "rules"),
        "save.dtype": save_dtype, "train.dtype": precision, "train.optimizer": optimizer, "train.lr_scheduler": lr_scheduler,
        "train.lr": lambda out, name, value, settings: (
            out.note(name, "unet_lr is used") if settings.get("train.unet_lr") else out.put(name, "learning_rate", value)),
        "train.gradient_accumulation_steps": lambda out, name, value, settings: (
            out.put(name, "gradient_accumulation", parse_int(value)) if parse_int(value) > 1 else out.unset.append(name)),
        "train.gradient_checkpointing": switch("gradient_checkpointing", "full", "off"), "train.timestep_type": _timesteps,
        "train.min_snr_gamma": lambda out, name, value, settings: out.put(name, "min_snr_gamma", parse_scalar(value) or None),
        "train.optimizer_params.betas": _betas,
        "train.noise_scheduler": lambda out, name, value, settings: (
            out.put(name, "objective", "flow") if normalize_name(value) == "flowmatch" else out.note(name, OWN_FILE)),
        "train.ema_config.use_ema": lambda out, name, value, settings: out.put(
            name, "ema_decay", parse_number(settings.get("train.ema_config.ema_decay") or 0.999) if parse_bool(value) else 0.0),
        "train.disable_sampling": lambda out, name, value, settings: (
            out.put(name, "sample_every", 0) if parse_bool(value) else out.unset.append(name)),
        "sample.sample_every": used_if(
            "sample_every", lambda g: not parse_bool(g.get("train.disable_sampling") or False), "disable_sampling is on"),
        "sample.samples.*": sample_prompt, f"{_SET}resolution": largest_resolution, f"{_SET}random_crop": switch("crop", "random", "center"),
        f"{_SET}cache_latents": _cached("cache_latents"), "model.vae_path": lambda out, name, value, settings: (
            out.put(name, "parts", {"vae": value})), f"{_SET}cache_latents_to_disk": _cached("cache_latents"),
        "model.is_v_pred": lambda out, name, value, settings: (
            out.put(name, "objective", "v_prediction") if parse_bool(value) else out.unset.append(name)),
    },
    harmless={
        **dict.fromkeys(["job", "meta.*", "type", "performance_log_every", "sqlite_db_path", "save.save_format"],
                        "does not affect training"),
        **dict.fromkeys(["model.is_*", "model.arch", "model.model_kwargs*", "model.dtype", "sample.sampler"], OWN_FILE),
        **dict.fromkeys(["sample.*", "train.skip_first_sample", "train.force_first_sample"],
                        "samples use the model's own settings"),
        **dict.fromkeys(["train.ema_config.ema_decay", "network.transformer_only", "train.unload_text_encoder",
                         "network.lokr_full_rank", "model.qtype*"], ELSEWHERE),
        **dict.fromkeys(["train.xformers", "train.sdp", "train.attention_backend", "*.num_workers", "*.prefetch_factor",
                         "model.compile", "logging.*", "train.force_consistent_noise"], SPEED),
    },
    missing={
        **dict.fromkeys(["model.quantize*", "model.low_vram", "model.layer_offloading*"], MEMORY),
        **dict.fromkeys(["train.linear_timesteps*", "train.content_or_style*", "train.snr_gamma", "train.*_denoising_steps",
                         "train.noise_multiplier"], "timesteps and noise are sampled from the model's whole schedule"),
        **dict.fromkeys(["train.loss_type", "train.loss_target", "train.diff_output_preservation*",
                         "train.blank_prompt_preservation*", "train.inverted_mask_prior*", "train.do_*"], LOSS),
        **dict.fromkeys(["train.lr_scheduler_params.*", "train.optimizer_params.*", "train.refiner_lr",
                         "train.embedding_lr", "train.switch_boundary_every"], "is not supported"),
        **dict.fromkeys(["save.push_to_hub", "save.hf_*"], "nothing is uploaded"),
        f"{_SET}*": "set it in a dataset .toml", "config.process.*": "one job is one run",
    },
    neutral={"train.content_or_style*": ("balanced",), "train.loss_type": ("mse",), "train.loss_target": ("noise",),
             "train.switch_boundary_every": (1,), "train.noise_multiplier": (1.0,), "train.diff_output_preservation*":
             (1.0, "person"), "train.blank_prompt_preservation*": (1.0,), f"{_SET}*": (1, 1.0, "image"),
             "save.hf_*": (True,), "train.*_denoising_steps": (999, 1000)},
)  # fmt: skip
