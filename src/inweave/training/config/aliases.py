"""kohya's names, which most trainers and guides use, accepted for our settings in a configuration.

One table of names: most are plain renames. A setting that falls back to another one does so here too: unet_lr and
text_encoder_lr to learning_rate, steps to epochs. An import of kohya's files starts from this table
(`inweave.training.importers.kohya.settings`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from inweave.checked import for_message
from inweave.training.config import row
from inweave.training.config.fields import TORCH_SCHEDULERS
from inweave.training.config.network_args import read_network
from inweave.training.config.optimizer_names import optimizer, optimizer_args
from inweave.training.config.translate import SettingRow, Translation, translate
from inweave.training.config.values import (
    normalize_name,
    parse_bool,
    parse_int,
    parse_number,
    parse_pairs,
    parse_scalar,
    parse_sizes,
)

PRECISIONS: Final = {
    "no": "fp32", "fp32": "fp32", "float": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16",
    "half": "fp16", "bf16": "bf16", "bfloat16": "bf16",
}  # fmt: skip
SCHEDULES: Final = {
    "constant": "constant", "constantwithwarmup": "constant", "linear": "linear", "polynomial": "polynomial",
    "cosine": "cosine", "cosinewithrestarts": "cosine", "cosinewithhardrestarts": "cosine", "rex": "rex",
    "cosinewithminlr": "cosine",
}  # fmt: skip
_TORCH_SCHEDULERS: Final = {normalize_name(name.rpartition(".")[2]): name for name in TORCH_SCHEDULERS}
_TIMESTEPS: Final = {
    "auto": "auto", "uniform": "uniform", "sigmoid": "sigmoid", "logitnormal": "logit_normal", "shift": "shift",
    "fluxshift": "shift",
}  # fmt: skip
LOSSES: Final = {"l2": "mse", "mse": "mse", "l1": "l1", "huber": "huber", "smoothl1": "smooth_l1"}


precision: Final = row.choice("precision", PRECISIONS)
save_dtype: Final = row.choice("save_dtype", PRECISIONS)
min_snr: Final = row.to("min_snr_gamma", lambda value: parse_scalar(value) or None)


def _lr_scheduler(out: Translation, name: str, value: Any) -> None:
    if out.is_on("lr_scheduler_type"):
        out.note(name, "lr_scheduler_type is used instead")
    elif normalize_name(value) == "cosinewithminlr" and parse_number(out.get("lr_scheduler_num_cycles") or 1) > 1:
        out.refuse(
            name,
            f"{for_message(value)} with several cycles rises again between them, which no schedule here does",
            "lr_scheduler",
        )
    elif not put_torch_scheduler(out, name, value):
        row.choice("lr_scheduler", SCHEDULES).read(out, name, value)


lr_scheduler: Final = row.custom(_lr_scheduler)


def put_torch_scheduler(out: Translation, name: str, value: Any) -> bool:
    """Set the class of torch.optim.lr_scheduler that a value names, and return whether it names one."""
    package, _, kind = str(value).rpartition(".")
    ours = _TORCH_SCHEDULERS.get(normalize_name(kind)) if package in ("", "torch.optim.lr_scheduler") else None
    if ours is not None:
        out.put(name, "lr_scheduler", ours)
    return ours is not None


def _lr_scheduler_type(out: Translation, name: str, value: Any) -> None:
    """Set the class that kohya's scripts use in place of lr_scheduler, and without a warmup."""
    if put_torch_scheduler(out, name, value):
        out.put(name, "warmup", 0)
    else:
        known = ", ".join(each.rpartition(".")[2] for each in TORCH_SCHEDULERS)
        out.refuse(
            name, f"{for_message(value)} is not supported; of torch.optim.lr_scheduler, {known} are", "lr_scheduler"
        )


def _lr_scheduler_args(out: Translation, name: str, value: Any) -> None:
    """Set the arguments of a class of torch; a table is ours."""
    if isinstance(value, Mapping):
        out.put(name, "lr_scheduler_args", dict(value))
    elif out.is_on("lr_scheduler_type"):
        out.put(name, "lr_scheduler_args", scheduler_arguments(parse_pairs(value)))
    else:
        out.refuse_value(name, "schedulers have no further options; classes named by lr_scheduler_type do")


