"""The files of kohya_ss, the GUI of kohya's scripts: its own names, and zeros that mean "not set".

    file ──+ the GUI's defaults──► the options that the GUI passes to the script

    LoRA_type        Standard, Kohya LoCon, LyCORIS/LoHa, Flux1, ...: network_module and network_args
    epoch            the length of the run, where neither max_train_steps nor max_train_epochs is set
    lr_warmup        percent of all steps; lr_warmup_steps, where it is set, counts steps
    unet_lr, text_encoder_lr  both zero: learning_rate; one zero: that part is not trained
    noise_offset     with noise_offset_type Original, multires_noise_* with Multires
    additional_parameters     flags of the script, which override the others

Files of the tabs for DreamBooth, fine-tuning and textual inversion do not train an adapter, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inweave.training.config.translate import Translation
from inweave.training.config.values import is_off, names, normalize_name, parse_number, parse_scalar, words
from inweave.training.importers.defaults import defaults
from inweave.training.importers.kohya.files import prepare_kohya, translate_kohya
from inweave.training.importers.models import refuse_method
from inweave.training.importers.shell import parse_options
from inweave.training.importers.source import Importer, Source

_MARKS = frozenset({"LoRA_type", "max_resolution", "lr_warmup", "stop_text_encoder_training", "LyCORIS_preset"})
_TEXTUAL_INVERSION = ("token_string", "init_word", "num_vectors_per_token")
_FINE_TUNE = names(
    "train_dir image_folder create_caption create_buckets generate_caption_database learning_rate_te learning_rate_te1 "
    "finetune_image_folder"
)
#: LoRA_type without punctuation -> network module
_MODULES = {
    "standard": "networks.lora", "kohyalocon": "networks.lora", "flux1": "networks.lora_flux",
    "sd3": "networks.lora_sd3", "lorafa": "networks.lora_fa", "kohyadylora": "networks.dylora",
    "kohyaloha": "networks.loha", "kohyalokr": "networks.lokr",
    "flux1oft": "networks.oft_flux", "lumina": "networks.lora_lumina", "hunyuanimage": "networks.lora_hunyuan_image",
    "anima": "networks.lora_anima",
}  # fmt: skip
#: LoRA_type without punctuation -> algorithm of LyCORIS
_ALGORITHMS = {
    "locon": "locon", "lycorislocon": "locon", "lycorisloha": "loha", "lycorislokr": "lokr", "lycorisia3": "ia3",
    "lycorisdylora": "dylora", "lycorisglora": "glora", "lycorisdiagoft": "diag-oft", "lycorisboft": "boft",
    "lycorisnativefinetuning": "full",
}  # fmt: skip
#: options of LyCORIS that the GUI passes on, by algorithm
_LYCORIS = (
    "rank_dropout", "module_dropout", "use_tucker", "use_scalar", "rank_dropout_scale", "train_norm", "dora_wd",
    "bypass_mode",
)  # fmt: skip
_BLOCKS = (
    "down_lr_weight", "mid_lr_weight", "up_lr_weight", "block_lr_zero_threshold", "block_dims", "block_alphas",
    "conv_block_dims", "conv_block_alphas", "rank_dropout", "module_dropout",
)  # fmt: skip
#: options of networks.lora_flux alone
_FLUX = names("""
    img_attn_dim img_mlp_dim img_mod_dim single_dim txt_attn_dim txt_mlp_dim txt_mod_dim single_mod_dim in_dims
    train_double_block_indices train_single_block_indices train_t5xxl
