"""OneTrainer's settings, by their place in its JSON ("transformer.train").

Its files describe every component of every model it knows; those that the model type at hand does not have are noted as
harmless. Its presets only store what differs from its defaults, and older files have names that it renames itself
(`_migrated`). training_method decides whether an adapter is trained at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from inweave.checked import for_message
from inweave.training.config.fields import Settings
from inweave.training.importers.defaults import defaults
from inweave.training.importers.models import ONE_TRAINER as FAMILIES
from inweave.training.importers.models import ensure_plain_base, ensure_trainable, refuse_method
from inweave.training.importers.onetrainer.concepts import destination, read_concepts
from inweave.training.importers.onetrainer.parts import every, networks_of, part, rate, times, train_limits
from inweave.training.importers.optimizers import SCHEDULES, optimizer, our_optimizer, with_library_defaults
from inweave.training.importers.targets import FLOW, everything, filtered
from inweave.training.importers.translate import (
    ELSEWHERE,
    LOGS,
    MEMORY,
    METADATA,
    NO_PART,
    OWN_FILE,
    SPEED,
    OtherSettings,
    SettingsDialect,
    Translation,
    choice,
    cosine_cycles,
    refuse_hidden_dropout,
    save_dtype,
    substring_patterns,
    translate,
    used_if,
)
from inweave.training.importers.translate import precision as _precision
from inweave.training.importers.values import (
    is_off,
    normalize_name,
    parse_bool,
    parse_int,
    parse_number,
    parse_scalar,
)

_METHODS = {
    "FINE_TUNE": "a full fine-tune trains the whole model", "EMBEDDING": "textual inversion trains an embedding",
    "FINE_TUNE_VAE": "a VAE is trained",
}  # fmt: skip
_RENAMED = {
    "save_after": "save_every", "save_after_unit": "save_every_unit", "lora_layers": "layer_filter",
    "lora_layer_preset": "layer_filter_preset", "lora_layers_regex": "layer_filter_regex", "train_unet": "unet.train",
    "unet_learning_rate": "unet.learning_rate", "train_text_encoder": "text_encoder.train",
    "text_encoder_learning_rate": "text_encoder.learning_rate", "train_text_encoder_2": "text_encoder_2.train",
    "text_encoder_2_learning_rate": "text_encoder_2.learning_rate", "vae_model_name": "vae.model_name",
    "optimizer": "optimizer.optimizer", "weight_decay": "optimizer.weight_decay", "latent_caching": "image_caching",
    "train_prior": "prior.train", "dataloader_threads": "caching_threads",
}  # fmt: skip
#: layers that a preset stands for, where a file does not list them; by family
_LAYERS = {
    "sd": {"attn-mlp": "attentions", "attn-only": "attn"}, "sdxl": {"attn-mlp": "attentions", "attn-only": "attn"},
    "qwen_image": {"attn-mlp": "attn,img_mlp,txt_mlp", "attn-only": "attn", "blocks": "transformer_block"},
    "z_image": {"attn-mlp": "attention,feed_forward", "attn-only": "attention", "blocks": "layers"},
    "": {"attn-mlp": "attn,ff.net", "attn-only": "attn", "blocks": "transformer_block"},
}  # fmt: skip


def import_onetrainer(settings: OtherSettings, out: Translation) -> dict[str, Any]:
    """Translate into ``out``; returns the defaults that were used."""
    values = defaults("onetrainer", "values")
    entries = _migrated(settings, out)
    method = str(entries.get("training_method") or values["training_method"])
    if method != "LORA":
        raise refuse_method("training_method", f"{method}: {_METHODS.get(method, 'trains no adapter')}")
    kind = entries.get("model_type") or values["model_type"]
    out.family = ensure_trainable(FAMILIES.get(str(kind)), kind, "model_type")
    ensure_plain_base(entries.get("base_model_name", ""), "base_model_name")
    implied = {name: value for name, value in values.items() if entries.get(name) is None and name not in entries}
    implied |= {
        name: value
        for name, value in values.items()
        if name in entries and entries[name] is None and name != "clip_grad_norm"
    }
    implied |= _part_defaults(entries, out.family)
    name = str(entries.get("optimizer.optimizer") or values["optimizer.optimizer"])
    own = {f"optimizer.{key}": value for key, value in defaults("onetrainer", f"optimizers.{name}").items()}
    implied |= {key: value for key, value in own.items() if entries.get(key) is None}
    complete = {**entries, **implied}
    translate({key: value for key, value in complete.items() if not key.startswith("concepts.")}, ONE_TRAINER, out=out)
    read_concepts(out, complete)
    _finish(out, complete)
    return implied


def _migrated(settings: OtherSettings, out: Translation) -> dict[str, Any]:
    """Older names, as OneTrainer itself renames them; a name of today counts before its older one."""
    entries = {name: value for name, value in settings.items() if name not in _RENAMED}
    for name, value in settings.items():
        if name in _RENAMED and not (name == "optimizer" and isinstance(value, Mapping)):
            entries.setdefault(_RENAMED[name], value)
            out.note(name, f"is called {_RENAMED[name]} today")
    for old, new in (("train_text_encoder_epochs", "text_encoder"), ("train_text_encoder_2_epochs", "text_encoder_2")):
        if old in entries:
            out.note(old, f"is called {new}.stop_training_after today")
            entries.setdefault(f"{new}.stop_training_after", entries.pop(old))
            entries.setdefault(f"{new}.stop_training_after_unit", "EPOCH")
    if not is_off(strength := entries.pop("min_snr_gamma", None)):
        entries |= {"loss_weight_fn": "MIN_SNR_GAMMA", "loss_weight_strength": strength}
        out.note("min_snr_gamma", "is called loss_weight_strength today")
    if entries.get("prior.train") is not None and "transformer.train" not in entries and "model_type" in entries:
        if FAMILIES.get(str(entries["model_type"])) in FLOW:
            moved = {f"transformer.{key[6:]}": value for key, value in entries.items() if key.startswith("prior.")}
            if any(value is True for key, value in moved.items() if key.endswith(".train")):
                entries |= moved
    return entries


def _part_defaults(entries: OtherSettings, family: str) -> dict[str, Any]:
    denoiser, encoders = networks_of(family)
    implied = {f"{each}.train": True for each in (denoiser, *encoders) if entries.get(f"{each}.train") is None}
    limits = defaults("onetrainer", "encoder")
    for each in encoders:
        for key, value in limits.items():
            if entries.get(f"{each}.{key}") is None:
                implied[f"{each}.{key}"] = value
    return implied


def _finish(out: Translation, settings: OtherSettings) -> None:
    fields = out.fields
    _targets(out, settings)
    times(out, settings)
    train_limits(out, settings)
    if "lokr" in str(fields.get("network")) and not is_off(settings.get("lokr_full_matrix")):
        fields["rank"] = 2**20  # more than any factor has: both stay whole
    if settings.get("clip_grad_norm", 1.0) is None:
        fields["max_grad_norm"] = 0.0
    if fields.get("optimizer") == "adafactor":
        fields["optimizer_args"] = {"scale_parameter": parse_bool(settings.get("optimizer.scale_parameter") or False)}
        if parse_bool(settings.get("optimizer.relative_step") or False):
            out.refuse("optimizer.relative_step", "Adafactor would choose its own learning rate")
    if fields.get("ema_decay"):
        out.unsupported("ema_update_step_interval", "the average is updated in every step")
    if fields.get("masked_loss"):
        out.unsupported("unmasked_weight", "the loss counts where masks are white, and nowhere else")
    if not fields.get("sample_prompts"):
        for name in ("sample_every", "sample_every_epochs"):
            fields.pop(name, None)
    fields["upscale"] = True  # it enlarges what is too small
    refuse_hidden_dropout(out, "dropout_probability")
    _micro_steps(out)
    with_library_defaults(out)


def _micro_steps(out: Translation) -> None:
    """Its steps are batches, however many of them make one step of the optimizer; schedule-free has no warmup."""
    fields = out.fields
    count = parse_int(fields.get("gradient_accumulation") or 1)
    if fields.get("optimizer") == "schedulefree":
        fields |= {"warmup": 0, "lr_scheduler": "constant"}
        out.note("learning_rate_warmup_steps", "schedule-free optimizers have a constant rate and no warmup there")
    if count <= 1:
        return
    if parse_number(fields.get("warmup") or 0) > 1:
        fields["warmup"] = int(parse_number(fields["warmup"]) / count)
        out.note("learning_rate_warmup_steps", f"a step is a batch there: divided by {count}")
    stop = parse_number(fields.get("text_encoder_stop") or 0)
    for name, theirs in (
        ("save_every", "save_every"),
        ("sample_every", "sample_after"),
        ("text_encoder_stop", "text_encoder.stop_training_after"),
    ):
        value = stop if name == "text_encoder_stop" else parse_number(fields.get(name) or 0)
        if value > 1 and value % count:
            out.refuse(
                theirs, f"{value:g}: a step is a batch there, and this is no multiple of gradient_accumulation_steps"
            )
        elif value > 1:
            fields[name] = int(value // count)
            out.note(theirs, f"a step is a batch there: divided by {count}")


def _targets(out: Translation, settings: OtherSettings) -> None:
    """layer_filter: substrings or expressions; without one every layer is adapted. Text encoders are adapted whole."""
    listed = [each.strip() for each in str(settings.get("layer_filter") or "").split(",") if each.strip()]
    preset = str(settings.get("layer_filter_preset") or "full")
    if not listed and preset not in ("full", "custom"):
        table = _LAYERS.get(out.family, _LAYERS[""])
        listed = table.get(preset, "").split(",") if preset in table else []
        if not listed:
            out.refuse("layer_filter_preset", f"{for_message(preset)}: its layers are not listed in the file")
    regex = parse_bool(settings.get("layer_filter_regex") or False)
    patterns = (
        [f".*({each}).*" if not each.startswith("^") else each for each in listed]
        if regex
        else substring_patterns(listed)
    )
    trained = bool(out.fields.get("train_text_encoders"))
    out.fields["targets"] = filtered(patterns, trained) if patterns else everything()
    out.mapping["layer_filter"] = "targets"


def _network(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    plain = "dora" if parse_bool(settings.get("lora_decompose") or False) else "lora"
    choice("network", {"lora": plain, "loha": "loha", "lokr": "lokr"})(out, name, value, settings)
    if normalize_name(value) == "lokr":
        for each in ("lokr_decompose_both", "lokr_use_tucker", "lokr_weight_decompose"):
            if not is_off(settings.get(each)):
                out.refuse(each, "LoKr factorizes its larger factor only, without a core or a magnitude")
    elif normalize_name(value) != "lora" and not is_off(settings.get("lora_decompose")):
        out.refuse("lora_decompose", f"{for_message(value)} has no weight decomposition here")


def _schedule(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    kinds = {key: ours for key, ours in SCHEDULES.items() if key != "cosinewithrestarts"}
    choice("lr_scheduler", kinds)(out, name, value, settings)


def _skip(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    """Counted from the layer the model was trained with, which is the last only where there is one encoder."""
    if is_off(value):
        out.unset.append(name)
    elif out.family == "sd":
        out.put(name, "clip_skip", int(parse_number(value)) + 1)
    else:
        out.refuse(name, f"{for_message(value)}: this model uses a fixed layer")


def _weight(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    kind = normalize_name(value)
    if kind == "constant" or (out.family in FLOW and kind != "sigma"):
        out.note(name, "is always the case here")
    elif kind == "minsnrgamma":
        out.put(name, "min_snr_gamma", parse_number(settings.get("loss_weight_strength") or 5))
    elif kind == "debiasedestimation" and "debiased_estimation" in Settings.model_fields:
        out.put(name, "debiased_estimation", True)
    else:
        out.refuse(name, f"{for_message(value)} is not supported")


def _precision_of(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    _precision(out, name, "float32" if normalize_name(value) == "tfloat32" else value, settings)


def _betas(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    pair = (
        parse_number(settings.get("optimizer.beta1") or 0.9),
        parse_number(settings.get("optimizer.beta2") or 0.999),
    )
    out.put(name, "betas", pair)


def _argument(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    """Options that only some optimizers have."""
    key = name.rpartition(".")[2]
    ours = our_optimizer(settings.get("optimizer.optimizer")) or ""
    if key in _OPTIONS.get(ours, ()) and not _infinite(value):
        out.fields["optimizer_args"] = {**out.fields.get("optimizer_args", {}), key: parse_scalar(value)}
        out.mapping[name] = "optimizer_args"
    else:
        out.note(name, "optimizers use their own defaults here")


_ADAPTIVE = ("d0", "growth_rate", "decouple", "use_bias_correction")
#: options of an optimizer that OneTrainer writes, and that the class used here has too
_OPTIONS: dict[str, tuple[str, ...]] = {
    "prodigy": (*_ADAPTIVE, "d_coef", "safeguard_warmup"), "dadapt_adam": _ADAPTIVE, "dadapt_adan": _ADAPTIVE[:2],
    "dadapt_sgd": (*_ADAPTIVE[:2], "momentum"), "dadapt_adagrad": (*_ADAPTIVE[:2], "momentum"), "dadapt_lion": _ADAPTIVE[:1],
    "torch.optim.SGD": ("momentum", "nesterov", "dampening"), "torch.optim.RMSprop": ("alpha", "momentum", "centered"),
    "torch.optim.Adagrad": ("lr_decay", "initial_accumulator_value"), "torch.optim.Adam": ("amsgrad",),
}  # fmt: skip


def _infinite(value: Any) -> bool:
    return (isinstance(value, float) and value in (float("inf"), float("-inf"))) or str(value).lower() in (
        "inf",
        "infinity",
    )


def _offset(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    if is_off(value) or out.family not in FLOW:
        out.put(name, "noise_offset", parse_number(value))
    else:
        out.refuse(name, f"{for_message(value)}: flow models are trained without a noise offset")


def _loss(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    """mse_strength, mae_strength, huber_strength, log_cosh_strength: one of them counts alone here."""
    parts = {each: parse_number(settings.get(f"{each}_strength") or 0) for each in ("mae", "log_cosh", "huber")}
    parts["mse"] = parse_number(settings.get("mse_strength", 1.0))
    used = [each for each, strength in parts.items() if strength]
    if used == ["mse"] and parts["mse"] == 1:
        out.unset.append(name)
    elif used == ["mae"] and parts["mae"] == 1 and "loss" in Settings.model_fields:
        out.fields["loss"] = "l1"
        out.mapping[name] = "loss"
    elif parts[name.removesuffix("_strength")] or name == "mse_strength":
        out.refuse(name, f"{for_message(value)}: losses are not mixed")


ONE_TRAINER: Final = SettingsDialect(
    plain={
        "base_model_name": "model", "lora_alpha": "alpha", "lora_model_name": "start_from", "epochs": "epochs",
        "batch_size": "batch_size", "gradient_accumulation_steps": "gradient_accumulation",
        "learning_rate_warmup_steps": "warmup", "clip_grad_norm": "max_grad_norm", "tensorboard": "tensorboard",
        "image_caching": "cache_latents", "dropout_probability": "hidden_dropout", "masked_training": "masked_loss",
        "train_device": "device", "optimizer.weight_decay": "weight_decay", "optimizer.eps": "epsilon",
    },
    readers={
        "lora_rank": used_if("rank", lambda g: normalize_name(g.get("peft_type", "lora")) != "lokr", "lokr_dim is used"),
        "lokr_dim": used_if("rank", lambda g: normalize_name(g.get("peft_type")) == "lokr", NO_PART),
        "lokr_decompose_factor": used_if("lokr_factor", lambda g: normalize_name(g.get("peft_type")) == "lokr", NO_PART),
        "peft_type": _network, "learning_rate": rate, "train_dtype": _precision_of, "output_dtype": save_dtype,
        "output_model_destination": destination, "optimizer.optimizer": optimizer, "optimizer.beta1": _betas,
        "optimizer.beta2": _betas, "optimizer.*": _argument, "learning_rate_scheduler": _schedule,
        "learning_rate_cycles": cosine_cycles("learning_rate_scheduler"), "offset_noise_weight": _offset,
        "ema": lambda out, name, value, settings: out.put(
            name, "ema_decay", 0.0 if normalize_name(value) == "off" else parse_number(settings.get("ema_decay") or 0.999)),
        "loss_weight_fn": _weight, "save_every": every("save_every", "save_every_epochs"),
        "sample_after": every("sample_every", "sample_every_epochs"),
        "unet.*": part, "transformer.*": part, "text_encoder.*": part, "text_encoder_?.*": part, "vae.*": part, "prior.*": part,
        "text_encoder_layer_skip": _skip, "text_encoder_2_layer_skip": _skip, "text_encoder_3_layer_skip": _skip,
        "force_v_prediction": lambda out, name, value, settings: (
            out.put(name, "objective", "v_prediction") if parse_bool(value) else out.unset.append(name)),
        "force_epsilon_prediction": lambda out, name, value, settings: (
            out.put(name, "objective", "epsilon") if parse_bool(value) else out.unset.append(name)),
        "gradient_checkpointing": lambda out, name, value, settings: out.put(
            name, "gradient_checkpointing", "off" if normalize_name(value) in ("off", "false") else "full"),
        "mse_strength": _loss, "mae_strength": _loss, "huber_strength": _loss, "log_cosh_strength": _loss,
    },
    harmless={
        **dict.fromkeys(["__version", "debug_*", "workspace_dir", "cache_dir", "tensorboard_*", "validate_after*", "only_cache",
                         "prevent_overwrites", "include_train_config", "continue_last_backup", "backup_*", "rolling_backup*",
                         "save_skip_first", "sample_skip_first", "sample_*_format", "samples_to_tensorboard", "cloud.*", "cloud",
                         "non_ema_sampling", "sample_definition_file_name", "samples.*", "samples", "sample_after_unit",
                         "save_every_unit", "secrets*", "output_model_format", "extra_model_name", "frames",
                         "clear_cache_before_training", "wandb*", "samples_*"], "does not affect training"),
        **dict.fromkeys(["save_filename_prefix", "bundle_additional_embeddings"], METADATA),
        **dict.fromkeys(["caching_threads", "train_data_loader*", "temp_device", "attention_mechanism", "*async*", "compile",
                         "enable_autocast_cache", "prefetch_next_batch", "fused_gradient_reduce", "gradient_reduce*", "text_caching",
                         "device_indexes", "latent_caching_epochs", "optimizer_defaults*", "enable_activation_offloading"], SPEED),
        **dict.fromkeys(["model_type", "training_method", "fallback_train_dtype", "text_encoder*_sequence_length"], OWN_FILE),
        **dict.fromkeys(["weight_dtype", "*_weight_dtype", "ema_decay", "ema_update_step_interval", "loss_weight_strength",
                         "lora_decompose*", "concept_file_name", "unmasked_*", "timestep_distribution", "noising_*",
                         "timestep_shift", "dynamic_timestep_shifting", "layer_filter*", "resolution", "lokr_*", "oft_*", "dora_oft",
                         "aspect_ratio_bucketing", "quantization.*", "huber_delta", "vb_loss_strength", "min_noising_strength",
                         "max_noising_strength"], ELSEWHERE),
        **dict.fromkeys(["unconditional_transformer.*", "effnet_encoder.*", "decoder.*", "decoder_text_encoder.*",
                         "decoder_vqgan.*", "text_encoder_4*", "embedding.*", "embedding_*", "embeddings.*", "token_count",
                         "initial_embedding_text", "preserve_embedding_norm", "prior_*", "decoder_*", "effnet_*",
                         "circular_mask_generation", "random_rotate_and_crop", "train_unet_*", "embeddings"], NO_PART),
        "tensorboard_expose": LOGS,
    },
    missing={
        "multi_gpu": "use --gpus", "layer_offload_fraction": MEMORY, "validation": "set validation_split, the fraction held out",
        "*_layer_skip": "this model uses a fixed layer", "*sequence_length": OWN_FILE,
    },
    refused={
        **dict.fromkeys(["loss_scaler", "learning_rate_scaler", "custom_learning_rate_scheduler"],
                        "losses and learning rates are used as they are"),
        "learning_rate_min_factor": "schedulers end at zero",
        "scheduler_params*": "schedulers are constant, cosine and linear",
        **dict.fromkeys(["perturbation_noise_weight", "generalized_offset_noise", "cep_gamma", "k_noise_sampling"], "noise is sampled without it"),
        **dict.fromkeys(["rescale_noise_scheduler_to_zero_terminal_snr", "force_circular_padding"],
                        "the model's own schedule and layers are used"),
        **dict.fromkeys(["normalize_masked_area_loss", "masked_prior_preservation_weight"], "the loss counts where masks are white"),
        "additional_embeddings*": "embeddings are not trained", "custom_conditioning_image": "there are no conditioning images",
    },
    neutral={"k_noise_sampling": (1,), "loss_scaler": ("NONE",), "learning_rate_scaler": ("NONE",), "*sequence_length": (77, 512)},
)  # fmt: skip
