"""kohya's settings, whose names most trainers and guides use, and the flags of train-lora.

A setting of theirs that falls back to another one does so here too: unet_lr and text_encoder_lr to learning_rate, steps
to epochs. What an import does beyond these tables is in `kohya_import`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from inweave.checked import for_message
from inweave.training.config.fields import Settings
from inweave.training.importers.kohya.network import network
from inweave.training.importers.optimizers import lr_scheduler, optimizer, optimizer_args
from inweave.training.importers.translate import (
    ELSEWHERE,
    MEMORY,
    METADATA,
    SPEED,
    UPLOAD,
    Reader,
    SettingsDialect,
    Translation,
    choice,
    cosine_cycles,
    is_own,
    log_with,
    only,
    optional,
    precision,
    save_dtype,
    switch,
)
from inweave.training.importers.values import (
    is_off,
    normalize_name,
    parse_bool,
    parse_int,
    parse_number,
    parse_scalar,
    parse_sizes,
)


def _rates(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    """learning_rate is what unet_lr and text_encoder_lr fall back to."""
    listed = list(value) if isinstance(value, list | tuple) else [value]
    rate = parse_scalar(listed[0]) if listed else None
    if name == "text_encoder_lr":
        if str(settings.get("network_module")).startswith("lycoris"):
            listed = listed[:1]  # it takes one
        rates = [parse_number(each) for each in listed] if out.exact else []
        if len(set(rates[:2])) > 1 and out.family in ("sdxl", "sd3") and all(rates[:2]):
            out.add_rules(name, [{"pattern": r"^te2\.", "learning_rate": rates[1]}])
        elif out.family in ("sdxl", "sd3") and any(rates[:2]) and not all(rates[:2]):
            out.add_rules(name, [{"pattern": r"^te2\." if rates[0] else r"^te1\.", "skip": True}])
            rate = max(rates[:2])
        elif len({str(each) for each in listed}) > 1 and out.family != "flux":
            out.unsupported(f"{name}.1", "all text encoders share one learning rate, the first")
        disabled = not (rate if not rates else parse_number(rate))
        if normalize_name(settings.get("network_train_unet_only")) in ("true", "1"):
            out.note(name, "text encoders are not trained: network_train_unet_only")
            return
        out.put(name, "train_text_encoders", not disabled)
        if not disabled:
            out.put(name, "text_encoder_learning_rate", rate)
    elif name == "unet_lr":
        out.put(name, "learning_rate", rate) if rate else out.put(name, "train_denoiser", False)
    elif not settings.get("unet_lr"):
        out.put(name, "learning_rate", value)
    elif settings.get("text_encoder_lr") is None and "text_encoder_learning_rate" not in settings:
        out.put(name, "text_encoder_learning_rate", value)
    else:
        out.note(name, "unet_lr and text_encoder_lr are used instead")


def _steps(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    if settings.get("max_train_epochs"):
        out.note(name, "max_train_epochs is used instead")
    else:
        out.put(name, "steps", value)


def _last_steps(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    every = settings.get("save_every_n_steps") or settings.get("save_every")
    if not every:
        out.note(name, "only used with save_every_n_steps")
    elif parse_int(value):
        out.put(name, "keep_last", max(1, math.ceil(parse_int(value) / max(1, parse_int(every)))))


def _resolution(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    if normalize_name(value) == "none":
        out.put(name, "resolution", None)
        return
    sides = parse_sizes(value)
    # the smallest square that holds the area, so that a bucket of the size itself is one
    out.put(name, "resolution", math.isqrt(math.prod(sides) - 1) + 1 if len(sides) == 2 else sides[0])
    if len(set(sides)) > 1:
        out.note(name, f"{for_message(value)} counts as an area; buckets choose the shape")


def _unet_only(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    if parse_bool(value):
        out.put(name, "train_text_encoders", False)
    else:
        out.unset.append(name)


def _text_only(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    out.put(name, "train_denoiser", not parse_bool(value))
    if parse_bool(value):
        out.put(name, "train_text_encoders", True)


def _part(ours: str) -> Reader:
    def read(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
        part = ours
        if name == "t5xxl":  # the third encoder of SD3, which alone has a clip_g; the second of FLUX.1
            part = (
                "text_encoder_3"
                if settings.get("clip_g") or "sd3" in normalize_name(settings.get("network_module"))
                else ours
            )
        out.fields["parts"] = {**out.fields.get("parts", {}), part: value}
        out.mapping[name] = "parts"

    return read


def _known(expected: Iterable[Any], why: str) -> Reader:
    """Harmless at the values that are always used here, without equivalent at others."""
    usual = {normalize_name(each) for each in expected}
    return lambda out, name, value, settings: (
        out.note(name, "is always the case here")
        if normalize_name(value) in usual
        else out.refuse(name, f"{for_message(value)}: {why}")
    )


def _prediction(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    """What flux_train_network.py makes of a prediction v before it compares it with noise - image."""
    compared = {"sigmascaled": "noisy - sigma * v", "additive": "noisy + v"}.get(
        normalize_name(value), "something else"
    )
    if normalize_name(value) == "raw":
        out.note(name, "is always the case here")
    else:
        out.refuse(
            name,
            f"{for_message(value)} compares {compared}, and not the prediction v itself, with noise - image; raw does",
        )


def _timesteps(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    """kohya's distributions and ours."""
    known = {
        "auto": "auto", "uniform": "uniform", "sigmoid": "sigmoid", "logitnormal": "logit_normal", "shift": "shift",
        "fluxshift": "shift",
    }  # fmt: skip
    if out.exact:
        out.mapping[name] = "timestep_sampling"  # `kohya_import` reads it together with the shift
    elif normalize_name(value) == "sigma":
        normal = normalize_name(settings.get("weighting_scheme")) == "logitnormal"
        out.put(name, "timestep_sampling", "logit_normal" if normal else "uniform")
    else:
        choice("timestep_sampling", known)(out, name, value, settings)