""")
_FLUX_READ = (*_FLUX, "split_qkv", "train_blocks", "rank_dropout", "module_dropout")
#: the settings of a regularization of FLUX.1, which is on or off with train_lora_ggpo
_GGPO = ("train_lora_ggpo", "ggpo_sigma", "ggpo_beta")
_LORA_PLUS = ("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio")
_RENAMED = {
    "max_resolution": "resolution", "optimizer": "optimizer_type", "lora_network_weights": "network_weights",
    "train_dir": "output_dir",
}  # fmt: skip
#: boxes that are read with LoRA_type, and boxes of other tabs and of the launcher
_READ_TOGETHER = (*names("""
    LoRA_type LyCORIS_preset conv_dim conv_alpha factor decompose_both use_cp unit train_on_input constrain rescaled
    split_qkv split_mode train_blocks
    additional_parameters epoch lr_warmup max_train_epochs max_train_steps noise_offset_type xformers
    stop_text_encoder_training stop_text_encoder_training_pct no_token_padding save_as_bool model_list sdxl_no_half_vae
    sdxl_cache_text_encoder_outputs flux1_cache_text_encoder_outputs flux1_cache_text_encoder_outputs_to_disk
    flux1_checkbox sd3_checkbox sd3_cache_text_encoder_outputs sd3_cache_text_encoder_outputs_to_disk use_wandb
    extra_accelerate_launch_args main_process_port multi_gpu num_processes num_machines num_cpu_threads_per_process
    gpu_ids training_preset headless print_only sdxl_checkbox wandb_api_key huggingface_token weights dynamo_backend
    dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph
"""), *_LYCORIS, *_BLOCKS, *_GGPO)  # fmt: skip
#: numbers that the GUI does not pass on where they are zero
_ZERO_IS_UNSET = (*names("""
    seed clip_skip min_snr_gamma max_timestep min_timestep noise_offset save_every_n_epochs save_every_n_steps
    sample_every_n_epochs sample_every_n_steps save_last_n_steps save_last_n_steps_state save_last_n_epochs
    vae_batch_size ip_noise_gamma v_pred_like_loss max_token_length scale_weight_norms adaptive_noise_scale
    lr_scheduler_num_cycles lr_scheduler_power multires_noise_iterations multires_noise_discount
"""), *_LORA_PLUS)  # fmt: skip
#: settings of the scripts for transformers
_TRANSFORMER = names("""
    ae clip_l clip_g t5xxl discrete_flow_shift model_prediction_type timestep_sampling t5xxl_max_token_length
    guidance_scale apply_t5_attn_mask
""")


def _recognize(table: Mapping[str, Any]) -> dict[str, Any] | None:
    plain = not any(isinstance(value, Mapping) for value in table.values())
    return dict(table) if plain and _MARKS & table.keys() else None


def _prepare(source: Source) -> Translation:
    """Put the GUI's boxes under the names of the script that it would start."""
    table = source.settings
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
            source.note(name, "kohya_ss ignores it for a LoRA")
        elif name in _READ_TOGETHER and not is_off(value):
            source.note(name, "is read with the settings around it")
        elif name in (*_READ_TOGETHER, "persistent_data_loader_workers") or value is None or value == "":
            source.unset.append(name)
        else:
            settings.setdefault(_RENAMED.get(name, name), value)
    for name in ("optimizer_type", "resolution", "network_weights"):  # both spellings: the script's own counts
        if entries.get(name) not in (None, ""):
            settings[name] = entries[name]
    if _on(entries, "use_wandb") and is_off(settings.get("log_with")):
        settings["log_with"] = "wandb"
    _model(entries, settings)
    _network(entries, settings)
    _length(entries, settings, source)
    _rates(entries, settings)
    _noise(entries, settings, source)
    for name in ("optimizer_args", "lr_scheduler_args"):
        if isinstance(settings.get(name), str):
            settings[name] = words(settings[name])
    for name in [name for name, value in settings.items() if value == 0 and name in _ZERO_IS_UNSET]:
        source.unset.append(name)
        del settings[name]
    settings |= parse_options(words(str(entries.get("additional_parameters") or "")))
    return prepare_kohya(source, settings, implied)


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
    sdxl = _on(entries, "sdxl") or _on(entries, "sdxl_checkbox")
    script, box = ("flux_", "flux1") if flux else ("sd3_", "sd3") if sd3 else ("sdxl_", "sdxl") if sdxl else ("", "")
    settings["script"] = f"{script}train_network.py"
    if box and _on(entries, f"{box}_cache_text_encoder_outputs"):
        settings["cache_text_encoder_outputs"] = True
    settings.pop("sdxl", None)
    for name in _TRANSFORMER if not flux and not sd3 else ():
        settings.pop(name, None)


