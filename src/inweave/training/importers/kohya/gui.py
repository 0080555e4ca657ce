"""The files of kohya_ss, the GUI of kohya's scripts: its own names, and zeros that mean "not set".

    file ──+ the GUI's defaults──► what the GUI would pass to the script, under the script's names

    LoRA_type        Standard, Kohya LoCon, LyCORIS/LoHa, Flux1, ...: network_module and network_args
    epoch            the length of the run, where neither max_train_steps nor max_train_epochs is set
    lr_warmup        percent of all steps; lr_warmup_steps, where it is set, counts steps
    unet_lr, text_encoder_lr  both zero: learning_rate; one zero: that part is not trained
    noise_offset     with noise_offset_type Original, multires_noise_* with Multires
    additional_parameters     flags of the script, which override the others

Files of the tabs for DreamBooth, fine-tuning and textual inversion train no adapter, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inweave.training.importers.defaults import defaults
from inweave.training.importers.models import refuse_method
from inweave.training.importers.shell import parse_options
from inweave.training.importers.translate import Translation
from inweave.training.importers.values import is_off, normalize_name, parse_number, parse_scalar, words

MARKS = frozenset({"LoRA_type", "max_resolution", "lr_warmup", "stop_text_encoder_training", "LyCORIS_preset"})
_TEXTUAL_INVERSION = ("token_string", "init_word", "num_vectors_per_token")
_FINE_TUNE = ("train_dir", "image_folder", "create_caption", "create_buckets", "generate_caption_database", "learning_rate_te",
              "learning_rate_te1", "finetune_image_folder")  # fmt: skip
#: LoRA_type without punctuation -> (network module, algorithm of LyCORIS)
_TYPES = {
    "standard": ("networks.lora", ""), "kohyalocon": ("networks.lora", ""), "flux1": ("networks.lora_flux", ""),
    "sd3": ("networks.lora_sd3", ""), "lorafa": ("networks.lora_fa", ""), "kohyadylora": ("networks.dylora", ""),
    "flux1oft": ("networks.oft_flux", ""), "locon": ("lycoris.kohya", "locon"), "lycorislocon": ("lycoris.kohya", "locon"),
    "lycorisloha": ("lycoris.kohya", "loha"), "lycorislokr": ("lycoris.kohya", "lokr"), "lycorisia3": ("lycoris.kohya", "ia3"),
    "lycorisdylora": ("lycoris.kohya", "dylora"), "lycorisglora": ("lycoris.kohya", "glora"),
    "lycorisdiagoft": ("lycoris.kohya", "diag-oft"), "lycorisboft": ("lycoris.kohya", "boft"),
    "lycorisnativefinetuning": ("lycoris.kohya", "full"), "lumina": ("networks.lora_lumina", ""),
    "hunyuanimage": ("networks.lora_hunyuan_image", ""), "anima": ("networks.lora_anima", ""),
}  # fmt: skip
#: options of LyCORIS that the GUI passes on, by algorithm
_LYCORIS = (
    "rank_dropout", "module_dropout", "use_tucker", "use_scalar", "rank_dropout_scale", "train_norm", "dora_wd", "bypass_mode",
)  # fmt: skip
_BLOCKS = (
    "down_lr_weight", "mid_lr_weight", "up_lr_weight", "block_lr_zero_threshold", "block_dims", "block_alphas",
    "conv_block_dims", "conv_block_alphas", "rank_dropout", "module_dropout",
)  # fmt: skip
#: of the LyCORIS and blocks boxes: their values are read with LoRA_type
_NETWORK = frozenset({
    "LoRA_type", "LyCORIS_preset", "conv_dim", "conv_alpha", "factor", "decompose_both", "use_cp", "unit", "train_on_input",
    "constrain", "rescaled", "split_qkv", "split_mode", "train_blocks", *_LYCORIS, *_BLOCKS,
})  # fmt: skip
_RENAMED = {
    "max_resolution": "resolution", "optimizer": "optimizer_type", "lora_network_weights": "network_weights",
    "train_dir": "output_dir",
}  # fmt: skip
#: boxes of other tabs and of the launcher
_IGNORED = frozenset({
    "additional_parameters", "epoch", "lr_warmup", "max_train_epochs", "max_train_steps", "noise_offset_type", "xformers",
    "stop_text_encoder_training", "stop_text_encoder_training_pct", "no_token_padding", "save_as_bool", "model_list",
    "sdxl_no_half_vae", "sdxl_cache_text_encoder_outputs", "flux1_cache_text_encoder_outputs",
    "flux1_cache_text_encoder_outputs_to_disk", "flux1_checkbox", "sd3_checkbox", "sd3_cache_text_encoder_outputs",
    "sd3_cache_text_encoder_outputs_to_disk", "use_wandb", "extra_accelerate_launch_args", "main_process_port", "multi_gpu",
    "num_processes", "num_machines", "num_cpu_threads_per_process", "gpu_ids", "training_preset", "headless", "print_only",
    "sdxl_checkbox", "wandb_api_key", "huggingface_token", "weights", "dynamo_backend", "dynamo_mode",
    "dynamo_use_dynamic", "dynamo_use_fullgraph",
})  # fmt: skip


def is_gui(table: Mapping[str, Any]) -> bool:
    return bool(MARKS & table.keys()) and not any(isinstance(value, Mapping) for value in table.values())


def from_gui(table: Mapping[str, Any], out: Translation) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the script's settings, the GUI's defaults that were used); what the GUI ignores is noted."""
    _ensure_adapter(table)
    implied = {
        name: value
        for name, value in defaults("kohya_ss", "values").items()
        if table.get(name) is None and not any(theirs in table for theirs in _other_names(name))
    }
    entries = {name: parse_scalar(value) for name, value in {**table, **implied}.items()}
    settings: dict[str, Any] = {}
    for name, value in entries.items():
        if name.startswith("stop_text_encoder_training") and not is_off(value):
            out.note(name, "kohya_ss ignores it for a LoRA")
        elif name in _NETWORK or name in _IGNORED:
            out.unset.append(name) if is_off(value) else out.note(name, "is read with the settings around it")
        elif name == "persistent_data_loader_workers" or value is None or value == "":
            out.unset.append(name)
        else:
            settings.setdefault(_RENAMED.get(name, name), value)
    for name in ("optimizer_type", "resolution", "network_weights"):  # both spellings: the script's own counts
        if entries.get(name) not in (None, ""):
            settings[name] = entries[name]
    if not is_off(entries.get("use_wandb")) and is_off(settings.get("log_with")):
        settings["log_with"] = "wandb"
    _model(entries, settings)
    _network(entries, settings)
    _length(entries, settings, out)
    _rates(entries, settings)
    _noise(entries, settings, out)
    for name in ("optimizer_args", "lr_scheduler_args"):
        if name in settings:
            settings[name] = words(settings[name]) if isinstance(settings[name], str) else settings[name]
    for name in [name for name, value in settings.items() if value == 0 and name in _ZERO_IS_UNSET]:
        out.unset.append(name)
        del settings[name]
    settings |= parse_options(words(str(entries.get("additional_parameters") or "")))
    return settings, implied