def scheduler_arguments(pairs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scheduler's arguments with values of their own types: [1, 2] and (1, 2) are lists of numbers."""
    listed = {key: re.fullmatch(r"\s*[\[(](.*)[\])]\s*", str(each)) for key, each in pairs.items()}
    return {
        key: [parse_scalar(each.strip()) for each in match[1].split(",") if each.strip()]
        if (match := listed[key])
        else parse_scalar(value)
        for key, value in pairs.items()
    }


def polynomial_power(scheduler: str = "lr_scheduler") -> SettingRow:
    """Return the row of the exponent of the polynomial scheduler."""
    why = "only used by the polynomial scheduler"
    return row.to("polynomial_power", when=lambda out: out.word(scheduler) == "polynomial", otherwise=why)


def cosine_cycles(scheduler: str = "lr_scheduler") -> SettingRow:
    """Return the row of the cycles of a cosine, which other schedulers ignore."""

    def read(out: Translation, name: str, value: Any) -> None:
        if parse_int(value) > 1 and "restarts" in out.word(scheduler):
            out.put(name, "cosine_cycles", parse_int(value))
        else:
            out.note(name, "only used by cosine_with_restarts")

    return row.custom(read)


def log_with(out: Translation, name: str, value: Any) -> None:
    """Set the trackers of a run: tensorboard, wandb, all, or several of them."""
    for each in value if isinstance(value, list) else str(value).split(","):
        kind = normalize_name(each)
        if kind in ("tensorboard", "all"):
            out.put(name, "tensorboard", True)
        if kind in ("wandb", "all"):
            out.put(name, "wandb", True)
        if kind in ("", "none"):
            out.unset.append(name)
        elif kind not in ("tensorboard", "wandb", "all"):
            out.unsupported(name, f"{for_message(each)}: runs are shown by TensorBoard and Weights & Biases")


def _learning_rate(out: Translation, name: str, value: Any) -> None:
    if not out.get("unet_lr"):
        out.put(name, "learning_rate", value)
    elif out.get("text_encoder_lr") is None and "text_encoder_learning_rate" not in out.settings:
        out.put(name, "text_encoder_learning_rate", value)
    else:
        out.note(name, "unet_lr and text_encoder_lr are used instead")


def _unet_lr(out: Translation, name: str, value: Any) -> None:
    rate = parse_scalar(rates_in(value)[0]) if rates_in(value) else None
    out.put(name, "learning_rate", rate) if rate else out.put(name, "train_denoiser", False)


def rates_in(value: Any) -> list[Any]:
    """Return learning rates as a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _text_encoder_lr(out: Translation, name: str, value: Any) -> None:
    listed = rates_of_encoders(out, value)
    if len({str(each) for each in listed}) > 1:
        out.unsupported(f"{name}.1", "all text encoders share one learning rate, the first")
    rate = parse_scalar(listed[0]) if listed else None
    put_encoder_rate(out, name, rate, bool(rate))


def rates_of_encoders(out: Translation, value: Any) -> list[Any]:
    """Return the rates that are used: LyCORIS takes one."""
    return rates_in(value)[:1] if str(out.get("network_module")).startswith("lycoris") else rates_in(value)


def put_encoder_rate(out: Translation, name: str, rate: Any, trained: bool) -> None:
    """Set whether text encoders are trained, and their learning rate."""
    if out.word("network_train_unet_only") in ("true", "1"):
        out.note(name, "text encoders are not trained: network_train_unet_only")
        return
    out.put(name, "train_text_encoders", trained)
    if trained:
        out.put(name, "text_encoder_learning_rate", rate)


def _last_steps(out: Translation, name: str, value: Any) -> None:
    every = out.get("save_every_n_steps") or out.get("save_every")
    if not every:
        out.note(name, "only used with save_every_n_steps")
    elif parse_int(value):
        out.put(name, "keep_last", max(1, math.ceil(parse_int(value) / max(1, parse_int(every)))))


def _resolution(out: Translation, name: str, value: Any) -> None:
    if normalize_name(value) == "none":
        out.put(name, "resolution", None)
        return
    sides = parse_sizes(value)
    out.put(name, "resolution", sides[0] if len(set(sides)) == 1 else (sides[0], sides[1]))


def _text_only(out: Translation, name: str, value: Any) -> None:
    out.put(name, "train_denoiser", not parse_bool(value))
    if parse_bool(value):
        out.put(name, "train_text_encoders", True)


def _part(part: str) -> SettingRow:
    return row.custom(lambda out, name, value: out.add_part(name, part, value))


def _t5(out: Translation, name: str, value: Any) -> None:
    """Set the third encoder of SD 3, which alone has a clip_g, or the second of FLUX.1."""
    third = out.get("clip_g") or re.search("sd3", out.word("network_module"))
    out.add_part(name, "text_encoder_3" if third else "text_encoder_2", value)


def known(expected: Iterable[Any], why: str) -> SettingRow:
    """Return the row of a setting that is noted at the values that are always used here, and refused at others."""
    usual = {normalize_name(each) for each in expected}

    def read(out: Translation, name: str, value: Any) -> None:
        if normalize_name(value) in usual:
            out.note(name, row.ALWAYS)
        else:
            out.refuse(name, f"{for_message(value)}: {why}")

    return row.custom(read)


def _prediction(out: Translation, name: str, value: Any) -> None:
    """Refuse the forms of a prediction v that flux_train_network.py compares with noise - image, but for v itself."""
    if normalize_name(value) == "raw":
        out.note(name, row.ALWAYS)
        return
    forms = {"sigmascaled": "noisy - sigma * v", "additive": "noisy + v"}
    compared = forms.get(normalize_name(value), "something else")
    why = f"compares {compared}, and not the prediction v itself, with noise - image; raw does"
    out.refuse(name, f"{for_message(value)} {why}")


def _timesteps(out: Translation, name: str, value: Any) -> None:
    if normalize_name(value) == "sigma":
        normal = out.word("weighting_scheme") == "logitnormal"
        out.put(name, "timestep_sampling", "logit_normal" if normal else "uniform")
    else:
        row.choice("timestep_sampling", _TIMESTEPS).read(out, name, value)


def _checkpointing(value: Any) -> Any:
    """Return a mode for a switch in kohya's files, or one of our modes."""
    known = {**dict.fromkeys(("true", "1", "yes", "on"), "full"), **dict.fromkeys(("false", "0", "no", "none"), "off")}
    modes = {mode: mode for mode in ("off", "selective", "full")}
    return (known | modes).get(normalize_name(value), value)


def _loss(out: Translation, name: str, value: Any) -> None:
    if (ours := LOSSES.get(normalize_name(value))) is None:
        out.refuse(name, f"{for_message(value)} is not supported")
    elif ours == "mse":
        out.note(name, "is the default here")
    else:
        out.put(name, "loss", ours)


def _dim_from_weights(out: Translation, name: str, value: Any) -> None:
    """Note that an adapter is trained further at its own ranks, as always here; without one there is nothing to do."""
    if not parse_bool(value):
        out.unset.append(name)
    elif out.is_on("network_weights") or out.is_on("start_from"):
        out.note(name, row.ALWAYS)
    else:
        out.refuse(name, "names no adapter; set start_from to one")


def _ignore(out: Translation, name: str, value: Any) -> None:
    """Do nothing: `read_network` reads it."""


_SHIFT = row.to(
    "timestep_shift", parse_number,
    when=lambda out: normalize_name(out.get("timestep_sampling", "shift")) in ("shift", "auto"),
    otherwise="only used with timestep_sampling = shift",
)  # fmt: skip

_MIN_RATIO = row.to(
    "lr_min_ratio", parse_number, off=True,
    when=lambda out: out.word("lr_scheduler") == "cosinewithminlr", otherwise="only used by cosine_with_min_lr",
)  # fmt: skip

ALIASES: Final[dict[str, SettingRow]] = {
    **row.renamed({
        "lr": "learning_rate", "network_dim": "rank", "network_dropout": "hidden_dropout",
        "network_weights": "start_from", "max_train_epochs": "epochs", "train_batch_size": "batch_size",
        "gradient_accumulation_steps": "gradient_accumulation", "lr_warmup_steps": "warmup",
        "caption_dropout_rate": "caption_dropout", "caption_tag_dropout_rate": "tag_dropout",
        "shuffle_caption": "shuffle_tags", "caption_separator": "tag_separator",
        "caption_extension": "caption_extensions", "flip_aug": "flip", "enable_bucket": "buckets",
        "min_bucket_reso": "min_bucket", "max_bucket_reso": "max_bucket", "bucket_reso_steps": "bucket_step",
        "output_dir": "output", "output_name": "name", "save_every_n_steps": "save_every",
        "sample_every_n_steps": "sample_every", "dit": "model", "train_data_dir": "dataset",
        "dataset_config": "dataset", "pretrained_model_name_or_path": "model", "guidance_scale": "guidance",
        "cache_text_encoder_outputs": "cache_text", "enable_wildcard": "wildcards", "max_seq_length": "max_length",
    }),
    "learning_rate": row.custom(_learning_rate), "unet_lr": row.custom(_unet_lr),
    "text_encoder_lr": row.custom(_text_encoder_lr, "train_text_encoders"),
    "max_train_steps": row.to("steps", when=lambda out: not out.get("max_train_epochs"),
                          otherwise="max_train_epochs is used instead"),
    "network_alpha": row.to("alpha", lambda value: parse_number(value) or None), "min_snr_gamma": min_snr,
    "optimizer_type": row.custom(optimizer, "optimizer"), "optimizer_args": row.custom(optimizer_args),
    "use_8bit_adam": row.only("optimizer", "adamw8bit"), "lr_scheduler": lr_scheduler,
    "lr_scheduler_num_cycles": cosine_cycles(), "lr_scheduler_power": polynomial_power(),
    "mixed_precision": precision, "fp16": row.only("precision", "fp16"), "save_precision": save_dtype,
    "gradient_checkpointing": row.to("gradient_checkpointing", _checkpointing),
    "random_crop": row.switch("crop", "random", "center"), "bucket_no_upscale": row.switch("upscale", False, True),
    "cache_latents_to_disk": row.only("cache_latents"), "cache_text_encoder_outputs_to_disk": row.only("cache_text"),
    "v_parameterization": row.only("objective", "v_prediction"), "save_last_n_steps": row.custom(_last_steps),
    "resolution": row.custom(_resolution), "network_train_unet_only": row.only("train_text_encoders", False),
    "network_train_text_encoder_only": row.custom(_text_only), "vae": _part("vae"), "ae": _part("vae"),
    "clip_l": _part("text_encoder"), "clip_g": _part("text_encoder_2"), "t5xxl": row.custom(_t5),
    "timestep_sampling": row.custom(_timesteps, "timestep_sampling"), "discrete_flow_shift": _SHIFT,
    "log_with": row.custom(log_with), "network_module": row.custom(_ignore), "network_args": row.custom(_ignore),
    "save_model_as": row.custom(lambda out, name, value: out.note(name, "adapters are written as safetensors")),
    "model_prediction_type": row.custom(_prediction),
    "weighting_scheme": known(["none", "uniform", "logit_normal"], "timesteps are not weighted"),
    "loss_type": row.custom(_loss, "loss"), "huber_c": row.to("huber_c"), "huber_schedule": row.to("huber_schedule"),
    "max_token_length": row.to("max_token_length", parse_int),  # of 75, 150 and 225; captions are padded per batch here
    "resume": row.to("resume", lambda value: "never" if value is False else value), "clip_skip": row.to("clip_skip"),
    "save_every_n_epochs": row.to("save_every_epochs", parse_int, off=True),
    "sample_every_n_epochs": row.to("sample_every_epochs", parse_int, off=True),
    "validate_every_n_epochs": row.to("validate_every_epochs", parse_int, off=True),
    "validate_every_n_steps": row.to("validate_every", parse_int, off=True),
    "min_timestep": row.to("min_timestep"), "max_timestep": row.to("max_timestep"),
    "multires_noise_iterations": row.to("multires_noise_iterations"),
    "multires_noise_discount": row.to("multires_noise_discount"),
    "debiased_estimation_loss": row.to("debiased_estimation", parse_bool, off=True),
    "scale_weight_norms": row.to("scale_weight_norms"), "training_shift": _SHIFT, "sigmoid_scale": row.to("logit_std"),
    "logit_mean": row.to("logit_mean"), "logit_std": row.to("logit_std"), "text_encoder": _part("text_encoder"),
    **row.each(row.ignored(row.SPEED), """
        xformers sdpa mem_eff_attn split_attn diffusers_xformers max_data_loader_n_workers
        persistent_data_loader_workers lowram highvram vae_batch_size text_encoder_batch_size torch_compile dynamo_*
        ddp_* disable_mmap_load_safetensors skip_cache_check mem_eff_save num_cpu_threads_per_process deepspeed
        zero_stage offload_* zero3_* compile* cuda_* sage_attn flash_attn flash3 async_upload no_half_vae
        cpu_offload_checkpointing"""),
    **row.each(row.ignored(row.OWN_FILE), "v2 sdxl model_train_type model_version edit edit_plus sd_models model_list"),
    **row.each(row.ignored("checkpoints always hold everything needed to resume"), """
        save_state save_state_on_train_end save_state_to_huggingface save_last_n_steps_state
        save_last_n_epochs_state"""),
    **row.each(row.ignored(row.NO_EFFECT), """
        config_file output_config debug_dataset console_log_* tokenizer_cache_dir script enable_preview dataset_repeats
        token_warmup_min base_weights_multiplier noise_offset_type lr_scheduler_params
        sample_at_first sample_sampler wandb_api_key log_prefix log_tracker_* log_config logging_dir gpu_ids
        tensorboard* comment max_validation_steps validation_seed clip_g_dropout_rate *_attn_mask_type"""),
    **row.each(row.ignored(row.METADATA), "training_comment metadata_* no_metadata"),
    **row.each(row.ignored(row.UPLOAD), "huggingface_* resume_from_huggingface"),
    "noise_offset_random_strength": row.only("noise_offset_random"),
    "ip_noise_gamma": row.to("input_perturbation", parse_number, off=True),
    "ip_noise_gamma_random_strength": row.only("input_perturbation_random"),
    **row.each(row.refused("the loss is not scaled"), """
        scale_v_pred_loss_like_noise_pred v_pred_like_loss pyramid_loss*"""),
    **row.each(row.refused("images are flipped and cropped alone"), "color_aug face_crop_aug_range"),
    **row.each(row.refused("captions are the same in every epoch"), "token_warmup_step caption_dropout_every_n_epochs"),
    **row.each(row.refused("a dataset is a folder or a dataset .toml"), "in_json dataset_class conditioning_data_dir"),
    "base_weights": row.refused("merge the adapter into the model first"),
    "dim_from_weights": row.custom(_dim_from_weights),
    "lr_scheduler_min_lr_ratio": _MIN_RATIO,
    **row.each(row.ignored("only used by schedulers that are refused"), "lr_decay_steps lr_scheduler_timescale"),
    "lr_scheduler_args": row.custom(_lr_scheduler_args), "lr_scheduler_type": row.custom(_lr_scheduler_type),
    "zero_terminal_snr": row.refused("the model's own schedule is used"),
    "huber_scale": row.refused("huber_c says where the loss becomes linear", 1),
    "weighted_captions": row.refused("captions have no weights"),
    "secondary_separator": row.refused("captions have one separator"),
    "use_lion_optimizer": row.refused("set optimizer"), "optimizer_args_custom": row.refused("set optimizer_args"),
    **row.each(row.different("set keep_last and keep_every"), "save_last_n_epochs save_n_epoch_ratio"),
    **row.each(row.different("set it in the dataset .toml"), """
        reg_data_dir keep_tokens_separator caption_prefix caption_suffix alpha_mask"""),
    **row.each(row.different(row.MEMORY), """
        fp8_base fp8_base_unet fp8_scaled fp8_vl fp8_llm fp8_t5 blocks_to_swap lowvram fused_backward_pass
        double_blocks_to_swap single_blocks_to_swap split_mode"""),
    **row.each(row.different("trained weights stay in fp32"), "full_bf16 full_fp16"),
    **row.each(row.different("use start_from or resume"), "initial_epoch initial_step skip_until_initial_step"),
    **row.each(row.different("prompts are encoded as in generation"), """
        apply_t5_attn_mask apply_lg_attn_mask disable_*_attn_mask"""),
    "t5xxl_max_token_length": row.different("prompts are encoded as in generation", 512, "512"),
    "stop_text_encoder_training": row.different("text encoders are trained to the end"),
    "mode_scale": row.different("only used by another scheme", 1.29),
    **row.each(row.different("use --gpus", 1, "1"), "num_processes"), "multi_gpu": row.different("use --gpus"),
    "num_machines": row.different("runs use one machine", 1, "1"),
}  # fmt: skip


def translate_aliases(out: Translation, own: Iterable[str]) -> Translation:
    """Translate a configuration in our names (``own``) and kohya's."""
    translate(out, ALIASES, frozenset(own))
    read_network(out)
    return out
