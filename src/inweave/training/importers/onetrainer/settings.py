"""OneTrainer's settings, by their place in its JSON ("transformer.train").

Its files describe every component of every model it knows; those that the model type at hand does not have are noted as
harmless. Its presets only store what differs from its defaults, and older files have names that it renames itself
(`_migrated`). training_method decides whether an adapter is trained at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PureWindowsPath
from typing import Any, Final

from inweave.checked import for_message
from inweave.training.config import row
from inweave.training.config.aliases import (
    SCHEDULES,
    cosine_cycles,
    precision,
    put_torch_scheduler,
    save_dtype,
    scheduler_arguments,
)
from inweave.training.config.optimizer_names import our_optimizer
from inweave.training.config.translate import SettingRow, Translation, translate
from inweave.training.config.values import is_off, normalize_name, parse_bool, parse_int, parse_number, parse_scalar
from inweave.training.importers.datasets import is_absolute
from inweave.training.importers.defaults import defaults, setting_rows
from inweave.training.importers.files import leaves_of
from inweave.training.importers.models import ONE_TRAINER as FAMILIES
from inweave.training.importers.models import ensure_plain_base, ensure_trainable, refuse_method
from inweave.training.importers.onetrainer.concepts import destination, put_concepts
from inweave.training.importers.onetrainer.parts import every, networks_of, part_rows, put_limits, put_times, rate
from inweave.training.importers.optimizers import optimizer, put_betas, with_library_defaults
from inweave.training.importers.readers import (
    drop_unused_samples,
    entries_by_index,
    implied_by,
    refuse_hidden_dropout,
    substring_patterns,
)
from inweave.training.importers.samples import sample_line
from inweave.training.importers.source import Importer, Source
from inweave.training.importers.targets import FLOW, everything, filtered

_SAMPLE = {
    "width": "width", "height": "height", "seed": "seed", "cfg_scale": "guidance", "diffusion_steps": "steps",
}  # fmt: skip
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
#: layers of a preset, for files that do not list them; by family
_LAYERS = {
    "sd": {"attn-mlp": "attentions", "attn-only": "attn"}, "sdxl": {"attn-mlp": "attentions", "attn-only": "attn"},
    "qwen_image": {"attn-mlp": "attn,img_mlp,txt_mlp", "attn-only": "attn", "blocks": "transformer_block"},
    "z_image": {"attn-mlp": "attention,feed_forward", "attn-only": "attention", "blocks": "layers"},
    "flux2": {"blocks": "transformer_block"},
    "": {"attn-mlp": "attn,ff.net", "attn-only": "attn", "blocks": "transformer_block"},
}  # fmt: skip


def _recognize(table: Mapping[str, Any]) -> dict[str, Any] | None:
    concepts = table.get("concepts")
    has_folders = isinstance(concepts, list) and any(isinstance(each, Mapping) and "path" in each for each in concepts)
    has_model = "model_type" in table and ("base_model_name" in table or "lora_rank" in table)
    known = "training_method" in table or has_folders or has_model
    return leaves_of(table) if known and not {"model_family", "--model_family"} & table.keys() else None


def _below(name: str) -> str:
    """Return where a file of OneTrainer's is looked for: under its path, or next to the configuration."""
    return PureWindowsPath(name).name if is_absolute(name) else name


def _with_concepts(source: Source) -> dict[str, Any]:
    """Return the settings with the folders, which OneTrainer keeps in a file of their own."""
    settings, name = source.settings, source.settings.get("concept_file_name")
    if not isinstance(name, str) or any(key.startswith("concepts.") for key in settings):
        return settings
    concepts = source.read_file(_below(name), anywhere=False)
    return settings if concepts is None else {**settings, **leaves_of({"concepts": concepts})}


def _report_missing_concepts(out: Translation) -> None:
    name = out.get("concept_file_name")
    if name and not any(key.startswith("concepts.") for key in out.settings):
        why = "is not next to the configuration; put it there, or name a folder with --dataset"
        out.unsupported("concept_file_name", f"{for_message(name)} {why}")
        out.mapping["concept_file_name"] = "dataset"


