"""The last steps of an import: settings that the file leaves open, overrides, refusals and known differences."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from pathlib import Path
from typing import Any

from inweave.checked import for_message
from inweave.errors import ConfigError
from inweave.files.paths import exists
from inweave.training.config.fields import setting_facts
from inweave.training.config.schema import TrainConfig
from inweave.training.config.translate import Translation
from inweave.training.config.values import is_off
from inweave.training.importers.datasets import folders_in, is_absolute, with_folder
from inweave.training.importers.defaults import defaults
from inweave.training.importers.shell_script import UNSET_VARIABLE

#: groups whose settings an import writes in full
_WRITTEN = ("Adapter", "Optimization", "Images", "Captions", "Loss")
#: settings of these that have no neutral value, or are chosen by the run
_LEFT_OPEN = frozenset({"steps", "epochs", "resolution", "seed", "start_from", "caption", "caption_variants"})

#: the names of the base model and of the images in files that do not work without them
_MODELS = ("pretrained_model_name_or_path", "dit", "model_name_or_path")
_FOLDERS = ("train_data_dir", "dataset_config", "in_json")

#: tokens of a caption that every other trainer has CLIP read, unless a file says otherwise
_CHUNK = 75


def with_tables(out: Translation, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the overrides; a folder that replaces the file's keeps its resolutions, repeats and captions."""
    folder, tables = overrides.get("dataset"), out.fields.get("dataset")
    is_folder = isinstance(folder, str) and Path(folder).suffix not in (".toml", ".json", ".jsonl", ".txt")
    if is_folder and folder != "inweave/pixel" and isinstance(tables, Mapping):
        if (same := with_folder(tables, str(folder))) is not None:
            return {**overrides, "dataset": same}
        out.note("dataset", "the file has several folders, whose own settings are left out")
    if "dataset" not in overrides and isinstance(tables, Mapping) and "" in folders_in(tables):
        out.fields.pop("dataset")  # some of its images are not in a folder
    return overrides


def foreign_paths(fields: Mapping[str, Any]) -> list[str]:
    """Return a line for every absolute path that does not exist on this machine, and what to pass instead."""
    dataset = fields.get("dataset")
    folders = sorted(folders_in(dataset)) if isinstance(dataset, Mapping) else [dataset]
    lines = []
    for name, path, what in (
        *(("dataset", folder, "folder") for folder in folders), ("model", fields.get("model"), "model"),
        *((f"parts.{part}", path, "file") for part, path in (fields.get("parts") or {}).items()),
        ("start_from", fields.get("start_from"), "file"),
    ):  # fmt: skip
        if isinstance(path, str) and is_absolute(path) and not exists(path):
            option = f"--set {name}=..." if name == "start_from" else f"--{name}"
            how = f"change it in the file, or name another with {option}" if "." not in name else "change it there"
            lines.append(f"{name}: {for_message(path)}: there is no such {what} on this machine; {how}")
    return lines


def unset_variables(settings: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: {for_message(value)} has a variable that the file does not set; put its value in"
        for name, value in settings.items()
        if isinstance(value, str) and UNSET_VARIABLE.search(value)
    ]


def differences(kind: str, settings: Mapping[str, Any], out: Translation) -> list[str]:
    """Return lines about what differs here although every setting is the same."""
    lines = []
    own_rule = out.fields.get("bucket_rule", "inweave") == "inweave" and out.fields.get("buckets", True)
    if kind != "inweave" and own_rule:
        lines.append(
            "buckets: their sizes are chosen by inweave's own rule, so that an image may be cropped to a slightly "
            "different one"
        )
    if out.fields.get("wildcards") is False and is_off(settings.get("keep_tokens_separator")):
        lines.append("captions: ||| ends the tags that stay in place, as with kohya's keep_tokens_separator")
    return lines


def refuse(out: Translation, overrides: Mapping[str, Any], implied: Mapping[str, str]) -> None:
    """Raise one reason: settings, or defaults of the trainer (``implied``), that cannot be trained here."""
    refused = {name: why for name, why in out.refused.items() if out.replaceable.get(name) not in overrides}
    if refused:
        default = {name: f" ({tool}'s default, which the file does not set)" for name, tool in implied.items()}
        listed = "; ".join(f"{name}: {why}{default.get(name, '')}" for name, why in list(refused.items())[:20])
        removable = [name for name in refused if name not in out.replaceable][:20]
        others = dict.fromkeys(out.replaceable[name] for name in refused if name in out.replaceable)
        ways = [f"--set {name}=... to choose another" for name in others]
        ways += [f"--without {','.join(removable)} to import the rest"] if removable else []
        raise ConfigError(f"cannot be trained here unchanged: {listed} ({'; '.join(ways)})")


def base_model(out: Translation, settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Set the model of a preset, which names none, to the one its family is known for."""
    if out.fields.get("model") or "model" in overrides:
        return {}
    empty = [name for name in _MODELS if settings.get(name) == ""]
    if empty and not any(settings.get(name) for name in _FOLDERS):
        why = "is empty, and so is the folder of images: this is a template; name them with --model and --dataset"
        raise ConfigError(f"{empty[0]}: {why}")
    family = "sd2" if out.family == "sd" and not is_off(settings.get("v2")) else out.family
    out.fields["model"] = defaults("models", "values")[family]
    return {"model": out.fields["model"]}


def settle(out: Translation, overrides: Mapping[str, Any]) -> None:
    """Set everything that neither the file nor its trainer's defaults decide to the value that changes nothing."""
    fields = out.fields
    open_fields = set(_LEFT_OPEN)
    if fields.get("start_from"):
        open_fields |= {"targets", "conv_rank", "conv_alpha"}
    if fields.get("optimizer") not in ("adamw", "adamw8bit", "prodigy", "schedulefree"):
        open_fields |= {"betas", "epsilon"} - fields.keys()
    if "max_token_length" not in overrides:
        fields.setdefault("max_token_length", _CHUNK)
    for name, info in TrainConfig.model_fields.items():
        if setting_facts(name)["group"] in _WRITTEN and name not in {*open_fields, *overrides}:
            fields.setdefault(name, info.get_default(call_default_factory=True))
    side, step = fields.get("resolution"), fields.get("bucket_step", 64)
    sides = [each for each in (side if isinstance(side, list | tuple) else [side]) if isinstance(each, int)]
    if fields.get("buckets") is False and sides and isinstance(step, int) and gcd(*sides, step) >= 8:
        fields["bucket_step"] = gcd(*sides, step)  # the other trainers crop images to the resolution itself
    if fields.get("network") != "lokr":
        fields["lokr_factor"] = -1
    if fields.get("network") == "lora":
        fields.pop("conv_rank", None)
        fields.pop("conv_alpha", None)
