"""kohya's settings, whose names most trainers and guides use, and the flags of train-lora.

A setting of theirs that falls back to another one does so here too: unet_lr and text_encoder_lr to learning_rate, steps
to epochs. `implied` holds their trainer's defaults where they differ from ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from inweave.checked import for_message
from inweave.training.config.importers.translate import (
    LOSS,
    MEMORY,
    SPEED,
    Reader,
    SettingsDialect,
    Translation,
    choice,
    cosine_cycles,
    lr_scheduler,
    normalize_name,
    optimizer,
    optimizer_args,
    parse_bool,
    parse_int,
    parse_number,
    parse_pairs,
    parse_scalar,
    parse_sizes,
    precision,
    save_dtype,
    switch,
)


def _rates(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    """learning_rate is what unet_lr and text_encoder_lr fall back to."""
    listed = list(value) if isinstance(value, list | tuple) else [value]
    rate = parse_scalar(listed[0]) if listed else None
    if name == "text_encoder_lr":
        if len({str(each) for each in listed}) > 1:
            out.unsupported(f"{name}.1", "all text encoders share one learning rate, the first")
        disabled = not rate
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
    out.put(name, "resolution", round(math.sqrt(math.prod(sides))) if len(sides) == 2 else sides[0])
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


def _only(ours: str, value: Any, when: bool = True) -> Reader:
    """A switch that has a meaning in one position only."""

    def read(out: Translation, name: str, switch: Any, settings: Mapping[str, Any]) -> None:
        out.put(name, ours, value) if parse_bool(switch) is when else out.unset.append(name)

    return read


def _known(expected: Iterable[Any], why: str) -> Reader:
    """Harmless at the values that are always used here, without equivalent at others."""
    usual = {normalize_name(each) for each in expected}
    return lambda out, name, value, settings: (
        out.note(name, "is always the case here")
        if normalize_name(value) in usual
        else out.unsupported(name, f"{for_message(value)}: {why}")
    )


def _timesteps(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    """kohya's distributions and ours."""
    known = {
        "auto": "auto", "uniform": "uniform", "sigmoid": "sigmoid", "logitnormal": "logit_normal", "shift": "shift",
        "fluxshift": "shift",
    }  # fmt: skip
    if normalize_name(value) == "sigma":
        normal = normalize_name(settings.get("weighting_scheme")) == "logitnormal"
        out.put(name, "timestep_sampling", "logit_normal" if normal else "uniform")
    else:
        choice("timestep_sampling", known, "an import leaves it to the model's preset")(out, name, value, settings)