def _prepare(source: Source) -> Translation:
    values = defaults("onetrainer", "values")
    entries = _migrated(_with_concepts(source), source)
    method = str(entries.get("training_method") or values["training_method"])
    if method != "LORA":
        raise refuse_method("training_method", f"{method}: {_METHODS.get(method, 'trains no adapter')}")
    kind = entries.get("model_type") or values["model_type"]
    family = ensure_trainable(FAMILIES.get(str(kind)), kind, "model_type")
    ensure_plain_base(entries.get("base_model_name", ""), "base_model_name")
    implied = {name: value for name, value in values.items() if name not in entries}
    implied |= implied_by(entries, {name: value for name, value in values.items() if name != "clip_grad_norm"})
    implied |= _part_defaults(entries, family)
    name = str(entries.get("optimizer.optimizer") or values["optimizer.optimizer"])
    own = {f"optimizer.{key}": value for key, value in defaults("onetrainer", f"optimizers.{name}").items()}
    implied |= implied_by(entries, own)
    return source.start(family, {**entries, **implied}, implied)


def _migrated(settings: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Return the settings under the names of today, which count before older ones."""
    entries = {name: value for name, value in settings.items() if name not in _RENAMED}
    for name, value in settings.items():
        if name in _RENAMED and not (name == "optimizer" and isinstance(value, Mapping)):
            entries.setdefault(_RENAMED[name], value)
            source.note(name, f"is called {_RENAMED[name]} today")
    for old, new in (("train_text_encoder_epochs", "text_encoder"), ("train_text_encoder_2_epochs", "text_encoder_2")):
        if old in entries:
            source.note(old, f"is called {new}.stop_training_after today")
            entries.setdefault(f"{new}.stop_training_after", entries.pop(old))
            entries.setdefault(f"{new}.stop_training_after_unit", "EPOCH")
    if not is_off(strength := entries.pop("min_snr_gamma", None)):
        entries |= {"loss_weight_fn": "MIN_SNR_GAMMA", "loss_weight_strength": strength}
        source.note("min_snr_gamma", "is called loss_weight_strength today")
    if entries.get("prior.train") is not None and "transformer.train" not in entries and "model_type" in entries:
        if FAMILIES.get(str(entries["model_type"])) in FLOW:
            moved = {f"transformer.{key[6:]}": value for key, value in entries.items() if key.startswith("prior.")}
            if any(value is True for key, value in moved.items() if key.endswith(".train")):
                entries |= moved
    return entries


def _part_defaults(entries: Mapping[str, Any], family: str) -> dict[str, Any]:
    denoiser, encoders = networks_of(family)
    trained = {f"{each}.train": True for each in (denoiser, *encoders)}
    limits = defaults("onetrainer", "encoder")
    return implied_by(entries, trained) | implied_by(
        entries, {f"{each}.{key}": value for each in encoders for key, value in limits.items()}
    )


def _translate(out: Translation, source: Source) -> None:
    fields = out.fields
    concepts = {name for name in out.settings if name.startswith("concepts.")}
    translate(out, {**part_rows(out.family), **ONE_TRAINER}, skip=concepts)
    put_concepts(out)
    _report_missing_concepts(out)
    _put_targets(out)
    _put_scheduler(out)
    put_times(out)
    put_limits(out)
    if "lokr" in str(fields.get("network")) and out.is_on("lokr_full_matrix"):
        fields["rank"] = 2**20  # more than any factor has: both stay whole
    if out.get("clip_grad_norm", 1.0) is None:
        fields["max_grad_norm"] = 0.0
    if fields.get("optimizer") == "adafactor":
        fields["optimizer_args"] = {"scale_parameter": parse_bool(out.get("optimizer.scale_parameter") or False)}
        if parse_bool(out.get("optimizer.relative_step") or False):
            out.refuse("optimizer.relative_step", "Adafactor would choose its own learning rate")
    if fields.get("ema_decay"):
        out.unsupported("ema_update_step_interval", "the average is updated in every step")
    if fields.get("masked_loss"):
        out.unsupported("unmasked_weight", "the loss counts where masks are white, and nowhere else")
    _put_samples(out, source)
    drop_unused_samples(out)
    fields |= {"upscale": True, "drop_incomplete": True}  # small images are enlarged
    refuse_hidden_dropout(out, "dropout_probability")
    _divide_micro_steps(out)
    with_library_defaults(out, out.get("optimizer.optimizer"))


def _divide_micro_steps(out: Translation) -> None:
    """Divide intervals: its steps are batches, however many make one step of the optimizer."""
    fields = out.fields
    count = parse_int(fields.get("gradient_accumulation") or 1)
    if fields.get("optimizer") == "schedulefree":
        fields |= {"warmup": 0, "lr_scheduler": "constant"}
        out.note(
            "learning_rate_warmup_steps", "in OneTrainer schedule-free optimizers have a constant rate and no warmup"
        )
    if count <= 1:
        return
    if parse_number(fields.get("warmup") or 0) > 1:
        fields["warmup"] = int(parse_number(fields["warmup"]) / count)
        out.note("learning_rate_warmup_steps", f"OneTrainer counts batches: divided by {count}")
    theirs = {"sample_every": "sample_after", "text_encoder_stop": "text_encoder.stop_training_after"}
    for ours in ("save_every", "sample_every", "text_encoder_stop"):
        name, value = theirs.get(ours, ours), parse_number(fields.get(ours) or 0)
        if value > 1 and value % count:
            why = "OneTrainer counts batches, and this is not a multiple of gradient_accumulation_steps"
            out.refuse(name, f"{value:g}: {why}")
        elif value > 1:
            fields[ours] = int(value // count)
            out.note(name, f"OneTrainer counts batches: divided by {count}")


def _put_samples(out: Translation, source: Source) -> None:
    """Set the prompts, which are in the file or in one of their own."""
    samples: list[Mapping[str, Any]] = [*entries_by_index(out.settings, "samples").values()]
    name = out.get("sample_definition_file_name")
    if (
        not samples
        and isinstance(name, str)
        and isinstance(listed := source.read_file(_below(name), anywhere=False), list)
    ):
        samples = [each for each in listed if isinstance(each, Mapping)]
    lines = []
    for sample in samples:
        if parse_bool(sample.get("enabled", True)) and sample.get("prompt"):
            flags = {ours: sample.get(theirs) for theirs, ours in _SAMPLE.items()}
            flags["seed"] = None if parse_bool(sample.get("random_seed") or False) else flags["seed"]
            lines.append(sample_line(out, sample["prompt"], sample.get("negative_prompt"), **flags))
    if lines:
        out.fields["sample_prompts"] = lines
        out.mapping["samples" if any(n.startswith("samples.") for n in out.settings) else str(name)] = "sample_prompts"


def _put_scheduler(out: Translation) -> None:
    """Set a class of torch with its arguments; those between percent signs are lengths that only the run knows."""
    theirs, fields = "custom_learning_rate_scheduler", out.fields
    if out.word("learning_rate_scheduler") != "custom":
        return
    pairs = {
        str(each.get("key")): each.get("value") for each in entries_by_index(out.settings, "scheduler_params").values()
    }
    known = {"%LR%": out.get("learning_rate"), "%EPOCHS%": out.get("epochs")}
    arguments = scheduler_arguments({key: known.get(str(value), value) for key, value in pairs.items()})
    if not put_torch_scheduler(out, theirs, out.get(theirs)):
        out.refuse_value(theirs, "is not a scheduler of torch.optim.lr_scheduler that can be used here", "lr_scheduler")
    elif unknown := [each for each in arguments.values() if str(each).startswith("%")]:
        why = "only the run knows it; set lr_scheduler_args with a number"
        out.refuse("scheduler_params", f"{for_message(unknown[0])}: {why}", "lr_scheduler_args")
    else:
        fields["lr_scheduler_args"] = arguments
    fields["lr_min_ratio"] = 0.0


def _put_targets(out: Translation) -> None:
    """Set the modules from layer_filter, substrings or expressions; text encoders are adapted whole."""
    listed = [each.strip() for each in str(out.get("layer_filter") or "").split(",") if each.strip()]
    preset = str(out.get("layer_filter_preset") or "full")
    if not listed and preset not in ("full", "custom"):
        table = _LAYERS.get(out.family, _LAYERS[""])
        listed = table[preset].split(",") if preset in table else []
        if not listed:
            out.refuse("layer_filter_preset", f"{for_message(preset)}: its layers are not listed in the file")
    patterns = substring_patterns(listed)
    if parse_bool(out.get("layer_filter_regex") or False):
        patterns = [each if each.startswith("^") else f".*({each}).*" for each in listed]
    trained = bool(out.fields.get("train_text_encoders"))
    out.fields["targets"] = filtered(patterns, trained) if patterns else everything()
    out.mapping["layer_filter"] = "targets"


def _network(out: Translation, name: str, value: Any) -> None:
    plain = "dora" if parse_bool(out.get("lora_decompose") or False) else "lora"
    row.choice("network", {"lora": plain, "loha": "loha", "lokr": "lokr"}).read(out, name, value)
    if normalize_name(value) == "lokr":
        if out.is_on("lokr_weight_decompose"):
            out.refuse("lokr_weight_decompose", "LoKr has no magnitude here")
        if out.is_on("lokr_decompose_both") and out.is_on("lokr_full_matrix"):
            out.refuse("lokr_decompose_both", "with lokr_full_matrix, LoKr has a rank of its smaller factor only")
        elif out.is_on("lokr_decompose_both"):
            out.put("lokr_decompose_both", "lokr_decompose_both", True)
        if out.is_on("lokr_use_tucker"):
            out.put("lokr_use_tucker", "tucker", True)
    elif normalize_name(value) != "lora" and out.is_on("lora_decompose"):
        out.refuse("lora_decompose", f"{for_message(value)} has no weight decomposition here")


def _is_lokr(out: Translation) -> bool:
    return out.word("peft_type") == "lokr"


def _layer_skip(out: Translation, name: str, value: Any) -> None:
    """Set the layer, counted from the one the model was trained with: the last, if there is one encoder."""
    if is_off(value):
        out.unset.append(name)
    elif out.family == "sd":
        out.put(name, "clip_skip", int(parse_number(value)) + 1)
    else:
        out.refuse(name, f"{for_message(value)}: this model uses a fixed layer")


def _loss_weight(out: Translation, name: str, value: Any) -> None:
    kind = normalize_name(value)
    if kind == "constant" or (out.family in FLOW and kind != "sigma"):
        out.note(name, row.ALWAYS)
    elif kind == "minsnrgamma":
        out.put(name, "min_snr_gamma", parse_number(out.get("loss_weight_strength") or 5))
    elif kind == "debiasedestimation":
        out.put(name, "debiased_estimation", True)
    else:
        out.refuse(name, f"{for_message(value)} is not supported")


def _precision(out: Translation, name: str, value: Any) -> None:
    precision.read(out, name, "float32" if normalize_name(value) == "tfloat32" else value)


def _betas(out: Translation, name: str, value: Any) -> None:
    put_betas(out, name, out.get("optimizer.beta1"), out.get("optimizer.beta2"))


def _scheduler(out: Translation, name: str, value: Any) -> None:
    """Set the schedule; its cosine with restarts is a wave, and `_put_scheduler` reads its classes."""
    if normalize_name(value) == "custom":
        out.mapping[name] = "lr_scheduler"
    elif normalize_name(value) == "cosinewithrestarts":
        out.refuse(name, f"{for_message(value)} is a wave here, without restarts", "lr_scheduler")
    else:
        row.choice("lr_scheduler", SCHEDULES).read(out, name, value)


def _argument(out: Translation, name: str, value: Any) -> None:
    """Set an option that only some optimizers have."""
    key = name.rpartition(".")[2]
    infinite = str(value).lower() in ("inf", "infinity") or value == float("-inf")
    if key in _OPTIONS.get(our_optimizer(out.get("optimizer.optimizer")) or "", ()) and not infinite:
        out.fields["optimizer_args"] = {**out.fields.get("optimizer_args", {}), key: parse_scalar(value)}
        out.mapping[name] = "optimizer_args"
    else:
        out.note(name, "optimizers use their own defaults here")


_ADAPTIVE = ("d0", "growth_rate", "decouple", "use_bias_correction")
#: options of an optimizer that OneTrainer writes, and that the class used here has too
_OPTIONS: dict[str, tuple[str, ...]] = {
    "prodigy": (*_ADAPTIVE, "d_coef", "safeguard_warmup"), "dadapt_adam": _ADAPTIVE, "dadapt_adan": _ADAPTIVE[:2],
    "dadapt_sgd": (*_ADAPTIVE[:2], "momentum"), "dadapt_adagrad": (*_ADAPTIVE[:2], "momentum"),
    "dadapt_lion": _ADAPTIVE[:1],
    "torch.optim.SGD": ("momentum", "nesterov", "dampening"), "torch.optim.RMSprop": ("alpha", "momentum", "centered"),
    "torch.optim.Adagrad": ("lr_decay", "initial_accumulator_value"), "torch.optim.Adam": ("amsgrad",),
}  # fmt: skip


def _noise_offset(out: Translation, name: str, value: Any) -> None:
    if is_off(value) or out.family not in FLOW:
        out.put(name, "noise_offset", parse_number(value))
    else:
        out.refuse(name, f"{for_message(value)}: flow models are trained without a noise offset")


def _loss(out: Translation, name: str, value: Any) -> None:
    """Set the loss from the strengths of several, of which one alone is used here."""
    parts = {each: parse_number(out.get(f"{each}_strength") or 0) for each in ("mae", "log_cosh", "huber")}
    parts["mse"] = parse_number(out.get("mse_strength", 1.0))
    used = [each for each, strength in parts.items() if strength]
    if used == ["mse"] and parts["mse"] == 1:
        out.unset.append(name)
    elif used == ["mae"] and parts["mae"] == 1:
        out.fields["loss"] = "l1"
        out.mapping[name] = "loss"
    elif parts[name.removesuffix("_strength")] or name == "mse_strength":
        out.refuse(name, f"{for_message(value)}: losses are not mixed")


def _ema(out: Translation, name: str, value: Any) -> None:
    decay = 0.0 if normalize_name(value) == "off" else parse_number(out.get("ema_decay") or 0.999)
    out.put(name, "ema_decay", decay)


ONE_TRAINER: Final[dict[str, SettingRow]] = {
    "lora_rank": row.to("rank", when=lambda out: not _is_lokr(out), otherwise="lokr_dim is used"),
    "lokr_dim": row.to("rank", when=_is_lokr, otherwise=row.NO_PART),
    "lokr_decompose_factor": row.to("lokr_factor", when=_is_lokr, otherwise=row.NO_PART),
    "peft_type": row.custom(_network), "learning_rate": row.custom(rate), "train_dtype": row.custom(_precision),
    "output_dtype": save_dtype, "output_model_destination": row.custom(destination),
    "optimizer.optimizer": row.custom(optimizer), **row.each(row.custom(_betas), "optimizer.beta1 optimizer.beta2"),
    "optimizer.*": row.custom(_argument),
    "learning_rate_scheduler": row.custom(_scheduler),
    "learning_rate_cycles": cosine_cycles("learning_rate_scheduler"), "offset_noise_weight": row.custom(_noise_offset),
    "ema": row.custom(_ema), "loss_weight_fn": row.custom(_loss_weight),
    "save_every": every("save_every", "save_every_epochs"),
    "sample_after": every("sample_every", "sample_every_epochs"),
    **row.each(row.custom(_layer_skip), "text_encoder_layer_skip text_encoder_2_layer_skip text_encoder_3_layer_skip"),
    "force_v_prediction": row.only("objective", "v_prediction"),
    "force_epsilon_prediction": row.only("objective", "epsilon"),
    "gradient_checkpointing": row.to(
        "gradient_checkpointing", lambda value: "off" if normalize_name(value) in ("off", "false") else "full"),
    **row.each(row.custom(_loss), "mse_strength mae_strength huber_strength log_cosh_strength"),
    **setting_rows("onetrainer"),
}  # fmt: skip

IMPORTER = Importer("OneTrainer", _recognize, _prepare, _translate)
