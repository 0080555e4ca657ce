"""OneTrainer's settings, by their place in its JSON ("transformer.train").

Its files describe every component of every model it knows; those that the model type at hand does not have are noted as
harmless. `implied` holds its defaults where they differ from ours: its presets only store what differs from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from inweave.checked import for_message
from inweave.training.config.importers.translate import (
    ELSEWHERE,
    LOSS,
    MEMORY,
    NO_PART,
    OWN_FILE,
    PRECISIONS,
    SPEED,
    Reader,
    SettingsDialect,
    Translation,
    choice,
    cosine_cycles,
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


def _parts(settings: OtherSettings) -> tuple[str, tuple[str, ...]]:
    """(the denoiser, the text encoders) of a model type."""
    encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    kind = for_message(settings.get("model_type")).strip("'")
    if kind.startswith("STABLE_DIFFUSION_XL"):
        return "unet", encoders[:2]
    if kind.startswith("STABLE_DIFFUSION_3"):
        return "transformer", encoders
    if kind.startswith("STABLE_DIFFUSION"):
        return "unet", encoders[:1]
    return "transformer", encoders[: 2 if kind.startswith("FLUX_") else 1]


def _part(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    part, _, key = name.partition(".")
    denoiser, encoders = _parts(settings)
    trained = {each: parse_bool(settings.get(f"{each}.train", True)) for each in encoders}
    if part not in (denoiser, *encoders, "vae"):
        out.note(name, "this model type has no such component")
    elif key == "train" and part == denoiser:
        out.put(name, "train_denoiser", parse_bool(value))
    elif key == "train" and part in encoders:
        out.put(name, "train_text_encoders", any(trained.values()))
        if any(trained.values()) and not parse_bool(value):
            out.unsupported(name, "text encoders are trained together or not at all")
    elif key == "learning_rate" and part == denoiser:
        out.put(name, "learning_rate", value)
    elif key == "learning_rate" and trained.get(part) and "text_encoder_learning_rate" not in out.fields:
        out.put(name, "text_encoder_learning_rate", value)
    elif key == "model_name":
        out.fields["parts"] = {**out.fields.get("parts", {}), part: value}
        out.mapping[name] = "parts"
    elif key == "weight_dtype" and normalize_name(value) not in (*PRECISIONS, "none"):
        out.unsupported(name, f"{for_message(value)}: {MEMORY}")
    elif key == "dropout_probability" and part in encoders and parse_number(value) > 0:
        if out.fields.get("caption_dropout", parse_number(value)) == parse_number(value):
            out.put(name, "caption_dropout", parse_number(value))
        else:
            out.unsupported(name, "captions are dropped for all text encoders at once")
    elif (
        key == "guidance_scale" and part == denoiser and for_message(settings.get("model_type")).startswith("'FLUX_DEV")
    ):
        out.put(name, "guidance", parse_number(value))
    elif key == "gradient_checkpointing" and part == denoiser:
        out.put(name, "gradient_checkpointing", "full" if parse_bool(value) else "off")
    elif key in ("offload_fraction", "activation_offloading") and parse_scalar(value):
        out.unsupported(name, MEMORY)
    elif key == "stop_training_after" and value and trained.get(part, True) and part != "vae":
        unit = normalize_name(settings.get(f"{name}_unit", "never"))
        out.unsupported(name, "components are trained to the end") if unit != "never" else out.unset.append(name)
    elif key == "attention_mask" and parse_bool(value):
        out.unsupported(name, "prompts are encoded as in generation")
    else:
        out.note(name, "does not change this run")


def _rate(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    denoiser, encoders = _parts(settings)
    own = [f"{denoiser}.learning_rate", f"{denoiser}_learning_rate"]
    if name in own or all(settings.get(each) is None for each in own):
        out.put(name, "learning_rate", value)
    elif all(settings.get(f"{each}{end}") is None for each in encoders for end in (".learning_rate", "_learning_rate")):
        out.put(name, "text_encoder_learning_rate", value)
    else:
        out.note(name, "the components have learning rates of their own")


def _skip(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    """Counted from the layer the model was trained with, which is the last only where there is one encoder."""
    if not parse_int(value):
        out.unset.append(name)
    elif len(_parts(settings)[1]) == 1:
        out.put(name, "clip_skip", parse_int(value) + 1)
    else:
        out.unsupported(name, "this model type uses a fixed layer")


def _every(ours: str) -> Reader:
    def read(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
        unit = normalize_name(settings.get(f"{name}_unit", "step"))
        if unit in ("step", "never"):
            out.put(name, ours, parse_int(value) if unit == "step" else 0)
        else:
            out.unsupported(name, f"counts in {for_message(unit)}; {ours} is in steps")

    return read


def _concept(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    _, index, key = name.split(".", 2) if name.count(".") > 1 else (name, "", name)
    first = next((i for i in range(1000) if parse_bool(settings.get(f"concepts.{i}.enabled", True))), 0)
    at = f"concepts.{index}."
    if index != str(first):
        if key == "path" and parse_bool(settings.get(f"{at}enabled", True)):
            out.unsupported(name, "a dataset is one folder; list several in a dataset .toml")
        else:
            out.note(name, "belongs to a concept that is not used")
    elif key in _CONCEPT:
        out.put(name, _CONCEPT[key], value)
    elif key == "text.keep_tags_count" and parse_bool(settings.get(f"{at}text.enable_tag_shuffling", False)):
        out.put(name, "keep_tokens", value)
    elif key == "text.tag_dropout_probability" and parse_bool(settings.get(f"{at}text.tag_dropout_enable", False)):
        out.put(name, "tag_dropout", value)
    elif key == "text.prompt_source" and value != "sample":
        out.unsupported(name, "captions are files next to the images, or one caption for all")
    elif key in ("balancing", "repeats", "loss_weight") and parse_number(value) != 1:
        out.unsupported(name, "set it in a dataset .toml")
    elif (key.rpartition(".")[2].startswith("enable_") or key.endswith("_enable")) and parse_bool(value):
        usual = key in ("image.enable_crop_jitter", "text.tag_dropout_enable")
        out.note(name, ELSEWHERE) if usual else out.unsupported(name, "this augmentation is not supported")
    elif key in ("include_subdirectories", "validation_concept") and parse_bool(value):
        out.unsupported(name, "set it in a dataset .toml")
    else:
        out.note(name, ELSEWHERE)


_CONCEPT = {
    "path": "dataset", "text.enable_tag_shuffling": "shuffle_tags", "text.tag_delimiter": "tag_separator",
    "image.enable_random_flip": "flip", "text_variations": "caption_variants",
}  # fmt: skip


def _destination(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    place = PurePosixPath(str(value).replace("\\", "/"))
    out.put(name, "name", place.stem or "lora")
    out.put(name, "output", str(place.parent))


def _peft(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    plain = "dora" if parse_bool(settings.get("lora_decompose", False)) else "lora"
    choice("network", {"lora": plain, "loha": "loha", "lokr": "lokr"}, f"an import uses {plain}")(
        out, name, value, settings
    )


def _filter(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    preset = normalize_name(settings.get("layer_filter_preset", "full"))
    known = {"full": "all", "attnmlp": "attention-mlp", "attnonly": "attention"}
    if name == "layer_filter_preset":
        out.put(name, "targets", known[preset]) if preset in known else out.note(name, "layer_filter is used")
    elif preset in known:
        out.note(name, "layer_filter_preset is used")
    else:
        listed = [each.strip() for each in str(value).split(",") if each.strip()]
        regex = parse_bool(settings.get("layer_filter_regex", False))
        out.put(name, "targets", listed) if regex and listed else substring_patterns(out, name, listed, "targets")


def _distribution(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    """A shift, fixed or by resolution, is for flow models; models that predict noise sample uniformly."""
    flow = _parts(settings)[0] == "transformer"
    shift, moves = (
        parse_number(settings.get("timestep_shift") or 1),
        parse_bool(settings.get("dynamic_timestep_shifting") or False),
    )
    if normalize_name(value) == "uniform" and not (flow and (moves or shift != 1)):
        out.put(name, "timestep_sampling", "uniform")
    elif normalize_name(value) != "logitnormal" or not flow:
        out.unsupported(
            name, f"{for_message(value)}, with or without a shift: an import leaves it to the model's preset"
        )
    else:
        out.put(name, "timestep_sampling", "shift" if moves or shift != 1 else "logit_normal")
        if shift != 1 and not moves:
            out.put("timestep_shift", "timestep_shift", shift)
        out.put("noising_weight", "logit_std", parse_number(settings.get("noising_weight") or 0) + 1)
        if bias := parse_number(settings.get("noising_bias") or 0):
            out.put("noising_bias", "logit_mean", bias)


def _weight(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    if normalize_name(value) == "minsnrgamma":
        out.put(name, "min_snr_gamma", parse_number(settings.get("loss_weight_strength") or 5))
    elif normalize_name(value) == "constant":
        out.note(name, "is always the case here")
    else:
        out.unsupported(name, f"{for_message(value)}: only min-SNR weighting is supported")


def _betas(first: str, second: str) -> Reader:
    return lambda out, name, value, settings: out.put(
        name, "betas", (parse_number(settings.get(first) or 0.9), parse_number(settings.get(second) or 0.999))
    )


def _argument(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    """Options that only some optimizers have."""
    key = name.rpartition(".")[2]
    if key in ("d_coef", "d0", "growth_rate") and "prodigy" in normalize_name(settings.get("optimizer.optimizer")):
        out.fields["optimizer_args"] = {**out.fields.get("optimizer_args", {}), key: parse_scalar(value)}
        out.mapping[name] = "optimizer_args"
    else:
        out.note(name, "optimizers use their own defaults here")


def implied(settings: OtherSettings) -> dict[str, Any]:
    _, encoders = _parts(settings)
    defaults: dict[str, Any] = {
        "lora_rank": 16, "lora_alpha": 1.0, "learning_rate": 3e-6, "learning_rate_warmup_steps": 200, "epochs": 100,
        "train_dtype": "FLOAT_16", "resolution": "512", "peft_type": "LORA", "layer_filter_preset": "full",
    }  # fmt: skip
    return defaults | ({} if "train_text_encoder" in settings else {f"{each}.train": True for each in encoders})


ONE_TRAINER: Final = SettingsDialect(
    plain={
        "base_model_name": "model", "lora_alpha": "alpha", "lora_model_name": "start_from", "epochs": "epochs",
        "batch_size": "batch_size", "gradient_accumulation_steps": "gradient_accumulation",
        "learning_rate_warmup_steps": "warmup", "clip_grad_norm": "max_grad_norm", "tensorboard": "tensorboard",
        "aspect_ratio_bucketing": "buckets", "image_caching": "cache_latents",
        "latent_caching": "cache_latents", "dropout_probability": "dropout", "offset_noise_weight": "noise_offset",
        "masked_training": "masked_loss", "train_device": "device", "optimizer.weight_decay": "weight_decay",
        "optimizer.eps": "epsilon", "weight_decay": "weight_decay",
        "text_encoder_learning_rate": "text_encoder_learning_rate", "train_unet": "train_denoiser",
        "train_text_encoder": "train_text_encoders",
    },
    readers={
        "training_method": lambda out, name, value, settings: (
            out.note(name, "adapters are always trained") if value == "LORA"
            else out.problems.append(f"{name}: {for_message(value)} trains no adapter; only LORA is supported")),
        "lora_rank": used_if("rank", lambda g: normalize_name(g.get("peft_type", "lora")) != "lokr", "lokr_dim is used"),
        "lokr_dim": used_if("rank", lambda g: normalize_name(g.get("peft_type")) == "lokr", NO_PART),
        "lokr_decompose_factor": used_if("lokr_factor", lambda g: normalize_name(g.get("peft_type")) == "lokr", NO_PART),
        "peft_type": _peft, "learning_rate": _rate, "unet_learning_rate": _rate, "text_caching": used_if(
            "cache_text", lambda g: not any(parse_bool(g.get(f"{each}.train", True)) for each in _parts(g)[1]), ELSEWHERE), "resolution": largest_resolution, "train_dtype": precision,
        "output_dtype": save_dtype, "output_model_destination": _destination, "optimizer": optimizer,
        "optimizer.optimizer": optimizer, "optimizer.beta1": _betas("optimizer.beta1", "optimizer.beta2"),
        "optimizer.beta2": _betas("optimizer.beta1", "optimizer.beta2"), "optimizer.*": _argument,
        "learning_rate_scheduler": lr_scheduler, "learning_rate_cycles": cosine_cycles("learning_rate_scheduler"),
        "ema": lambda out, name, value, settings: out.put(
            name, "ema_decay", 0.0 if normalize_name(value) == "off" else parse_number(settings.get("ema_decay") or 0.999)),
        "layer_filter": _filter, "layer_filter_preset": _filter, "timestep_distribution": _distribution,
        "loss_weight_fn": _weight, "save_every": _every("save_every"), "save_after": _every("save_every"),
        "sample_after": _every("sample_every"), "concepts.*": _concept,
        "unet.*": _part, "transformer.*": _part, "text_encoder*.*": _part, "vae.*": _part,
        "text_encoder_layer_skip": _skip,
        "force_v_prediction": lambda out, name, value, settings: (
            out.put(name, "objective", "v_prediction") if parse_bool(value) else out.unset.append(name)),
        "force_epsilon_prediction": lambda out, name, value, settings: (
            out.put(name, "objective", "epsilon") if parse_bool(value) else out.unset.append(name)),
        "gradient_checkpointing": lambda out, name, value, settings: out.put(
            name, "gradient_checkpointing", "off" if normalize_name(value) in ("off", "false") else "full"),
        "continue_last_backup": switch("resume", "auto", "never"), "rolling_backup_count": used_if(
            "keep_last", lambda g: parse_bool(g.get("rolling_backup") or False), ELSEWHERE),
        "output_model_format": choice("dialect", {
            "safetensors": "kohya", "legacylora": "kohya", "kohyalora": "kohya", "comfylora": "kohya",
            "diffuserslora": "diffusers", "diffusers": "diffusers"}, "an import writes kohya's names"),
        "samples.*": sample_prompt,
    },
    harmless={
        "model_type": OWN_FILE,
        **dict.fromkeys(["*_unit", "lora_decompose", "ema_decay", "loss_weight_strength", "layer_filter_regex",
                         "timestep_shift", "dynamic_timestep_shifting", "noising_weight", "noising_bias",
                         "rolling_backup", "concept_file_name"], ELSEWHERE),
        **dict.fromkeys(["optimizer_defaults.*", "optimizer_defaults", "embedding.*", "embedding_*", "token_count",
                         "initial_embedding_text", "prior.*", "decoder*", "effnet_encoder.*", "unconditional_transformer.*",
                         "oft_*", "dora_oft", "lokr_*", "lora_decompose_*", "frames", "sample_video_format",
                         "sample_audio_format", "quantization.*", "bundle_additional_embeddings", "unmasked_*",
                         "preserve_embedding_norm", "vb_loss_strength", "huber_delta"], NO_PART),
        **dict.fromkeys(["attention_mechanism", "caching_threads", "dataloader_threads", "prefetch_next_batch", "compile",
                         "temp_device", "enable_autocast_cache", "fallback_train_dtype", "*_gradient_reduce*",
                         "gradient_reduce_*", "async_offloading", "enable_*_offloading", "device_indexes"], SPEED),
        **dict.fromkeys(["debug_*", "workspace_dir", "cache_dir", "tensorboard_*", "clear_cache_before_training", "cloud.*", "secrets.*",
                         "include_train_config", "prevent_overwrites", "sample_*", "samples_to_tensorboard",
                         "non_ema_sampling", "backup_*", "save_*", "only_cache", "__version", "*.__version",
                         "ema_update_step_interval", "lora_weight_dtype", "weight_dtype", "*_weight_dtype",
                         "validate_after", "latent_caching_epochs", "train_*_epochs"], "does not affect what is trained here"),
    },
    missing={
        **dict.fromkeys(["mse_strength", "mae_strength", "log_cosh_strength", "huber_strength", "loss_scaler",
                         "normalize_masked_area_loss", "masked_prior_preservation_weight"], LOSS),
        **dict.fromkeys(["learning_rate_scaler", "learning_rate_min_factor", "custom_learning_rate_scheduler",
                         "scheduler_params*"], "learning rates are used as they are, and end at zero"),
        **dict.fromkeys(["perturbation_noise_weight", "generalized_offset_noise", "min_noising_strength", "cep_gamma",
                         "max_noising_strength", "rescale_noise_scheduler_to_zero_terminal_snr",
                         "force_circular_padding"], "noise is sampled from the model's own schedule"),
        "validation": "set validation_split, the fraction held out", "multi_gpu": "use --gpus",
        "additional_embeddings*": "training embeddings is not supported", "layer_offload_fraction": MEMORY,
        "custom_conditioning_image": "conditioning images are not supported", "*sequence_length": OWN_FILE,
        "*_layer_skip": "only the first CLIP encoder can skip layers",
    },
    neutral={"mse_strength": (1.0,), "loss_scaler": ("NONE",), "learning_rate_scaler": ("NONE",),
             "max_noising_strength": (1.0,), "*sequence_length": (77, 512)},
)  # fmt: skip