def _gradient_checkpointing(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    """A switch in kohya's files, a choice in ours."""
    known = {"true": "full", "1": "full", "yes": "full", "on": "full", "false": "off", "0": "off", "no": "off",
             "none": "off"}  # fmt: skip
    modes = {mode: mode for mode in ("off", "selective", "full")}
    out.put(name, "gradient_checkpointing", (known | modes).get(normalize_name(value), value))


def _shift(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    if normalize_name(settings.get("timestep_sampling", "shift")) in ("shift", "auto"):
        out.put(name, "timestep_shift", parse_number(value))
    else:
        out.note(name, "only used with timestep_sampling = shift")


def _power(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    if normalize_name(settings.get("lr_scheduler")) == "polynomial":
        out.put(name, "polynomial_power", value)
    else:
        out.note(name, "only used by the polynomial scheduler")


def _log_with(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    if normalize_name(value) in ("tensorboard", "all"):
        out.put(name, "tensorboard", True)
    else:
        out.unsupported(name, f"{for_message(value)}: only TensorBoard logs are written")


def _length(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    out.note(name, "is not needed: captions of any length are encoded in chunks, nothing is truncated")


def _later(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    """Read together, after all others."""


_EPOCHS = "counts epochs; intervals are in steps here"
_DATA = "set it in the dataset .toml"
_METADATA = "is not written into the adapter"

_ALGORITHMS = {"lora": "lora", "locon": "locon", "loha": "loha", "lokr": "lokr"}
_PRESETS = {"full": "all", "attnmlp": "attention-mlp", "unettransformeronly": "attention-mlp", "attnonly": "attention"}


def _network(out: Translation, settings: Mapping[str, Any]) -> None:
    """network_module and network_args together decide what is trained; kohya's own modules train attention and MLPs."""
    if not settings.get("network_module") and not settings.get("network_args"):
        return
    value = settings.get("network_module")
    module = value[:100] if isinstance(value, str) else for_message(value) if value else ""
    try:
        arguments = parse_pairs(settings.get("network_args") or [])
    except ValueError as error:
        out.problems.append(f"network_args: {error}")
        return
    lycoris = module.startswith("lycoris") or "algo" in arguments
    conv = parse_scalar(arguments.get("conv_dim", 0))
    algorithm = normalize_name(arguments.get("algo", "locon" if conv or lycoris else "lora"))
    if "network_module" in settings:
        out.mapping["network_module"] = "network"
    if algorithm not in _ALGORITHMS:
        out.unsupported("network_args.algo", f"{for_message(arguments['algo'])} is not supported; an import uses lora")
    elif module and not module.startswith(("networks.lora", "lycoris")):
        out.unsupported("network_module", f"{for_message(module)} is not supported; an import uses lora")
    else:
        kind = _ALGORITHMS[algorithm]
        kind = "locon" if kind == "lora" and conv else kind
        if parse_bool(arguments.get("dora_wd", "false")) and kind in ("lora", "locon"):
            kind = "dora"
        out.put("network_args.algo" if "algo" in arguments else "network_module", "network", kind)
    if not lycoris and module and "targets" not in settings:
        out.put("network_module.targets", "targets", "attention-mlp")
    for name, value in arguments.items():
        try:
            _network_arg(out, f"network_args.{name}", name, value, algorithm)
        except ValueError as error:
            out.problems.append(f"network_args.{name}: {error}")


def _network_arg(out: Translation, theirs: str, name: str, value: Any, algorithm: str) -> None:
    if name == "algo" or (name == "dora_wd" and algorithm in ("lora", "locon")):
        out.mapping.setdefault(theirs, "network")
    elif name in ("conv_dim", "conv_alpha", "factor", "dropout", "rs_lora"):
        ours = {"conv_dim": "conv_rank", "rs_lora": "rslora", "factor": "lokr_factor"}.get(name, name)
        if parse_scalar(value) and (name != "factor" or algorithm == "lokr"):
            out.put(theirs, ours, parse_scalar(value))
        else:
            out.unset.append(theirs)
    elif name == "preset":
        choice("targets", _PRESETS, "list the modules in targets")(out, theirs, value, {})
    elif name in ("network_reg_dims", "network_reg_lrs"):
        ours = "rank" if name == "network_reg_dims" else "learning_rate"
        rules = {rule["pattern"]: dict(rule) for rule in out.fields.get("rules", ())}
        for each in str(value).split(","):
            pattern, _, argument = each.strip().rpartition("=")
            if not pattern:
                raise ValueError(f"expected pattern=number, got {for_message(each)}")
            rules.setdefault(pattern, {"pattern": pattern})[ours] = parse_scalar(argument)
        out.fields["rules"] = list(rules.values())
        out.mapping[theirs] = "rules"
        out.note(theirs, "its patterns are searched in dotted module names")
    elif name in ("verbose", "bypass_mode"):
        out.note(theirs, "does not change what is trained")
    elif parse_scalar(value) in (False, None, "", "all"):
        out.unset.append(theirs)
    else:
        why = "use rules, with skip for what is left out" if "block" in name else "is not supported for this network"
        out.unsupported(theirs, why)


def implied(settings: Mapping[str, Any]) -> dict[str, Any]:
    """kohya's defaults for what a file does not set."""
    rate = settings.get("learning_rate") or 2e-6
    frozen = any(settings.get(name) for name in ("network_train_unet_only", "cache_text_encoder_outputs"))
    defaults: dict[str, Any] = {
        "network_dim": 4, "network_alpha": 1.0, "mixed_precision": "no",
        "learning_rate": None if settings.get("unet_lr") else rate,
        "text_encoder_lr": None if frozen else rate,
        "max_train_steps": None if settings.get("max_train_epochs") or settings.get("epochs") else 1600,
    }  # fmt: skip
    if not settings.get("dataset_config"):
        defaults |= {
            "enable_bucket": False,
            "caption_extension": ".caption",
            "bucket_no_upscale": False,
        }
    if "flux" in normalize_name(settings.get("network_module")):
        defaults |= {"timestep_sampling": "sigma", "guidance_scale": 3.5, "model_prediction_type": "sigma_scaled"}
    ours = {
        "network_dim": "rank", "network_alpha": "alpha", "mixed_precision": "precision", "max_train_steps": "steps",
        "text_encoder_lr": "train_text_encoders", "enable_bucket": "buckets", "caption_extension": "caption_extensions",
        "bucket_no_upscale": "upscale",
    }  # fmt: skip
    return {
        name: value
        for name, value in defaults.items()
        if value is not None and settings.get(name) in (None, "") and ours.get(name) not in settings
    }


KOHYA: Final = SettingsDialect(
    plain={
        "lr": "learning_rate", "network_dim": "rank", "network_dropout": "dropout", "network_weights": "start_from",
        "max_train_epochs": "epochs", "train_batch_size": "batch_size", "gradient_accumulation_steps": "gradient_accumulation",
        "lr_warmup_steps": "warmup", "caption_dropout_rate": "caption_dropout",
        "caption_tag_dropout_rate": "tag_dropout", "shuffle_caption": "shuffle_tags",
        "caption_separator": "tag_separator", "caption_extension": "caption_extensions", "flip_aug": "flip",
        "enable_bucket": "buckets", "min_bucket_reso": "min_bucket", "max_bucket_reso": "max_bucket",
        "bucket_reso_steps": "bucket_step", "output_dir": "output", "output_name": "name",
        "save_every_n_steps": "save_every", "sample_every_n_steps": "sample_every",
        "train_data_dir": "dataset", "dataset_config": "dataset", "pretrained_model_name_or_path": "model",
        "sigmoid_scale": "logit_std", "guidance_scale": "guidance",
        "cache_text_encoder_outputs": "cache_text",
    },
    readers={
        "learning_rate": _rates, "unet_lr": _rates, "text_encoder_lr": _rates, "max_train_steps": _steps,
        "network_alpha": lambda out, name, value, settings: out.put(name, "alpha", parse_number(value) or None),
        "min_snr_gamma": lambda out, name, value, settings: out.put(name, "min_snr_gamma", parse_scalar(value) or None),
        "optimizer_type": optimizer, "optimizer_args": optimizer_args, "use_8bit_adam": _only("optimizer", "adamw8bit"),
        "lr_scheduler": lr_scheduler, "lr_scheduler_num_cycles": cosine_cycles("lr_scheduler"),
        "lr_scheduler_power": _power, "mixed_precision": precision, "fp16": _only("precision", "fp16"),
        "save_precision": save_dtype, "gradient_checkpointing": _gradient_checkpointing,
        "random_crop": switch("crop", "random", "center"), "bucket_no_upscale": switch("upscale", False, True),
        "cache_latents_to_disk": _only("cache_latents", True),
        "cache_text_encoder_outputs_to_disk": _only("cache_text", True),
        "v_parameterization": _only("objective", "v_prediction"), "save_last_n_steps": _last_steps,
        "resolution": _resolution, "network_train_unet_only": _unet_only, "network_train_text_encoder_only": _text_only,
        "vae": _part("vae"), "ae": _part("vae"), "clip_l": _part("text_encoder"), "clip_g": _part("text_encoder_2"),
        "t5xxl": _part("text_encoder_2"), "timestep_sampling": _timesteps, "discrete_flow_shift": _shift,
        "log_with": _log_with, "network_module": _later, "network_args": _later,
        "save_model_as": _known(["safetensors"], "adapters are written as safetensors"),
        "model_prediction_type": _known(["raw"], "the loss is computed on the model's own prediction, unweighted"),
        "weighting_scheme": _known(["none", "uniform", "logit_normal"], "timesteps are not weighted"),
        "loss_type": _known(["l2"], LOSS), "max_token_length": _length,
    },
    harmless={
        **dict.fromkeys(
            ["xformers", "sdpa", "mem_eff_attn", "split_attn", "diffusers_xformers", "max_data_loader_n_workers",
             "persistent_data_loader_workers", "lowram", "highvram", "vae_batch_size", "text_encoder_batch_size",
             "torch_compile", "dynamo_backend", "ddp_*", "disable_mmap_load_safetensors", "skip_cache_check",
             "num_cpu_threads_per_process"], SPEED),
        **dict.fromkeys(["v2", "sdxl", "no_half_vae"], "is read from the model's own files"),
        **dict.fromkeys(["save_state", "save_state_on_train_end", "save_state_to_huggingface"],
                        "checkpoints always hold everything needed to resume"),
        **dict.fromkeys(["config_file", "output_config", "debug_dataset", "console_log_*", "tokenizer_cache_dir"],
                        "does not affect training"),
    },
    missing={
        **dict.fromkeys(["save_every_n_epochs", "save_last_n_epochs", "save_n_epoch_ratio", "sample_every_n_epochs",
                         "save_last_n_epochs_state", "validate_every_n_epochs", "stop_text_encoder_training"], _EPOCHS),
        **dict.fromkeys(["reg_data_dir", "in_json", "dataset_repeats", "dataset_class", "keep_tokens_separator",
                         "secondary_separator", "enable_wildcard", "caption_prefix", "caption_suffix", "alpha_mask",
                         "conditioning_data_dir", "color_aug", "face_crop_aug_range", "token_warmup_*",
                         "caption_dropout_every_n_epochs"], _DATA),
        **dict.fromkeys(["fp8_base", "fp8_base_unet", "blocks_to_swap", "cpu_offload_checkpointing", "lowvram",
                         "fused_backward_pass"], MEMORY),
        **dict.fromkeys(["full_bf16", "full_fp16"], "trained weights stay in fp32"),
        **dict.fromkeys(["huber_*", "debiased_estimation_loss", "scale_v_pred_loss_like_noise_pred", "v_pred_like_loss",
                         "weighted_captions", "mode_scale", "scale_weight_norms"], LOSS),
        **dict.fromkeys(["multires_noise_*", "ip_noise_gamma*", "adaptive_noise_scale", "noise_offset_*", "min_timestep",
                         "max_timestep"], "noise and timesteps are sampled from the model's whole schedule"),
        "zero_terminal_snr": "the model's own schedule is used",
        **dict.fromkeys(["training_comment", "metadata_*", "no_metadata"], _METADATA),
        **dict.fromkeys(["logging_dir", "log_prefix", "log_tracker_*", "log_config", "wandb_*"], "logs are written into output"),
        **dict.fromkeys(["base_weights*", "dim_from_weights", "initial_epoch", "initial_step", "skip_until_initial_step"],
                        "use start_from or resume"),
        **dict.fromkeys(["lr_decay_steps", "lr_scheduler_min_lr_ratio", "lr_scheduler_timescale", "lr_scheduler_type",
                         "lr_scheduler_args"], "schedulers end at zero with the last step"),
        **dict.fromkeys(["use_lion_optimizer"], "set optimizer"),
        **dict.fromkeys(["apply_t5_attn_mask", "t5xxl_max_token_length"], "prompts are encoded as in generation"),
        **dict.fromkeys(["sample_at_first", "sample_sampler", "validation_seed", "validate_every_n_steps",
                         "max_validation_steps", "save_last_n_steps_state"], "is not supported"),
        "huggingface_*": "nothing is uploaded",
    },
    neutral={"max_timestep": (1000,)},
    finish=_network,
)  # fmt: skip
