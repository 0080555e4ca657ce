r"""Command lines of diffusers' own training scripts for LoRA.

    train_text_to_image_lora.py, train_text_to_image_lora_sdxl.py
    train_dreambooth_lora.py, train_dreambooth_lora_sdxl.py, train_dreambooth_lora_flux.py, train_dreambooth_lora_sd3.py,
    train_dreambooth_lora_qwen_image.py, train_dreambooth_lora_z_image.py

They adapt the attention projections (of FLUX.1 the feed-forward layers too), crop squares, at random unless `center_crop`
is set, and read 77 tokens of a caption. The folder of a text-to-image script has captions in its metadata.jsonl; that of
a DreamBooth script has none, and `instance_prompt` stands for all of them. A dataset of the Hub is not downloaded: name a
folder with `--dataset`.

Noise levels are looked up in the model's own schedule, at places that `weighting_scheme` chooses: those of SD 3 and Z-Image
are shifted by a fixed factor, the others by none. The script for SD 3 compares the images that predictions stand for, unless
`precondition_outputs` is 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from inweave.checked import for_message
from inweave.training.importers.defaults import defaults
from inweave.training.importers.models import ensure_plain_base, ensure_trainable, refuse_method
from inweave.training.importers.optimizers import SCHEDULES, optimizer, with_library_defaults
from inweave.training.importers.targets import FLOW
from inweave.training.importers.translate import (
    ELSEWHERE,
    LOGS,
    MEMORY,
    METADATA,
    NO_PART,
    OWN_FILE,
    SPEED,
    UPLOAD,
    OtherSettings,
    SettingsDialect,
    Translation,
    choice,
    cosine_cycles,
    log_with,
    min_snr,
    precision,
    switch,
    translate,
    used_if,
)
from inweave.training.importers.values import is_off, normalize_name, parse_bool, parse_int, parse_number

SCRIPT: Final = re.compile(r"(?:^|[\\/])train_(text_to_image|dreambooth)_lora(?:_(\w+))?\.py$")
_FAMILIES: Final = {
    "": "sd", "sdxl": "sdxl", "flux": "flux", "sd3": "sd3", "qwen_image": "qwen_image", "z_image": "z_image",
}  # fmt: skip

_ATTENTION = r".*\.(to_q|to_k|to_v|to_out\.0)"
_JOINT = r"to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out"
_TARGETS: Final = {
    "sd": r".*attn\d\.(to_q|to_k|to_v|to_out\.0)", "sdxl": r".*attn\d\.(to_q|to_k|to_v|to_out\.0)",
    "sd3": rf".*attn\.({_JOINT})", "flux": rf".*attn\.({_JOINT})|.*\.ff(_context)?\.net\.(0\.proj|2)",
    "qwen_image": _ATTENTION, "z_image": _ATTENTION,
}  # fmt: skip
_ENCODER = r".*self_attn\.(q_proj|k_proj|v_proj|out_proj)"


def is_diffusers_script(script: Any) -> bool:
    return isinstance(script, str) and bool(SCRIPT.search(script))


def import_diffusers(settings: Mapping[str, Any], out: Translation) -> dict[str, Any]:
    """Translate into ``out``; returns the defaults that were used."""
    match = SCRIPT.search(str(settings["script"]))
    assert match is not None
    task, suffix = match[1], match[2] or ""
    family = _FAMILIES.get(suffix)
    if suffix.endswith("advanced"):
        raise refuse_method("script", f"{for_message(match[0])} trains an embedding too (pivotal tuning)")
    out.family = ensure_trainable(family, suffix, "script")
    entries = {
        name: value for name, value in settings.items() if value is not None and value != "" and name != "script"
    }
    ensure_plain_base(entries.get("pretrained_model_name_or_path", ""), "pretrained_model_name_or_path")
    values = defaults("diffusers", "values", task, f"{task} {out.family}")
    if "lora_rank" in entries:
        values.pop("rank")
    if parse_bool(entries.get("use_8bit_adam") or False) and "optimizer" not in entries:
        values["optimizer"] = "AdamW8bit"
    implied = {name: value for name, value in values.items() if name not in entries}
    complete = {**entries, **implied}
    if parse_bool(complete.get("use_8bit_adam") or False) and normalize_name(complete["optimizer"]) == "adamw":
        complete["optimizer"] = "AdamW8bit"
    translate(complete, DIFFUSERS, out=out)
    _finish(out, complete, task, implied)
    reported = {*out.mapping, *(line.partition(":")[0] for line in out.no_equivalent)}
    out.notes = [line for line in out.notes if line.partition(":")[0] not in reported]
    return implied


def _finish(out: Translation, settings: OtherSettings, task: str, implied: OtherSettings) -> None:
    fields = out.fields
    trained = bool(fields.get("train_text_encoders"))
    layers = [each.strip() for each in str(settings.get("lora_layers") or "").split(",") if each.strip()]
    denoiser = rf"(.*\.)?({'|'.join(map(re.escape, layers))})" if layers else _TARGETS[out.family]
    fields["targets"] = [f"{denoiser}|{_ENCODER}" if trained else denoiser]
    fields["network"] = "dora" if parse_bool(settings.get("use_dora") or False) else "lora"
    fields.setdefault("alpha", float(fields["rank"]))
    if "lora_alpha" in implied and fields["alpha"] != fields["rank"]:
        out.note(
            "lora_alpha (default)",
            f"{fields['alpha']:g}; scripts before diffusers 0.34 used the rank: --alpha {fields['rank']}",
        )
    steps, epochs = settings.get("max_train_steps"), settings["num_train_epochs"]
    name, value = ("epochs", epochs) if is_off(steps) else ("steps", steps)
    fields[name] = parse_int(value)
    out.mapping["num_train_epochs" if name == "epochs" else "max_train_steps"] = name
    if normalize_name(settings["lr_scheduler"]) == "constant":
        fields["warmup"] = 0  # there it is for constant_with_warmup
    fields |= {"buckets": False, "upscale": True, "dialect": "diffusers"}
    fields["betas"] = (parse_number(settings["adam_beta1"]), parse_number(settings["adam_beta2"]))
    if fields.get("optimizer") == "prodigy":
        options = ("decouple", "use_bias_correction", "safeguard_warmup")
        fields["optimizer_args"] = {each: settings.get(f"prodigy_{each}", True) != "" for each in options}  # type=bool
        if not is_off(beta := settings.get("prodigy_beta3")):
            fields["optimizer_args"]["beta3"] = parse_number(beta)
    half = out.family in ("flux", "qwen_image", "z_image") and not parse_bool(
        settings.get("upcast_before_saving") or False
    )
    fields["save_dtype"] = fields["precision"] if half else "fp32"
    if task == "dreambooth" and settings.get("dataset_name") and settings.get("caption_column"):
        fields.pop("caption", None)  # every image has one of its own
        out.mapping.pop("instance_prompt", None)
        out.note("instance_prompt", "the captions in caption_column are used instead")
    elif task == "dreambooth":
        fields.setdefault("caption", "")
        fields["caption_extensions"] = [".no-captions"]  # text files beside images are not read there
    _dataset(out, settings, task)
    _times(out, settings)
    if trained and task == "dreambooth" and out.family != "sd" and settings.get("adam_weight_decay_text_encoder") != 0:
        out.unsupported("adam_weight_decay_text_encoder", "all weights have one weight decay")
    if not fields.get("sample_prompts"):
        for each in ("sample_every", "sample_every_epochs"):
            fields.pop(each, None)
    with_library_defaults(out)


def _dataset(out: Translation, settings: OtherSettings, task: str) -> None:
    folder = settings.get("instance_data_dir" if task == "dreambooth" else "train_data_dir")
    if settings.get("dataset_name") and not folder:
        out.unsupported("dataset_name", "is not downloaded; name a folder with --dataset")
    if not folder:
        return
    side = parse_int(settings["resolution"])
    prior = parse_bool(settings.get("with_prior_preservation") or False)
    repeats = parse_int(settings.get("repeats") or 1)
    if not prior and repeats == 1:
        out.fields["dataset"] = str(folder)
    else:
        subsets: list[dict[str, Any]] = [{"image_dir": str(folder), "num_repeats": repeats}]
        if prior:
            subsets.append({"image_dir": str(settings.get("class_data_dir") or ""), "is_reg": True,
                            "class_tokens": str(settings.get("class_prompt") or "")})  # fmt: skip
        out.fields["dataset"] = {"datasets": [{"resolution": side, "enable_bucket": False, "subsets": subsets}]}
    out.mapping["instance_data_dir" if task == "dreambooth" else "train_data_dir"] = "dataset"


def _times(out: Translation, settings: OtherSettings) -> None:
    if out.family not in FLOW:
        out.fields["timestep_sampling"] = "uniform"
        return
    scheme, power = normalize_name(settings["weighting_scheme"]), 0
    if out.family == "sd3" and parse_bool(settings["precondition_outputs"]):
        power = 2
    if scheme == "sigmasqrt":  # its weight is 1 / level ** 2
        power -= 2
    kinds = {"none": "uniform", "sigmasqrt": "uniform", "logitnormal": "logit_normal"}
    if scheme not in kinds or power < 0:
        text = for_message(settings["weighting_scheme"])
        out.refuse("weighting_scheme", f"{text} is not supported for this model", "timestep_sampling")
        return
    out.fields |= {
        "objective": "flow",
        "timestep_sampling": kinds[scheme],
        "timestep_shift": _shift(out.family, settings),
        "sigma_weighting": float(power),
        "logit_mean": -parse_number(settings["logit_mean"]) or 0.0,  # there 0 is pure noise
        "logit_std": parse_number(settings["logit_std"]),
    }
    out.mapping["weighting_scheme"] = "timestep_sampling"


def _shift(family: str, settings: OtherSettings) -> float | None:
    """That of the model's scheduler; one that shifts by size does not shift in training."""
    if family == "z_image":
        return 3.0 if "turbo" in str(settings.get("pretrained_model_name_or_path") or "turbo").lower() else 6.0
    return 3.0 if family == "sd3" else None


