"""An import of kohya's settings: the run of its scripts, with every setting written down.

    settings ──off and ignored ones removed──► + its defaults ──KOHYA's table──► + times, objective, dataset, samples

The script decides the family: networks.lora on a UNet with or without `sdxl`, networks.lora_flux, networks.lora_sd3, or
the name of the script itself. Its scripts for transformers ignore what shapes the noise and the loss of a UNet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from inweave.checked import for_message
from inweave.training.config.network_args import NetworkArgs
from inweave.training.config.schema import TrainConfig
from inweave.training.config.translate import Translation, translate
from inweave.training.config.values import is_off, normalize_name, parse_bool, parse_number, parse_pairs
from inweave.training.importers.defaults import defaults
from inweave.training.importers.kohya.datasets import kohya_dataset
from inweave.training.importers.kohya.family import ensure_adapter, ensure_network_script, kohya_family, network_args
from inweave.training.importers.kohya.flow import MUSUBI, ignored_settings, read_times, refuse_musubi_arguments
from inweave.training.importers.kohya.network import import_network
from inweave.training.importers.kohya.settings import KOHYA
from inweave.training.importers.models import ensure_plain_base
from inweave.training.importers.musubi.datasets import edits
from inweave.training.importers.optimizers import with_library_defaults
from inweave.training.importers.readers import refuse_hidden_dropout
from inweave.training.importers.source import Source
from inweave.training.importers.targets import FLOW

_CACHED_TEXT = ("cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk")
OWN = frozenset(TrainConfig.model_fields) - {"compile"}  # a switch of theirs, which only affects speed


def prepare_kohya(source: Source, settings: Mapping[str, Any], implied: Mapping[str, Any] | None = None) -> Translation:
    """Return the translation of a script's settings; ``implied``: defaults that are among them already."""
    entries = {name: value for name, value in settings.items() if value is not None and value != ""}
    source.unset.extend(name for name in settings if name not in entries)
    ensure_network_script(entries)
    ensure_adapter(entries)
    family = kohya_family(entries)
    for name in ("pretrained_model_name_or_path", "dit"):
        ensure_plain_base(entries.get(name, ""), name, editing=family == "qwen_image" and bool(edits(entries)))
    _remove_ignored(entries, family, source)
    own = _implied(entries, family)
    complete = {**entries, **own}
    _keep_one_schedule(complete, source)
    written = {name: value for name, value in own.items() if name not in source.without}
    return source.start(family, complete, {**written, **(implied or {})})


def translate_kohya(out: Translation, source: Source) -> None:
    """Set the fields from KOHYA's table, and from settings that belong together."""
    if out.family in MUSUBI:
        refuse_musubi_arguments(out)
    dataset, used = kohya_dataset(out, source)
    translate(out, KOHYA, OWN, used)
    if out.family == "flux2" and out.is_on("model_version"):  # tensors do not tell klein from klein base
        out.put("model_version", "variant", f"flux2-{out.get('model_version')}")
    if out.family == "qwen_image" and (version := edits(out.settings)):
        out.put("model_version" if out.is_on("model_version") else "edit_plus", "variant", f"qwen-image-{version}")
    import_network(out)
    if dataset is not None:
        out.fields["dataset"] = dataset
    read_times(out)
    out.fields |= {"epoch_steps": "whole", "mask_average": "image"}
    out.fields["bucket_rule"] = "musubi" if out.family in MUSUBI else "kohya"
    if out.fields.get("buckets") is False and not out.get("dataset_config"):
        out.fields["upscale"] = True  # bucket_no_upscale is for buckets
    if "objective" not in out.fields:
        out.fields["objective"] = "flow" if out.family in FLOW else "epsilon"
    _put_relative_steps(out)
    with_library_defaults(out, out.get("optimizer_type"))
    _put_logs(out)
    _put_samples(out)
    refuse_hidden_dropout(out, "network_dropout")


def _remove_ignored(entries: dict[str, Any], family: str, source: Source) -> None:
    if "caption_extention" in entries:  # an older spelling, which counts where both are set
        entries["caption_extension"] = entries.pop("caption_extention")
        source.note("caption_extention", "is called caption_extension today")
    for name in [each for each in entries if each in ignored_settings(family)]:
        source.note(name, "is ignored for this model")
        del entries[name]
    for name, optimizer in (("use_8bit_adam", "AdamW8bit"), ("use_lion_optimizer", "Lion")):
        if not is_off(entries.get(name)) and "optimizer_type" not in entries:
            entries["optimizer_type"] = optimizer
            del entries[name]
    for name in ("use_8bit_adam", "use_lion_optimizer"):
        if name in entries:
            source.note(name, "optimizer_type is used")
            del entries[name]
    module, arguments = entries.get("network_module"), network_args(entries)
    if "dropout" in arguments and NetworkArgs(module if isinstance(module, str) else "", arguments).is_lycoris:
        entries.pop("network_dropout", None)  # that of network_args counts
    if family in MUSUBI:
        entries["network_train_unet_only"] = True  # it has no other
    caches = [name for name in _CACHED_TEXT if not is_off(entries.get(name))]
    if caches and is_off(entries.get("network_train_unet_only")):
        rates = entries.get("text_encoder_lr", 1)
        if family not in FLOW:
            entries["network_train_unet_only"] = True  # its scripts demand it
        elif any(map(parse_number, rates if isinstance(rates, list | tuple) else [rates])):
            for name in caches:  # the scripts cache T5's outputs, and train CLIP
                source.note(name, "captions are encoded in every step, because CLIP is trained")
                del entries[name]