#: numbers that the GUI does not pass on where they are zero
_ZERO_IS_UNSET = frozenset({
    "seed", "clip_skip", "min_snr_gamma", "max_timestep", "min_timestep", "noise_offset", "save_every_n_epochs",
    "save_every_n_steps", "sample_every_n_epochs", "sample_every_n_steps", "save_last_n_steps", "save_last_n_steps_state",
    "save_last_n_epochs", "vae_batch_size", "ip_noise_gamma", "v_pred_like_loss", "max_token_length", "scale_weight_norms",
    "adaptive_noise_scale", "lr_scheduler_num_cycles", "lr_scheduler_power", "multires_noise_iterations",
    "multires_noise_discount", "loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio",
})  # fmt: skip


def _other_names(name: str) -> list[str]:
    spelled = {ours: theirs for theirs, ours in _RENAMED.items()} | _RENAMED
    return [spelled[name]] if name in spelled else []


def _ensure_adapter(table: Mapping[str, Any]) -> None:
    kind = table.get("LoRA_type")
    if normalize_name(kind) == "lycorisnativefinetuning":
        raise refuse_method("LoRA_type", "LyCORIS/Native Fine-Tuning trains the whole model")
    if kind:
        return
    if any(name in table for name in _TEXTUAL_INVERSION):
        raise refuse_method("token_string", "textual inversion trains an embedding")
    if any(name in table for name in _FINE_TUNE):
        raise refuse_method("learning_rate_te", "a full fine-tune trains the whole model")
    if not any(name in table for name in ("network_dim", "lora_network_weights", "unet_lr", "network_module")):
        raise refuse_method("LoRA_type", "is not set: DreamBooth trains the whole model")


def _on(entries: Mapping[str, Any], name: str) -> bool:
    return not is_off(entries.get(name))


def _model(entries: Mapping[str, Any], settings: dict[str, Any]) -> None:
    flux = _on(entries, "flux1_checkbox") or normalize_name(entries.get("LoRA_type")) == "flux1"
    sd3 = _on(entries, "sd3_checkbox")
    script = (
        "flux_" if flux else "sd3_" if sd3 else "sdxl_" if _on(entries, "sdxl") or _on(entries, "sdxl_checkbox") else ""
    )
    settings["script"] = f"{script}train_network.py"
    cached = {"flux_": "flux1_cache_text_encoder_outputs", "sd3_": "sd3_cache_text_encoder_outputs",
              "sdxl_": "sdxl_cache_text_encoder_outputs"}.get(script, "")  # fmt: skip
    if cached and _on(entries, cached):
        settings["cache_text_encoder_outputs"] = True
    settings.pop("sdxl", None)
    if not flux and not sd3:
        for name in ("ae", "clip_l", "clip_g", "t5xxl", "discrete_flow_shift", "model_prediction_type", "timestep_sampling",
                     "t5xxl_max_token_length", "guidance_scale", "apply_t5_attn_mask"):  # fmt: skip
            settings.pop(name, None)