DIFFUSERS: Final = SettingsDialect(
    plain={
        "pretrained_model_name_or_path": "model", "rank": "rank", "lora_rank": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout",
        "output_dir": "output", "seed": "seed", "resolution": "resolution", "train_batch_size": "batch_size",
        "gradient_accumulation_steps": "gradient_accumulation", "learning_rate": "learning_rate", "lr_warmup_steps": "warmup",
        "adam_weight_decay": "weight_decay", "adam_epsilon": "epsilon", "max_grad_norm": "max_grad_norm",
        "checkpointing_steps": "save_every", "checkpoints_total_limit": "keep_last", "instance_prompt": "caption",
        "noise_offset": "noise_offset", "prior_loss_weight": "prior_loss_weight",
        "validation_prompt": "sample_prompts", "validation_epochs": "sample_every_epochs", "cache_latents": "cache_latents",
    },
    readers={
        "guidance_scale": lambda out, name, value, settings: (
            out.put(name, "guidance", parse_number(value)) if out.family == "flux" else out.note(name, "is not used by this model")),
        "pretrained_vae_model_name_or_path": lambda out, name, value, settings: out.put(name, "parts", {"vae": value}),
        "mixed_precision": precision, "lr_scheduler": choice("lr_scheduler", SCHEDULES), "optimizer": optimizer,
        "lr_num_cycles": cosine_cycles("lr_scheduler"), "random_flip": switch("flip", True, False),
        "lr_power": used_if("polynomial_power", lambda g: normalize_name(g.get("lr_scheduler")) == "polynomial",
                            "only used by the polynomial scheduler"),
        "center_crop": switch("crop", "center", "random"), "gradient_checkpointing": switch("gradient_checkpointing", "full", "off"),
        "train_text_encoder": switch("train_text_encoders", True, False), "snr_gamma": min_snr, "report_to": log_with,
        "text_encoder_lr": used_if("text_encoder_learning_rate", lambda g: not is_off(g.get("train_text_encoder")),
                                   "text encoders are not trained"),
    },
    harmless={
        **dict.fromkeys(["revision", "variant", "cache_dir", "max_sequence_length", "tokenizer_*", "text_encoder_use_attention_mask"],
                        OWN_FILE),
        **dict.fromkeys(["dataloader_num_workers", "allow_tf32", "enable_xformers*", "enable_npu*", "local_rank", "set_grads_to_none",
                         "sample_batch_size", "prior_generation_precision", "pre_compute_text_embeddings", "upcast_before_saving",
                         "preprocessing_num_workers", "use_8bit_adam", "offload", "debug_loss", "fsdp_text_encoder"], SPEED),
        **dict.fromkeys(["push_to_hub", "hub_*"], UPLOAD), "logging_dir": LOGS, "num_validation_images": LOGS,
        "validation_image": LOGS, "final_validation_prompt": LOGS, "skip_final_inference": LOGS, "output_kohya_format": METADATA,
        **dict.fromkeys(["adam_beta1", "adam_beta2", "prodigy_*", "instance_data_dir", "class_data_dir", "class_prompt",
                         "with_prior_preservation", "repeats", "num_train_epochs", "max_train_steps", "weighting_scheme", "logit_mean",
                         "logit_std", "lora_layers", "use_dora", "train_data_dir", "adam_weight_decay_text_encoder",
                         "dataset_name", "num_class_images", "mode_scale", "precondition_outputs"], ELSEWHERE),
        **dict.fromkeys(["image_column", "caption_column", "dataset_config_name"], NO_PART),
    },
    missing={
        "resume_from_checkpoint": "use --resume", "max_train_samples": "all images of a dataset are trained on",
        "bnb_quantization_config_path": MEMORY, "do_fp8_training": MEMORY, "image_interpolation_mode": "images are resized with Lanczos",
    },
    refused={
        "scale_lr": "learning rates are used as they are", "do_edm_style_training": "EDM preconditioning does not exist here",
        "prediction_type": "set objective instead", "lora_blocks": "blocks are not selected by number", "aspect_ratio_buckets":
        "buckets are computed from the resolution", "use_aspect_ratio_buckets": "buckets are computed in another way",
        "train_text_encoder_ti": "embeddings are not trained", "class_labels_conditioning": "there is no such model here",
    },
)  # fmt: skip