def _implied(entries: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return kohya's defaults of settings that a file leaves out."""

    def is_on(name: str) -> bool:
        return not is_off(entries.get(name))

    sections = ("flow", *(("musubi",) if family in MUSUBI else ()), family) if family in FLOW else (family,)
    values = defaults("kohya", "values", *sections)
    if family in MUSUBI:
        for name in ignored_settings(family) - {"save_precision"}:
            values.pop(name, None)
    if is_on("full_bf16") or is_on("full_fp16"):
        values["save_precision"] = "bf16" if is_on("full_bf16") else "fp16"  # the precision of the trained weights
    rate = entries.get("learning_rate") or entries.get("lr") or values["learning_rate"]
    lasts = any(map(is_on, ("max_train_epochs", "epochs", "max_train_steps", "steps")))
    untrained = is_on("network_train_unet_only") or entries.get("text_encoder_lr") is not None
    conditional: dict[str, Any] = {
        "learning_rate": None if entries.get("unet_lr") or entries.get("lr") else rate,
        "text_encoder_lr": None if untrained else rate,
        "max_train_steps": None if lasts else values["max_train_steps"],
        "network_dropout": None if "dropout" in network_args(entries) else values["network_dropout"],
    }
    if normalize_name(entries.get("loss_type")) in ("huber", "smoothl1"):
        values |= defaults("kohya", "huber")
    if is_on("bucket_no_upscale") and not is_on("max_bucket_reso"):
        conditional["max_bucket_reso"] = None  # images are not limited then
    return {
        name: value
        for name, value in (values | conditional).items()
        if value is not None
        and entries.get(name) in (None, "")
        and (name not in KOHYA or (KOHYA[name].ours or name) not in entries)
    }


def _keep_one_schedule(settings: dict[str, Any], source: Source) -> None:
    """Remove settings that others override: steps by epochs, the warmup of a constant rate, samples by steps."""
    for name in ("max_train_epochs", "max_train_steps"):
        if name in settings and is_off(settings[name]):
            source.unset.append(name)
            del settings[name]
    if normalize_name(settings.get("lr_scheduler")) == "constant" and not is_off(settings.get("lr_warmup_steps")):
        source.note("lr_warmup_steps", "lr_scheduler = constant has no warmup; constant_with_warmup has")
        settings["lr_warmup_steps"] = 0
    if not is_off(settings.get("sample_every_n_epochs")) and not is_off(settings.get("sample_every_n_steps")):
        source.note("sample_every_n_steps", "sample_every_n_epochs is used")
        settings["sample_every_n_steps"] = 0


def _put_relative_steps(out: Translation) -> None:
    """Set the rates of Adafactor with relative_step, which is its default: min(0.01, 1 / sqrt(step)), as torch's is."""
    if out.word("optimizer_type") != "adafactor":
        return
    arguments = parse_pairs(out.get("optimizer_args") or [])
    warms_up = parse_bool(arguments.get("warmup_init", "false"))
    if not parse_bool(arguments.get("relative_step", "true")) and not warms_up:
        return
    for name in ("relative_step", *(("warmup_init",) if not warms_up else ())):
        out.refused.pop(f"optimizer_args.{name}", None)
    if out.word("lr_scheduler") == "adafactor":
        out.refused.pop("lr_scheduler", None)
        out.mapping["lr_scheduler"] = "lr_scheduler"
    for name in ("text_encoder_learning_rate", "lr_scheduler_args"):
        out.fields.pop(name, None)
    rules = [{**rule, "learning_rate": None} for rule in out.fields.get("rules", ())]
    out.fields["rules"] = [rule for rule in rules if any(rule.get(name) for name in ("rank", "alpha", "skip"))]
    out.fields |= {"learning_rate": 0.01, "lr_scheduler": "constant", "warmup": 0}
    out.note("learning_rate", "Adafactor with relative_step=True chooses its own learning rate")


def _put_logs(out: Translation) -> None:
    """Set the checkpoints to keep, all unless the file limits them, and the trackers of the run."""
    every, last = out.get("save_every_n_epochs"), out.get("save_last_n_epochs")
    if not is_off(every) and not is_off(last):
        out.no_equivalent[:] = [line for line in out.no_equivalent if not line.startswith("save_last_n_epochs:")]
        out.fields["keep_last"] = max(1, -(-int(parse_number(last)) // int(parse_number(every))))
        out.mapping["save_last_n_epochs"] = "keep_last"
    if out.fields.get("wandb"):
        project = out.get("log_tracker_name")
        out.fields.setdefault("wandb_project", str(project or "network_train"))  # the scripts' own name
        if project:
            out.mapping["log_tracker_name"] = "wandb_project"
    if "logging_dir" in out.settings and "tensorboard" not in out.fields and not out.is_on("log_with"):
        out.fields["tensorboard"] = True
        out.mapping["logging_dir"] = "tensorboard"


_PROMPT_FLAGS = re.compile(r"\s--(?!(?:n|w|h|d|l|s|ss)\s)([a-z]+)(\s+(?!--)\S+)*", re.IGNORECASE)


def _put_samples(out: Translation) -> None:
    """Set the prompts, one per line unless they are a file; without any there are no samples."""
    prompts = out.fields.get("sample_prompts")
    if isinstance(prompts, str):
        lines = [line.strip() for line in prompts.splitlines()]
        prompts = [line for line in lines if line and not line.startswith("#")]
    cleaned = []
    for prompt in prompts or ():
        text = _PROMPT_FLAGS.sub("", str(prompt))
        if text != prompt:
            out.note("sample_prompts", f"{for_message(prompt)}: only --n --w --h --d --l --s and --ss are used")
        cleaned += [text] if text.strip() else []
    out.fields["sample_prompts"] = cleaned
    if not cleaned:
        for name in ("sample_every", "sample_every_epochs"):
            if out.fields.pop(name, 0):
                out.note("sample_prompts", "has no prompts, so no samples are generated")