def _network(entries: Mapping[str, Any], settings: dict[str, Any]) -> None:
    """Put network_module and network_args together from their boxes, as the GUI does."""
    kind = normalize_name(entries.get("LoRA_type"))
    algorithm = _ALGORITHMS.get(kind, "")
    module = "lycoris.kohya" if algorithm else _MODULES.get(kind, str(entries.get("LoRA_type")))
    for script in ("sd3", "flux"):
        if settings["script"].startswith(f"{script}_") and module == "networks.lora":
            module = f"networks.lora_{script}"
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
            options = {name: settings.pop(name) for name in _FLUX if name in settings}
            arguments = {name: value for name, value in {**entries, **options}.items() if name in _FLUX_READ}
            arguments = {
                name: value
                for name, value in arguments.items()
                if (value != "all" and not is_off(value))
                or (name.endswith("_block_indices") and value not in ("all", "", None))
            }
            if _on(entries, "split_mode"):
                arguments["train_blocks"] = "single"
            if _on(entries, "train_lora_ggpo"):
                arguments["train_lora_ggpo"] = True
        if kind in ("kohyaloha", "kohyalokr"):
            read = ("conv_dim", "use_tucker", "rank_dropout", "module_dropout", "factor")
            arguments = {name: entries[name] for name in read if _on(entries, name)}
            arguments |= {"conv_alpha": entries.get("conv_alpha") or 1} if "conv_dim" in arguments else {}
            if kind == "kohyaloha" or parse_number(arguments.get("factor", -1)) == -1:
                arguments.pop("factor", None)
    for name in _LORA_PLUS:
        value = settings.pop(name, None)
        if not is_off(value):
            arguments[name] = value
    settings["network_module"] = module
    settings["network_args"] = [f"{name}={value}" for name, value in arguments.items()]


def _length(entries: Mapping[str, Any], settings: dict[str, Any], source: Source) -> None:
    """Set the length: max_train_epochs before max_train_steps before epoch, which is ignored with a dataset file."""
    for name in ("max_train_epochs", "max_train_steps"):
        settings.pop(name, None)
    if _on(entries, "max_train_epochs"):
        settings["max_train_epochs"] = entries["max_train_epochs"]
    elif _on(entries, "max_train_steps"):
        settings["max_train_steps"] = entries["max_train_steps"]
    elif not entries.get("dataset_config"):
        settings["max_train_epochs"] = entries.get("epoch") or 1
    else:
        source.note("epoch", "the GUI ignores it with a dataset file; the script's own length is used")
    if "lr_warmup_steps" not in settings or is_off(settings["lr_warmup_steps"]):
        settings["lr_warmup_steps"] = parse_number(entries.get("lr_warmup") or 0) / 100
        if entries.get("dataset_config") and not _on(entries, "max_train_steps"):
            settings["lr_warmup_steps"] = 0


def _rates(entries: Mapping[str, Any], settings: dict[str, Any]) -> None:
    """Set the rates: two zeros mean learning_rate, one that its part is not trained."""
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


def _noise(entries: Mapping[str, Any], settings: dict[str, Any], source: Source) -> None:
    original = normalize_name(entries.get("noise_offset_type") or "Original") != "multires"
    for name in ("noise_offset", "adaptive_noise_scale", "noise_offset_random_strength", "multires_noise_iterations",
                 "multires_noise_discount"):  # fmt: skip
        if original == name.startswith("multires") and _on(entries, name):
            source.note(name, f"noise_offset_type is {entries.get('noise_offset_type') or 'Original'}")
        if original == name.startswith("multires"):
            settings.pop(name, None)
    if is_off(settings.get("noise_offset")):
        settings.pop("noise_offset_random_strength", None)
        settings.pop("adaptive_noise_scale", None)
    if is_off(settings.get("ip_noise_gamma")):
        settings.pop("ip_noise_gamma_random_strength", None)


IMPORTER = Importer("kohya_ss", _recognize, _prepare, translate_kohya)
