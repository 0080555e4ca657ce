r"""Command lines of diffusers' own training scripts for LoRA.

    train_text_to_image_lora.py, train_text_to_image_lora_sdxl.py
    train_dreambooth_lora.py, with _sdxl, _flux, _flux2, _flux2_klein, _sd3, _qwen_image and _z_image

They adapt the attention projections (of FLUX.1 the feed-forward layers too), crop squares, at random unless
`center_crop` is set, and read 77 tokens of a caption. The folder of a text-to-image script has captions in its
metadata.jsonl; that of a DreamBooth script has none, and `instance_prompt` is the caption of every image. A dataset of
the Hub is not downloaded: name a folder with `--dataset`.

Noise levels are looked up in the model's own schedule, at places that `weighting_scheme` chooses: those of SD 3 and
Z-Image are shifted by a fixed factor, the others not. The script for SD 3 computes the loss of the predicted images,
unless `precondition_outputs` is 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from inweave.checked import for_message
from inweave.training.config import row
from inweave.training.config.aliases import cosine_cycles, log_with, lr_scheduler, polynomial_power, precision
from inweave.training.config.translate import SettingRow, Translation, translate
from inweave.training.config.values import normalize_name, parse_bool, parse_int, parse_number
from inweave.training.importers.defaults import defaults
from inweave.training.importers.models import ensure_plain_base, ensure_trainable, refuse_method
from inweave.training.importers.optimizers import optimizer, with_library_defaults
from inweave.training.importers.readers import drop_unused_samples, min_snr, vae
from inweave.training.importers.source import Importer, Source
from inweave.training.importers.targets import FLOW

SCRIPT: Final = re.compile(r"(?:^|[\\/])train_(text_to_image|dreambooth)_lora(?:_(\w+))?\.py$")
_FAMILIES: Final = {
    "": "sd", "sdxl": "sdxl", "flux": "flux", "flux2": "flux2", "flux2_klein": "flux2", "sd3": "sd3",
    "qwen_image": "qwen_image", "z_image": "z_image",
}  # fmt: skip

_ATTENTION = r".*\.(to_q|to_k|to_v|to_out\.0)"
_JOINT = r"to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out"
_TARGETS: Final = {
    "sd": r".*attn\d\.(to_q|to_k|to_v|to_out\.0)", "sdxl": r".*attn\d\.(to_q|to_k|to_v|to_out\.0)",
    "sd3": rf".*attn\.({_JOINT})", "flux": rf".*attn\.({_JOINT})|.*\.ff(_context)?\.net\.(0\.proj|2)",
    "flux2": r".*attn\.(to_q|to_k|to_v|to_out\.0|to_qkv_mlp_proj)|single_transformer_blocks\.\d+\.attn\.to_out",
    "qwen_image": _ATTENTION, "z_image": _ATTENTION,
}  # fmt: skip
_ENCODER = r".*self_attn\.(q_proj|k_proj|v_proj|out_proj)"


def is_diffusers_script(script: Any) -> bool:
    """Return whether a script is one of diffusers' for LoRA."""
    return isinstance(script, str) and bool(SCRIPT.search(script))