def _network(entries: Mapping[str, Any], settings: dict[str, Any]) -> None:
    """network_module and network_args, as the GUI puts them together from its boxes."""
    kind = normalize_name(entries.get("LoRA_type"))
    module, algorithm = _TYPES.get(kind, (str(entries.get("LoRA_type")), ""))
    if settings["script"].startswith("sd3_") and module == "networks.lora":
        module = "networks.lora_sd3"
    elif settings["script"].startswith("flux_") and module == "networks.lora":
        module = "networks.lora_flux"
    arguments: dict[str, Any] = {}
    if algorithm:
        arguments = {"algo": algorithm, "preset": entries.get("LyCORIS_preset") or "full"}
        arguments |= {name: entries.get(name) or 0 for name in ("conv_dim", "conv_alpha")}
        arguments |= {name: entries[name] for name in _LYCORIS if _on(entries, name)}
        if algorithm == "lokr":
            arguments |= {name: entries[name] for name in ("factor", "decompose_both", "use_cp") if _on(entries, name)}
    else:
        arguments = {name: entries[name] for name in _BLOCKS if _on(entries, name)}
        if kind == "kohyalocon":
            arguments |= {name: entries.get(name) or 1 for name in ("conv_dim", "conv_alpha")}
        if kind == "flux1" or module == "networks.lora_flux":
            arguments = {name: entries[name] for name in ("split_qkv", "train_blocks") if _on(entries, name)}
            if _on(entries, "split_mode"):
                arguments["train_blocks"] = "single"
    for name in ("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio"):
        value = settings.pop(name, None)
        if not is_off(value):
            arguments[name] = value
    settings["network_module"] = module
    settings["network_args"] = [f"{name}={value}" for name, value in arguments.items()]


def _length(entries: Mapping[str, Any], settings: dict[str, Any], out: Translation) -> None:
    """max_train_epochs before max_train_steps before epoch; with a dataset file, epoch counts nothing."""
    for name in ("max_train_epochs", "max_train_steps"):
        settings.pop(name, None)
    if _on(entries, "max_train_epochs"):
        settings["max_train_epochs"] = entries["max_train_epochs"]
    elif _on(entries, "max_train_steps"):
        settings["max_train_steps"] = entries["max_train_steps"]
    elif not entries.get("dataset_config"):
        settings["max_train_epochs"] = entries.get("epoch") or 1
    else:
        out.note("epoch", "the GUI ignores it with a dataset file; the script's own length is used")
    if "lr_warmup_steps" not in settings or is_off(settings["lr_warmup_steps"]):
        settings["lr_warmup_steps"] = parse_number(entries.get("lr_warmup") or 0) / 100
        if entries.get("dataset_config") and not _on(entries, "max_train_steps"):
            settings["lr_warmup_steps"] = 0


def _rates(entries: Mapping[str, Any], settings: dict[str, Any]) -> None:
    """Zeros: both mean that learning_rate counts, one that its part is not trained."""
    unet, encoder = (parse_number(entries.get(name) or 0) for name in ("unet_lr", "text_encoder_lr"))
    for name in ("unet_lr", "text_encoder_lr"):
        settings.pop(name, None)
    if unet:
        settings["unet_lr"] = unet
    if encoder:
        settings["text_encoder_lr"] = entries["text_encoder_lr"]
    if unet and not encoder:
        settings["network_train_unet_only"] = True
    if encoder and not unet:
        settings["network_train_text_encoder_only"] = True
    if unet or encoder:
        settings.pop("learning_rate", None)
    if not unet and encoder:
        settings["learning_rate"] = encoder


def _noise(entries: Mapping[str, Any], settings: dict[str, Any], out: Translation) -> None:
    original = normalize_name(entries.get("noise_offset_type") or "Original") != "multires"
    for name in ("noise_offset", "adaptive_noise_scale", "noise_offset_random_strength", "multires_noise_iterations",
                 "multires_noise_discount"):  # fmt: skip
        if original == name.startswith("multires") and _on(entries, name):
            out.note(name, f"noise_offset_type is {entries.get('noise_offset_type') or 'Original'}")
        if original == name.startswith("multires"):
            settings.pop(name, None)
    if is_off(settings.get("noise_offset")):
        settings.pop("noise_offset_random_strength", None)
        settings.pop("adaptive_noise_scale", None)
    if is_off(settings.get("ip_noise_gamma")):
        settings.pop("ip_noise_gamma_random_strength", None)