def _gradient_checkpointing(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    """A switch in kohya's files, a choice in ours."""
    known = {"true": "full", "1": "full", "yes": "full", "on": "full", "false": "off", "0": "off", "no": "off",
             "none": "off"}  # fmt: skip
    modes = {mode: mode for mode in ("off", "selective", "full")}
    out.put(name, "gradient_checkpointing", (known | modes).get(normalize_name(value), value))


def _shift(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    if out.exact:
        out.mapping[name] = "timestep_shift"
    elif normalize_name(settings.get("timestep_sampling", "shift")) in ("shift", "auto"):
        out.put(name, "timestep_shift", parse_number(value))
    else:
        out.note(name, "only used with timestep_sampling = shift")


def _scale(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    if out.exact:
        out.mapping[name] = "logit_std"  # `kohya_import` reads it together with the distribution
    else:
        out.put(name, "logit_mean" if name == "logit_mean" else "logit_std", value)


def _power(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    if normalize_name(settings.get("lr_scheduler")) == "polynomial":
        out.put(name, "polynomial_power", value)
    else:
        out.note(name, "only used by the polynomial scheduler")


def _length(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    """75, 150 or 225; not set is 75. There captions are padded to it, here to the longest of their batch."""
    out.put(name, "max_token_length", parse_int(value))


def _later(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    """Read together, after all others."""


def _loss(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    ours = {"l2": "mse", "mse": "mse", "l1": "l1", "huber": "huber", "smoothl1": "smooth_l1"}.get(normalize_name(value))
    if ours == "mse" and not out.exact:
        out.note(name, "is the default here")
    elif ours is None:
        out.refuse(name, f"{for_message(value)} is not supported")
    else:
        out.put(name, "loss", ours)


def _huber(ours: str) -> Reader:
    """Used by the losses that it shapes."""

    def read(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
        if is_own(out, name):
            out.put(name, name, value)
        elif normalize_name(settings.get("loss_type", "l2")) not in ("huber", "smoothl1"):
            out.note(name, "only used by loss_type = huber and smooth_l1")
        elif ours in Settings.model_fields:
            out.put(name, ours, parse_scalar(value))
        else:
            out.refuse(name, f"{for_message(value)}: there is no such setting here")

    return read


def _multires_discount(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    if out.exact and is_off(settings.get("multires_noise_iterations")):
        out.note(name, "only used with multires_noise_iterations")
    else:
        optional("multires_noise_discount", parse_number)(out, name, value, settings)


def _timestep_limit(ours: str, neutral: int) -> Reader:
    def read(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
        if not is_own(out, name) and parse_int(value) in (0, neutral):
            out.unset.append(name)
        else:
            optional(ours, parse_int)(out, name, value, settings)

    return read


def _resume(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    """A path, or false, which kohya's configurations write for none."""
    if value is False or (out.exact and is_off(value)):
        out.put(name, "resume", "never")
    elif out.exact:
        out.put(name, "resume", "never")
        out.unsupported(name, "a training state of another trainer cannot be resumed; start_from takes its adapter")
    else:
        out.put(name, "resume", value)


def _clip_skip(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    """kohya's layer 1 is the model's own; its scripts for SDXL and transformers ignore the setting."""
    if not out.exact:
        out.put(name, "clip_skip", value)
    elif out.family != "sd":
        out.put(name, "clip_skip", None)
        out.note(name, "is ignored for this model")
    else:
        out.put(name, "clip_skip", parse_int(value) if parse_int(value) > 1 else None)


_DATA = "set it in the dataset .toml"
_EPOCHS = "intervals are in steps here"
_NOISE = "noise is sampled without it"

KOHYA: Final = SettingsDialect(
    plain={
        "lr": "learning_rate", "network_dim": "rank", "network_dropout": "hidden_dropout", "network_weights": "start_from",
        "max_train_epochs": "epochs", "train_batch_size": "batch_size", "gradient_accumulation_steps": "gradient_accumulation",
        "lr_warmup_steps": "warmup", "caption_dropout_rate": "caption_dropout",
        "caption_tag_dropout_rate": "tag_dropout", "shuffle_caption": "shuffle_tags",
        "caption_separator": "tag_separator", "caption_extension": "caption_extensions", "flip_aug": "flip",
        "enable_bucket": "buckets", "min_bucket_reso": "min_bucket", "max_bucket_reso": "max_bucket",
        "bucket_reso_steps": "bucket_step", "output_dir": "output", "output_name": "name",
        "save_every_n_steps": "save_every", "sample_every_n_steps": "sample_every", "dit": "model",
        "train_data_dir": "dataset", "dataset_config": "dataset", "pretrained_model_name_or_path": "model",
        "guidance_scale": "guidance",
        "cache_text_encoder_outputs": "cache_text",
    },
    readers={
        "learning_rate": _rates, "unet_lr": _rates, "text_encoder_lr": _rates, "max_train_steps": _steps,
        "network_alpha": lambda out, name, value, settings: out.put(name, "alpha", parse_number(value) or None),
        "min_snr_gamma": lambda out, name, value, settings: out.put(name, "min_snr_gamma", parse_scalar(value) or None),
        "optimizer_type": optimizer, "optimizer_args": optimizer_args, "use_8bit_adam": only("optimizer", "adamw8bit"),
        "lr_scheduler": lr_scheduler, "lr_scheduler_num_cycles": cosine_cycles("lr_scheduler"),
        "lr_scheduler_power": _power, "mixed_precision": precision, "fp16": only("precision", "fp16"),
        "save_precision": save_dtype, "gradient_checkpointing": _gradient_checkpointing,
        "random_crop": switch("crop", "random", "center"), "bucket_no_upscale": switch("upscale", False, True),
        "cache_latents_to_disk": only("cache_latents", True),
        "cache_text_encoder_outputs_to_disk": only("cache_text", True),
        "v_parameterization": only("objective", "v_prediction"), "save_last_n_steps": _last_steps,
        "resolution": _resolution, "network_train_unet_only": _unet_only, "network_train_text_encoder_only": _text_only,
        "vae": _part("vae"), "ae": _part("vae"), "clip_l": _part("text_encoder"), "clip_g": _part("text_encoder_2"),
        "t5xxl": _part("text_encoder_2"), "timestep_sampling": _timesteps, "discrete_flow_shift": _shift,
        "log_with": log_with, "network_module": _later, "network_args": _later,
        "save_model_as": lambda out, name, value, settings: out.note(name, "adapters are written as safetensors"),
        "model_prediction_type": _prediction,
        "weighting_scheme": lambda out, name, value, settings: (
            out.note(name, ELSEWHERE) if out.exact
            else _known(["none", "uniform", "logit_normal"], "timesteps are not weighted")(out, name, value, settings)),
        "loss_type": _loss, "huber_c": _huber("huber_c"), "huber_schedule": _huber("huber_schedule"),
        "max_token_length": _length, "resume": _resume, "clip_skip": _clip_skip,
        "save_every_n_epochs": optional("save_every_epochs", parse_int, _EPOCHS),
        "sample_every_n_epochs": optional("sample_every_epochs", parse_int, _EPOCHS),
        "validate_every_n_epochs": optional("validate_every_epochs", parse_int, _EPOCHS),
        "validate_every_n_steps": optional("validate_every", parse_int, _EPOCHS),
        "min_timestep": _timestep_limit("min_timestep", 0), "max_timestep": _timestep_limit("max_timestep", 1000),
        "multires_noise_iterations": optional("multires_noise_iterations", parse_int),
        "multires_noise_discount": _multires_discount,
        "debiased_estimation_loss": optional("debiased_estimation", parse_bool),
        "scale_weight_norms": optional("scale_weight_norms", parse_number),
        "training_shift": _shift, "sigmoid_scale": _scale, "logit_mean": _scale, "logit_std": _scale, "text_encoder": _part("text_encoder"),
    },
    harmless={
        **dict.fromkeys(
            ["xformers", "sdpa", "mem_eff_attn", "split_attn", "diffusers_xformers", "max_data_loader_n_workers",
             "persistent_data_loader_workers", "lowram", "highvram", "vae_batch_size", "text_encoder_batch_size",
             "torch_compile", "dynamo_*", "ddp_*", "disable_mmap_load_safetensors", "skip_cache_check", "mem_eff_save",
             "num_cpu_threads_per_process", "deepspeed", "zero_stage", "offload_*", "zero3_*", "compile*", "cuda_*",
             "sage_attn", "flash_attn", "flash3", "async_upload", "no_half_vae", "cpu_offload_checkpointing"], SPEED),
        **dict.fromkeys(["v2", "sdxl", "model_train_type", "model_version", "sd_models", "model_list"],
                        "is read from the model's own files"),
        **dict.fromkeys(["save_state", "save_state_on_train_end", "save_state_to_huggingface", "save_last_n_steps_state",
                         "save_last_n_epochs_state"], "checkpoints always hold everything needed to resume"),
        **dict.fromkeys(["config_file", "output_config", "debug_dataset", "console_log_*", "tokenizer_cache_dir", "script",
                         "enable_preview", "dataset_repeats", "token_warmup_min", "ip_noise_gamma_random_strength",
                         "base_weights_multiplier", "noise_offset_type", "lr_scheduler_params", "sample_at_first", "sample_sampler", "wandb_api_key", "log_prefix",
                         "log_tracker_*", "log_config", "logging_dir", "gpu_ids", "tensorboard*", "comment",
                         "max_validation_steps", "validation_seed", "clip_g_dropout_rate", "*_attn_mask_type"],
                        "does not affect training"),
        **dict.fromkeys(["training_comment", "metadata_*", "no_metadata"], METADATA),
        **dict.fromkeys(["huggingface_*", "resume_from_huggingface"], UPLOAD),
    },
    missing={
        **dict.fromkeys(["save_last_n_epochs", "save_n_epoch_ratio"], "set keep_last and keep_every"),
        **dict.fromkeys(["reg_data_dir", "keep_tokens_separator", "enable_wildcard", "caption_prefix",
                         "caption_suffix", "alpha_mask"], _DATA),
        **dict.fromkeys(["fp8_base", "fp8_base_unet", "fp8_scaled", "fp8_vl", "fp8_llm", "fp8_t5", "blocks_to_swap", "lowvram",
                         "fused_backward_pass", "double_blocks_to_swap", "single_blocks_to_swap", "split_mode"], MEMORY),
        **dict.fromkeys(["full_bf16", "full_fp16"], "trained weights stay in fp32"),
        **dict.fromkeys(["initial_epoch", "initial_step", "skip_until_initial_step"], "use start_from or resume"),
        **dict.fromkeys(["apply_t5_attn_mask", "apply_lg_attn_mask", "t5xxl_max_token_length", "disable_*_attn_mask"],
                        "prompts are encoded as in generation"),
        "stop_text_encoder_training": "text encoders are trained to the end", "mode_scale": "only used by another scheme",
        "num_processes": "use --gpus", "multi_gpu": "use --gpus", "num_machines": "runs use one machine",
    },
    refused={
        "lr_scheduler_args": "schedulers have no further options",
        **dict.fromkeys(["adaptive_noise_scale", "ip_noise_gamma", "noise_offset_random_strength"], _NOISE),
        "zero_terminal_snr": "the model's own schedule is used",
        **dict.fromkeys(["scale_v_pred_loss_like_noise_pred", "v_pred_like_loss", "pyramid_loss*"], "the loss is not scaled"),
        "huber_scale": "huber_c says where the loss becomes linear", "weighted_captions": "captions have no weights", "secondary_separator": "captions have one separator",
        **dict.fromkeys(["color_aug", "face_crop_aug_range"], "images are flipped and cropped alone"),
        **dict.fromkeys(["token_warmup_step", "caption_dropout_every_n_epochs"], "captions are the same in every epoch"),
        **dict.fromkeys(["in_json", "dataset_class", "conditioning_data_dir"], "a dataset is a folder or a dataset .toml"),
        **dict.fromkeys(["base_weights", "dim_from_weights"], "set start_from, or merge the adapter into the model first"),
        **dict.fromkeys(["lr_decay_steps", "lr_scheduler_min_lr_ratio", "lr_scheduler_timescale"],
                        "schedulers end at zero with the last step"),
        "lr_scheduler_type": "schedulers are constant, cosine, linear and polynomial",
        "use_lion_optimizer": "set optimizer", "optimizer_args_custom": "set optimizer_args",
    },
    neutral={"num_processes": (1, "1"), "num_machines": (1, "1"), "t5xxl_max_token_length": (512, "512"),
             "mode_scale": (1.29,), "base_weights_multiplier": (1, 1.0), "huber_scale": (1, 1.0), "lr_scheduler_timescale": (1,)},
    finish=network,
)  # fmt: skip