def _task(settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return (text_to_image or dreambooth, the suffix that names the model)."""
    match = SCRIPT.search(str(settings["script"]))
    assert match is not None
    return match[1], match[2] or ""


def _prepare(source: Source) -> Translation:
    task, suffix = _task(source.settings)
    if suffix.endswith("advanced"):
        script = SCRIPT.search(str(source.settings["script"]))
        raise refuse_method("script", f"{for_message(script and script[0])} trains an embedding too (pivotal tuning)")
    family = ensure_trainable(_FAMILIES.get(suffix), suffix, "script")
    entries = {name: value for name, value in source.settings.items() if value is not None and value != ""}
    ensure_plain_base(entries.get("pretrained_model_name_or_path", ""), "pretrained_model_name_or_path")
    values = defaults("diffusers", "values", task, f"{task} {family}")
    if "lora_rank" in entries:
        values.pop("rank")
    eight_bits = parse_bool(entries.get("use_8bit_adam") or False)
    if eight_bits and "optimizer" not in entries:
        values["optimizer"] = "AdamW8bit"
    implied = {name: value for name, value in values.items() if name not in entries}
    complete = {**entries, **implied}
    if eight_bits and normalize_name(complete["optimizer"]) == "adamw":
        complete["optimizer"] = "AdamW8bit"
    return source.start(family, complete, implied)


def _translate(out: Translation, source: Source) -> None:
    task, _ = _task(source.settings)
    translate(out, DIFFUSERS, skip=("script",))
    trained = bool(out.fields.get("train_text_encoders"))
    _put_network(out, trained)
    _put_length(out)
    _put_optimizer(out)
    out.fields |= {"buckets": False, "upscale": True, "dialect": "diffusers"}
    half = out.family in ("flux", "flux2", "qwen_image", "z_image") and not parse_bool(
        out.get("upcast_before_saving") or False
    )
    out.fields["save_dtype"] = out.fields.get("precision", "bf16") if half else "fp32"  # a refused one is replaced
    _put_dataset(out, task)
    _put_times(out)
    if out.family == "flux2" and "klein" in str(source.settings["script"]) and not out.get("text_encoder_out_layers"):
        why = "10 20 30: this script reads other layers of Qwen3 than the pipeline, whose 9, 18 and 27 are used here"
        out.note("text_encoder_out_layers (default)", why)
    if trained and task == "dreambooth" and out.family != "sd" and out.get("adam_weight_decay_text_encoder") != 0:
        out.unsupported("adam_weight_decay_text_encoder", "all weights have one weight decay")
    drop_unused_samples(out)
    with_library_defaults(out, out.get("optimizer"))
    reported = {*out.mapping, *(line.partition(":")[0] for line in out.no_equivalent)}
    out.notes[:] = [line for line in out.notes if line.partition(":")[0] not in reported]


def _put_network(out: Translation, trained: bool) -> None:
    fields = out.fields
    layers = [each.strip() for each in str(out.get("lora_layers") or "").split(",") if each.strip()]
    denoiser = rf"(.*\.)?({'|'.join(map(re.escape, layers))})" if layers else _TARGETS[out.family]
    fields["targets"] = [f"{denoiser}|{_ENCODER}" if trained else denoiser]
    fields["network"] = "dora" if parse_bool(out.get("use_dora") or False) else "lora"
    fields.setdefault("alpha", float(fields["rank"]))
    if "lora_alpha" in out.implied and fields["alpha"] != fields["rank"]:
        why = f"{fields['alpha']:g}; scripts before diffusers 0.34 used the rank: --alpha {fields['rank']}"
        out.note("lora_alpha (default)", why)


def _put_length(out: Translation) -> None:
    theirs, ours = ("max_train_steps", "steps") if out.is_on("max_train_steps") else ("num_train_epochs", "epochs")
    out.fields[ours] = parse_int(out.settings[theirs])
    out.mapping[theirs] = ours
    if out.word("lr_scheduler") == "constant":
        out.fields["warmup"] = 0  # the warmup is for constant_with_warmup


def _put_optimizer(out: Translation) -> None:
    out.fields["betas"] = (parse_number(out.settings["adam_beta1"]), parse_number(out.settings["adam_beta2"]))
    if out.fields.get("optimizer") == "prodigy":
        options = ("decouple", "use_bias_correction", "safeguard_warmup")
        arguments: dict[str, Any] = {each: out.get(f"prodigy_{each}", True) != "" for each in options}  # type=bool
        if out.is_on("prodigy_beta3"):
            arguments["beta3"] = parse_number(out.get("prodigy_beta3"))
        out.fields["optimizer_args"] = arguments


def _put_dataset(out: Translation, task: str) -> None:
    """Set captions and folders: DreamBooth has one caption, unless the dataset of the Hub has a column of them."""
    if task == "dreambooth" and out.get("dataset_name") and out.get("caption_column"):
        out.fields.pop("caption", None)
        out.mapping.pop("instance_prompt", None)
        out.note("instance_prompt", "the captions in caption_column are used instead")
    elif task == "dreambooth":
        out.fields.setdefault("caption", "")
        out.fields["caption_extensions"] = [".no-captions"]  # text files next to images are not read
    theirs = "instance_data_dir" if task == "dreambooth" else "train_data_dir"
    folder = out.get(theirs)
    if not folder:
        if out.get("dataset_name"):
            out.unsupported("dataset_name", "is not downloaded; name a folder with --dataset")
        return
    side = parse_int(out.settings["resolution"])
    prior = parse_bool(out.get("with_prior_preservation") or False)
    repeats = parse_int(out.get("repeats") or 1)
    if not prior and repeats == 1:
        out.fields["dataset"] = str(folder)
    else:
        subsets: list[dict[str, Any]] = [{"image_dir": str(folder), "num_repeats": repeats}]
        if prior:
            subsets.append({"image_dir": str(out.get("class_data_dir") or ""), "is_reg": True,
                            "class_tokens": str(out.get("class_prompt") or "")})  # fmt: skip
        out.fields["dataset"] = {"datasets": [{"resolution": side, "enable_bucket": False, "subsets": subsets}]}
    out.mapping[theirs] = "dataset"


def _put_times(out: Translation) -> None:
    if out.family not in FLOW:
        out.fields["timestep_sampling"] = "uniform"
        return
    scheme, power = out.word("weighting_scheme"), 0
    if out.family == "sd3" and parse_bool(out.settings["precondition_outputs"]):
        power = 2
    if scheme == "sigmasqrt":  # its weight is 1 / level ** 2
        power -= 2
    kinds = {"none": "uniform", "sigmasqrt": "uniform", "logitnormal": "logit_normal"}
    if scheme not in kinds or power < 0:
        text = for_message(out.settings["weighting_scheme"])
        out.refuse("weighting_scheme", f"{text} is not supported for this model", "timestep_sampling")
        return
    out.fields |= {
        "objective": "flow", "timestep_sampling": kinds[scheme], "timestep_shift": _shift(out),
        "sigma_weighting": float(power), "logit_std": parse_number(out.settings["logit_std"]),
        "logit_mean": -parse_number(out.settings["logit_mean"]) or 0.0,  # 0 is pure noise in diffusers
    }  # fmt: skip
    out.mapping["weighting_scheme"] = "timestep_sampling"


def _shift(out: Translation) -> float | None:
    """Return the shift of the model's scheduler; one that shifts by size does not shift in training."""
    if out.family == "z_image":
        return 3.0 if "turbo" in str(out.get("pretrained_model_name_or_path") or "turbo").lower() else 6.0
    return 3.0 if out.family == "sd3" else None


DIFFUSERS: Final[dict[str, SettingRow]] = {
    **row.renamed({
        "pretrained_model_name_or_path": "model", "rank": "rank", "lora_rank": "rank", "lora_alpha": "alpha",
        "lora_dropout": "dropout", "output_dir": "output", "seed": "seed", "resolution": "resolution",
        "train_batch_size": "batch_size", "gradient_accumulation_steps": "gradient_accumulation",
        "learning_rate": "learning_rate", "lr_warmup_steps": "warmup", "adam_weight_decay": "weight_decay",
        "adam_epsilon": "epsilon", "max_grad_norm": "max_grad_norm", "checkpointing_steps": "save_every",
        "checkpoints_total_limit": "keep_last", "instance_prompt": "caption", "noise_offset": "noise_offset",
        "prior_loss_weight": "prior_loss_weight", "validation_prompt": "sample_prompts",
        "validation_epochs": "sample_every_epochs", "cache_latents": "cache_latents",
        "caption_dropout": "caption_dropout",
    }),
    "guidance_scale": row.to("guidance", parse_number, when=lambda out: out.family in ("flux", "flux2"),
                         otherwise="is not used by this model"),
    "pretrained_vae_model_name_or_path": vae, "mixed_precision": precision, "lr_scheduler": lr_scheduler,
    "optimizer": row.custom(optimizer), "lr_num_cycles": cosine_cycles(), "lr_power": polynomial_power(),
    "random_flip": row.switch("flip"), "center_crop": row.switch("crop", "center", "random"),
    "gradient_checkpointing": row.switch("gradient_checkpointing", "full", "off"),
    "train_text_encoder": row.switch("train_text_encoders"), "snr_gamma": min_snr, "report_to": row.custom(log_with),
    "text_encoder_lr": row.to("text_encoder_learning_rate", when=lambda out: out.is_on("train_text_encoder"),
                          otherwise="text encoders are not trained"),
    **row.each(row.ignored(row.OWN_FILE), """
        revision variant cache_dir max_sequence_length tokenizer_* text_encoder_use_attention_mask"""),
    **row.each(row.ignored(row.SPEED), """
        dataloader_num_workers allow_tf32 enable_xformers* enable_npu* local_rank set_grads_to_none sample_batch_size
        prior_generation_precision pre_compute_text_embeddings upcast_before_saving preprocessing_num_workers
        use_8bit_adam offload debug_loss fsdp_text_encoder"""),
    **row.each(row.ignored(row.UPLOAD), "push_to_hub hub_*"),
    **row.each(row.ignored(row.LOGS), """
        logging_dir num_validation_images validation_image final_validation_prompt skip_final_inference"""),
    "output_kohya_format": row.ignored(row.METADATA),
    **row.each(row.ignored(row.ELSEWHERE), """
        adam_beta1 adam_beta2 prodigy_* instance_data_dir class_data_dir class_prompt with_prior_preservation repeats
        num_train_epochs max_train_steps weighting_scheme logit_mean logit_std lora_layers use_dora train_data_dir
        adam_weight_decay_text_encoder dataset_name num_class_images mode_scale precondition_outputs"""),
    **row.each(row.ignored(row.NO_PART), "image_column caption_column dataset_config_name"),
    "scale_lr": row.refused("learning rates are not scaled"),
    "do_edm_style_training": row.refused("EDM preconditioning does not exist here"),
    "prediction_type": row.refused("set objective instead"),
    "lora_blocks": row.refused("blocks are not selected by number"),
    "aspect_ratio_buckets": row.refused("buckets are computed from the resolution"),
    "use_aspect_ratio_buckets": row.refused("buckets are computed in another way"),
    "train_text_encoder_ti": row.refused("embeddings are not trained"),
    "class_labels_conditioning": row.refused("there is no such model here"),
    "resume_from_checkpoint": row.different("use --resume"),
    "text_encoder_out_layers": row.different("the layers of the text encoder are those of the model's pipeline"),
    "max_train_samples": row.different("all images of a dataset are trained on"),
    **row.each(row.different(row.MEMORY), "bnb_quantization_config_path do_fp8_training"),
    "image_interpolation_mode": row.different("images are resized with Lanczos"),
}  # fmt: skip

IMPORTER = Importer(
    "diffusers", lambda table: dict(table) if is_diffusers_script(table.get("script")) else None, _prepare, _translate
)
