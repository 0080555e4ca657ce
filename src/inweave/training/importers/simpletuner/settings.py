"""SimpleTuner's config.json: the flags of its script, with or without their dashes.

    model_family + model_type = lora   the family, and that an adapter is trained
    lora_type standard                 PEFT: attention, or what flux_lora_target says
              lycoris                  lycoris_config, a file beside it: algorithm, sizes and classes of modules
    data_backend_config                a file beside it: a list of folders

Files that it names are read where they are, or next to the configuration. Times of a flow: a sigmoid, shifted by
flow_schedule_shift, or by the resolution with flow_schedule_auto_shift.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from inweave.checked import for_message
from inweave.training.config.fields import Settings
from inweave.training.importers.defaults import defaults
from inweave.training.importers.models import SIMPLE_TUNER as FAMILIES
from inweave.training.importers.models import ensure_plain_base, ensure_trainable, refuse_method
from inweave.training.importers.optimizers import lr_scheduler, optimizer, optimizer_args, with_library_defaults
from inweave.training.importers.simpletuner.datasets import ReadFile, read_folders
from inweave.training.importers.targets import FLOW
from inweave.training.importers.translate import (
    ELSEWHERE,
    LOGS,
    MEMORY,
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

MARKS = frozenset({"model_family", "data_backend_config", "lora_type", "lycoris_config"})
_ATTENTION = ["to_k", "to_q", "to_v", "to_out.0"]
_TEXT = ["add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"]
_TEXT_MLP = ["ff_context.net.0.proj", "ff_context.net.2"]
_MLP = ["ff.net.0.proj", "ff.net.2", *_TEXT_MLP, "proj_mlp", "proj_out"]
_FLUX_TARGETS = {
    "all": [*_ATTENTION, *_TEXT], "mmdit": _ATTENTION, "context": _TEXT, "context+ffs": [*_TEXT, *_TEXT_MLP],
    "all+ffs": [*_ATTENTION, *_TEXT, *_MLP],
    "ai-toolkit": [*_ATTENTION, *_TEXT, *_MLP, "norm.linear", "norm1.linear", "norm1_context.linear"],
    "tiny": ["single_transformer_blocks.7.proj_out", "single_transformer_blocks.20.proj_out"],
    "nano": ["single_transformer_blocks.7.proj_out"],
}  # fmt: skip
#: classes of diffusers' modules, as LyCORIS names its targets
_CLASSES = {
    "Attention": r".*attn\d?\..+", "FeedForward": r".*ff(_context)?\..+", "Transformer2DModel": r".*attentions\.\d+\..+",
    "ResnetBlock2D": r".*resnets\.\d+\..+", "Downsample2D": r".*downsamplers\.\d+\..+", "Upsample2D": r".*upsamplers\.\d+\..+",
    "JointTransformerBlock": r"transformer_blocks\.\d+\..+", "FluxTransformerBlock": r"transformer_blocks\.\d+\..+",
    "FluxSingleTransformerBlock": r"single_transformer_blocks\.\d+\..+", "QwenImageTransformerBlock": r"transformer_blocks\.\d+\..+",
    "ZImageTransformerBlock": r"layers\.\d+\..+",
}  # fmt: skip


def import_simpletuner(settings: OtherSettings, out: Translation, read_file: ReadFile) -> dict[str, Any]:
    """Translate into ``out``; returns the defaults that were used."""
    entries = {name.lstrip("-").replace("-", "_"): value for name, value in settings.items()}
    values = defaults("simpletuner", "values")
    kind = str(entries.get("model_type") or values["model_type"])
    if kind != "lora":
        raise refuse_method("model_type", f"{for_message(kind)}: a full fine-tune trains the whole model")
    family = entries.get("model_family") or next(
        (name for name in ("flux", "sd3", "sdxl") if not is_off(entries.get(name))), None
    )
    out.family = ensure_trainable(FAMILIES.get(normalize_name(family)), family, "model_family")
    for name, method in (("controlnet", "a ControlNet is trained"), ("distillation_method", "a model is distilled")):
        if not is_off(entries.get(name)):
            raise refuse_method(name, method)
    ensure_plain_base(entries.get("pretrained_model_name_or_path", ""), "pretrained_model_name_or_path")
    ensure_plain_base(entries.get("model_flavour", ""), "model_flavour")
    values = defaults("simpletuner", "values", *(("flow",) if out.family in FLOW else ()), out.family)
    for name, alias in (
        ("checkpointing_steps", "checkpoint_step_interval"),
        ("validation_steps", "validation_step_interval"),
    ):
        if entries.get(alias) is not None:
            values.pop(name)
    implied = {name: value for name, value in values.items() if entries.get(name) is None}
    complete = {**entries, **implied}
    translate(complete, SIMPLE_TUNER, out=out)
    _length(out, complete)
    _network(out, complete, read_file)
    _times(out, complete)
    read_folders(out, complete, read_file)
    if normalize_name(complete.get("grad_clip_method")) == "value":
        out.fields["max_grad_norm"] = 0.0
        out.unsupported("grad_clip_method", "gradients are clipped by their norm here, or not at all, and not by value")
    if not out.fields.get("sample_prompts"):
        out.fields.pop("sample_every", None)
    if normalize_name(complete.get("lr_scheduler")) == "constant":
        out.fields["warmup"] = 0
    out.fields["upscale"] = True  # it enlarges what is too small
    _optimizer_defaults(out, complete)
    return implied


def _optimizer_defaults(out: Translation, settings: OtherSettings) -> None:
    """Its own values for each optimizer; its Prodigy is another algorithm, and schedule-free has no other schedule."""
    name = str(settings.get("optimizer") or "")
    if name == "prodigy":
        out.refuse("optimizer", "'prodigy' is ProdigyPlusScheduleFree, which does not exist here", "optimizer")
    own = defaults("simpletuner", f"optimizers.{name}")
    for theirs, ours in (("betas", "betas"), ("weight_decay", "weight_decay"), ("eps", "epsilon")):
        if theirs in own:
            out.fields.setdefault(ours, tuple(own[theirs]) if theirs == "betas" else own[theirs])
    if out.fields.get("optimizer") == "schedulefree":
        out.fields["lr_scheduler"] = "constant"
        out.refused.pop("lr_scheduler", None)
        out.note("lr_scheduler", "schedule-free optimizers have none there")
    with_library_defaults(out)


def _length(out: Translation, settings: OtherSettings) -> None:
    steps, epochs = settings.get("max_train_steps"), settings.get("num_train_epochs")
    if not is_off(steps):
        out.fields["steps"] = parse_int(steps)
        out.mapping["max_train_steps"] = "steps"
    elif not is_off(epochs):
        out.fields["epochs"] = parse_int(epochs)
        out.mapping["num_train_epochs"] = "epochs"


def _network(out: Translation, settings: OtherSettings, read_file: ReadFile) -> None:
    fields = out.fields
    if normalize_name(settings.get("lora_type")) == "lycoris":
        config = settings.get("lycoris_config") or "config/lycoris_config.json"
        table = config if isinstance(config, Mapping) else read_file(str(config))
        if not isinstance(table, Mapping):
            out.refuse("lycoris_config", f"{for_message(config)}: no such file; put it next to the configuration")
        else:
            _lycoris(out, table)
        return
    fields["network"] = "dora" if not is_off(settings.get("use_dora")) else "lora"
    if is_off(settings.get("lora_alpha")):
        fields["alpha"] = float(parse_int(settings["lora_rank"]))
    if out.family == "flux":
        target = str(settings.get("flux_lora_target") or "all")
        if target not in _FLUX_TARGETS:
            out.refuse("flux_lora_target", f"{for_message(target)} is not supported")
        else:
            fields["targets"] = _FLUX_TARGETS[target]
    elif out.family == "qwen_image":
        fields["targets"] = [*_ATTENTION, *_TEXT]
    else:
        fields["targets"] = list(_ATTENTION)
    fields["train_text_encoders"] = False


def _lycoris(out: Translation, table: Mapping[str, Any]) -> None:
    """A file of LyCORIS: {algo, linear_dim, linear_alpha, factor, apply_preset: {target_module, module_algo_map}}."""
    fields, at = out.fields, "lycoris_config"
    algorithm = normalize_name(table.get("algo", "lokr"))
    if algorithm not in ("lora", "locon", "loha", "lokr"):
        out.refuse(f"{at}.algo", f"{for_message(table.get('algo'))} is not supported")
        return
    fields["network"] = algorithm
    fields["rank"] = 2**20 if not is_off(table.get("full_matrix")) else parse_int(table.get("linear_dim") or 4)
    fields["alpha"] = parse_number(table.get("linear_alpha") or 1)
    preset = table.get("apply_preset")
    preset = preset if isinstance(preset, Mapping) else {}
    modules = preset.get("target_module") or ["Attention", "FeedForward"]
    own = preset.get("module_algo_map")
    own = {str(name): each for name, each in own.items()} if isinstance(own, Mapping) else {}
    factors = {parse_int(_options_of(own, each).get("factor", table.get("factor", -1))) for each in modules}
    if len(factors) > 1:
        out.refuse(f"{at}.apply_preset.module_algo_map", "all modules share one LoKr factor")
    for name in own:
        for key, value in _options_of(own, name).items():
            same = {"algo": algorithm, "dim": table.get("linear_dim"), "alpha": table.get("linear_alpha")}.get(key)
            if key != "factor" and (normalize_name(value) if key == "algo" else value) != same:
                out.refuse(
                    f"{at}.apply_preset.module_algo_map.{name}.{key}", f"{for_message(value)}: all modules are alike"
                )
    if algorithm == "lokr":
        fields["lokr_factor"] = factors.pop()
    unknown = [each for each in modules if each not in _CLASSES]
    if unknown or preset.get("target_name"):
        out.refuse(
            f"{at}.apply_preset", f"{for_message(unknown or preset.get('target_name'))}: modules of an unknown class"
        )
    else:
        fields["targets"] = ["|".join(_CLASSES[each] for each in modules)]
    if not is_off(table.get("dora_wd", table.get("weight_decompose"))) and algorithm in ("lora", "locon"):
        fields["network"] = "dora"
    if not is_off(table.get("rs_lora")):
        fields["rslora"] = True
    for key, value in table.items():
        doubled = key in ("dora_wd", "weight_decompose", "rs_lora") and algorithm in ("lora", "locon")
        plain = key in _LYCORIS_KEYS or doubled or is_off(value) or (key == "multiplier" and parse_number(value) == 1)
        if not plain:
            out.refuse(f"{at}.{key}", f"{for_message(value)}: is not supported")
    for key in preset:
        if key not in ("target_module", "target_name", "module_algo_map") and not is_off(preset[key]):
            out.refuse(f"{at}.apply_preset.{key}", f"{for_message(preset[key])}: is not supported")
    fields["train_text_encoders"] = False
    fields["dropout"] = 0.0
    out.mapping[at] = "network"


#: options of LyCORIS that are read, or change only how it computes
_LYCORIS_KEYS = frozenset(
    {"algo", "linear_dim", "linear_alpha", "factor", "apply_preset", "full_matrix", "bypass_mode"}
)


def _options_of(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    options = table.get(name)
    return options if isinstance(options, Mapping) else {}


def _times(out: Translation, settings: OtherSettings) -> None:
    if out.family not in FLOW:
        out.fields["timestep_sampling"] = "uniform"
        out.fields.setdefault("objective", "auto")
        return
    out.fields["objective"] = "flow"
    shift = parse_number(settings.get("flow_schedule_shift") or 0)
    automatic = not is_off(settings.get("flow_schedule_auto_shift"))
    out.fields["logit_std"] = parse_number(settings.get("flow_sigmoid_scale") or 1)
    if not is_off(settings.get("flow_use_uniform_schedule")) or not is_off(settings.get("flow_use_beta_schedule")):
        if shift in (0, 1) and not automatic and is_off(settings.get("flow_use_beta_schedule")):
            out.fields["timestep_sampling"] = "uniform"
        else:
            out.refuse("flow_use_uniform_schedule", "uniform times with a shift, and beta times, have no equivalent")
    elif automatic or shift:
        out.fields |= {"timestep_sampling": "shift", "timestep_shift": None if automatic else shift}
    else:
        out.fields["timestep_sampling"] = "sigmoid"


def _loss(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    ours = {"l2": "mse", "huber": "huber", "smoothl1": "smooth_l1"}.get(normalize_name(value))
    if ours == "mse" and "loss" not in Settings.model_fields:
        out.note(name, "is always the case here")
    elif ours and "loss" in Settings.model_fields:
        out.put(name, "loss", ours)
        if ours != "mse":
            usual = defaults("simpletuner", "huber")
            out.fields["huber_c"] = parse_number(settings.get("huber_c") or usual["huber_c"])
            out.fields["huber_schedule"] = normalize_name(settings.get("huber_schedule") or usual["huber_schedule"])
    else:
        out.refuse(name, f"{for_message(value)} is not supported")


def _config(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    text = value if not isinstance(value, str) else [each for each in re.split(r"[,\s]+", value) if each]
    optimizer_args(out, name, text, settings)


def _betas(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    first, second = (settings.get(f"optimizer_beta{n}") or settings.get(f"adam_beta{n}") for n in (1, 2))
    out.put(name, "betas", (parse_number(first or 0.9), parse_number(second or 0.999)))


def _noise_offset(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    if is_off(settings.get("offset_noise")):
        out.note(name, "only used with offset_noise")
    else:
        out.refuse(name, f"{for_message(value)}: noise offsets are added to every image, and not by chance")


def _uses_wandb(settings: OtherSettings) -> bool:
    return {"wandb", "all"} & {
        normalize_name(each) for each in str(settings.get("report_to") or "").split(",")
    } != set()


SIMPLE_TUNER: Final = SettingsDialect(
    plain={
        "lora_rank": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "init_lora": "start_from",
        "learning_rate": "learning_rate", "lr_warmup_steps": "warmup", "train_batch_size": "batch_size",
        "gradient_accumulation_steps": "gradient_accumulation", "pretrained_model_name_or_path": "model",
        "output_dir": "output", "seed": "seed", "caption_dropout_probability": "caption_dropout",
        "checkpointing_steps": "save_every", "checkpoint_step_interval": "save_every", "checkpoints_total_limit": "keep_last",
        "validation_steps": "sample_every", "validation_step_interval": "sample_every", "validation_guidance": "sample_guidance",
        "validation_num_inference_steps": "sample_steps", "validation_prompt": "sample_prompts", "validation_seed": "sample_seed",
        "max_grad_norm": "max_grad_norm", "flux_guidance_value": "guidance", "aspect_bucket_alignment": "bucket_step",
    },
    readers={
        "optimizer": optimizer, "optimizer_config": _config, "optimizer_beta1": _betas, "optimizer_beta2": _betas,
        "adam_weight_decay": lambda out, name, value, settings: out.put(name, "weight_decay", parse_number(value)),
        "lr_scheduler": lr_scheduler, "lr_num_cycles": cosine_cycles("lr_scheduler"),
        "lr_power": used_if("polynomial_power", lambda g: normalize_name(g.get("lr_scheduler")) == "polynomial",
                            "only used by the polynomial scheduler"),
        "mixed_precision": precision, "gradient_checkpointing": switch("gradient_checkpointing", "full", "off"),
        "report_to": log_with, "tracker_project_name": used_if("wandb_project", _uses_wandb, LOGS),
        "tracker_run_name": used_if("wandb_run_name", _uses_wandb, LOGS),
        "snr_gamma": min_snr,
        "use_ema": lambda out, name, value, settings: out.put(
            name, "ema_decay", parse_number(settings.get("ema_decay") or 0.995) if parse_bool(value) else 0.0),
        "pretrained_vae_model_name_or_path": lambda out, name, value, settings: out.put(name, "parts", {"vae": value}),
        "prediction_type": choice("objective", {"epsilon": "epsilon", "vprediction": "v_prediction", "flowmatching": "flow"}),
        "loss_type": _loss, "noise_offset": _noise_offset,
        "lora_init_type": choice("network", {"default": "lora", "gaussian": "lora"}),
        "resume_from_checkpoint": lambda out, name, value, settings: out.put(
            name, "resume", "auto" if normalize_name(value) == "latest" else "never"),
        "flux_guidance_mode": lambda out, name, value, settings: (
            out.unset.append(name) if normalize_name(value) == "constant"
            else out.refuse(name, f"{for_message(value)}: the guidance is one number")),
    },
    harmless={
        **dict.fromkeys(["model_family", "model_type", "model_flavour", "lora_type", "lycoris_config", "data_backend_config",
                         "max_train_steps", "num_train_epochs", "flux_lora_target", "flow_*", "use_dora", "ema_decay", "adam_beta*",
                         "adam_epsilon", "grad_clip_method", "resolution*", "instance_prompt", "caption_strategy", "crop*",
                         "noise_offset_probability", "flux_guidance_min", "flux_guidance_max", "soft_min_snr_sigma_data",
                         "timestep_bias_*", "refiner_training_*", "prepend_instance_prompt", "only_instance_prompt",
                         "minimum_image_size", "maximum_image_size", "target_downsample_size", "ignore_final_epochs",
                         "aspect_bucket_rounding", "disable_bucket_pruning", "loss_*", "huber_*"], ELSEWHERE),
        **dict.fromkeys(["hub_*", "push_*", "model_card_*", "webhook_*", "publishing_*"], UPLOAD),
        **dict.fromkeys(["tracker_*", "logging_dir", "print_*", "debug_*", "attend_*", "log_*"], LOGS),
        **dict.fromkeys(["validation_*", "num_validation_images", "disable_benchmark", "eval_*", "evaluation_type", "num_eval_images",
                         "user_prompt_library", "cache_clear_*", "inference_scheduler_*", "enable_watermark"],
                        "samples use the model's own settings"),
        **dict.fromkeys(["vae_*", "cache_*", "compress_disk_cache", "attention_mechanism", "sageattention_usage", "dataloader_*",
                         "*_workers", "*_batch_size", "torch_num_threads", "aws_*", "skip_file_discovery", "quantize_via",
                         "gradient_precision", "set_grads_to_none", "allow_tf32", "disable_tf32", "enable_xformers*", "ema_device",
                         "ema_cpu_only", "ema_foreach_disable", "ema_validation", "offload_*", "fuse_*", "fused_*", "keep_vae_loaded",
                         "metadata_update_interval", "accelerator_cache_clear_interval", "gradient_checkpointing_interval",
                         "unet_attention_slice", "enable_multiprocessing", "aspect_bucket_*", "dynamo_*", "i_know_*", "num_processes",
                         "compile_*", "preserve_*", "override_dataset_config", "ignore_missing_files", "data_backend_sampling",
                         "optimizer_release_gradients", "optimizer_cpu_offload*", "optimizer_offload*", "local_rank",
                         "fully_unload_text_encoder", "vram_*", "ddp_*", "enable_chunked*", "musubi_*", "group_offload*"], SPEED),
        **dict.fromkeys(["revision", "variant", "*_subfolder", "t5_padding", "tokenizer_max_length", "framerate", "base_model_default_dtype",
                         "training_scheduler_timestep_spacing", "sd3_*_uncond_*", "non_ema_revision", "flux", "sd3", "sdxl",
                         "seed_for_each_device", "snr_weight", "data_aesthetic_score", "freeze_encoder*", "text_encoder_limit",
                         "text_encoder_lr", "save_text_encoder", "delete_*", "disable_segmented_timestep_sampling",
                         "pretrained_transformer_model_name_or_path", "pretrained_unet_model_name_or_path",
                         "pretrained_t5_model_name_or_path", "prodigy_steps", "hidream_*", "ltx_*", "sana_*", "qwen_*",
                         "input_perturbation_steps", "layer_freeze_strategy", "lr_end", "use_fsdp", "model_name"], OWN_FILE),
    },
    missing={
        **dict.fromkeys(["base_model_precision", "text_encoder_?_precision", "text_encoder_*_precision", "quantize_activations"], MEMORY),
        "ema_update_interval": "the average is updated in every step",
    },
    refused={
        **dict.fromkeys(["use_soft_min_snr", "rescale_betas_zero_snr", "refiner_training", "offset_noise", "input_perturbation",
                         "flux_fast_schedule", "timestep_bias_strategy"], "noise and timesteps are sampled without it"),
        **dict.fromkeys(["train_text_encoder", "flux_attention_masked_training", "init_lokr_norm", "lr_scale", "lr_scale_sqrt",
                         "tread_config", "crepa_enabled", "twinflow_enabled", "slider_*", "scheduled_sampling*"], "is not supported"),
    },
    neutral={"base_model_precision": ("no_change",), "text_encoder_?_precision": ("no_change",),
             "text_encoder_*_precision": ("no_change",), "timestep_bias_strategy": ("none",)},
)  # fmt: skip
