"""Imports the training file of another trainer: kohya's TOML and command lines, kohya_ss's JSON, OneTrainer's JSON,
ai-toolkit's YAML, SimpleTuner's JSON, command lines of diffusers' scripts.

    file ──text──► table ──the tool that wrote it──► settings + its defaults ──tables──► fields ──settle──► TrainConfig

The tool is recognized by its contents. Every setting is translated, noted as harmless, reported as done in another way
here, or refused by name; nothing is lost silently. Where a file leaves out a setting, the tool's own default is written
down, and every other setting at our neutral value, so that no preset of ours changes the run.

Secrets in such a file are neither read nor printed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from typing import Any

from inweave.checked import for_message
from inweave.errors import ConfigError, FormatError, InweaveError
from inweave.training.config.fields import setting_facts
from inweave.training.config.schema import TrainConfig
from inweave.training.config.toml import MAX_FILE, at_most, flatten_sections, parse_json, parse_toml, read_text_file
from inweave.training.importers.ai_toolkit import settings as ai_toolkit
from inweave.training.importers.datasets import with_folder
from inweave.training.importers.defaults import defaults
from inweave.training.importers.diffusers import settings as diffusers
from inweave.training.importers.files import leaves_of, parse_text
from inweave.training.importers.kohya import files as kohya_import
from inweave.training.importers.kohya import gui as kohya_gui
from inweave.training.importers.kohya import settings as kohya
from inweave.training.importers.kohya.flow import MUSUBI
from inweave.training.importers.musubi.datasets import is_musubi_dataset, musubi_tables
from inweave.training.importers.onetrainer import settings as onetrainer
from inweave.training.importers.shell import COMMANDS
from inweave.training.importers.shell_script import UNSET_VARIABLE
from inweave.training.importers.simpletuner import settings as simpletuner
from inweave.training.importers.translate import Translation, translate
from inweave.training.importers.values import OFF, is_off, with_setting_name

#: groups whose settings an import writes in full
_WRITTEN = ("Adapter", "Optimization", "Images", "Captions", "Loss")
#: settings of these that have no neutral value, or are chosen by the run
_LEFT_OPEN = frozenset({"steps", "epochs", "resolution", "seed", "start_from", "caption", "caption_variants"})

#: tokens of a caption that every other trainer has CLIP read, unless a file says otherwise
_CHUNK = 75


@dataclass(frozen=True, slots=True)
class Imported:
    """``mapping``: their setting -> ours; ``defaults``: those of the tool that were written; ``no_equivalent``: "setting:
    why", done in another way here or unknown; ``notes``: what has no effect."""

    config: TrainConfig
    mapping: dict[str, str]
    no_equivalent: list[str]
    notes: list[str]
    kind: str = ""
    defaults: dict[str, Any] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)  # settings that are off or empty

    def report(self) -> list[str]:
        """What became of the file, in lines."""
        quiet = {*(f"{name}:" for name in self.defaults), *(f"{name}:" for name in self.unset)}
        lines = [f"{self.kind}: {len(self.mapping)} settings were translated"]
        lines += [f"no equivalent: {line}" for line in self.no_equivalent]
        if self.defaults:
            values = ", ".join(f"{name} = {for_message(value)}" for name, value in self.defaults.items())
            lines.append(f"not in the file, written at {self.kind}'s defaults: {values}")
        lines += [f"note: {line}" for line in self.notes if not any(line.startswith(each) for each in quiet)]
        return lines + ([f"off or empty: {', '.join(self.unset)}"] if self.unset else [])


def import_config(path: str | Path, *, without: Collection[str] = (), **overrides: Any) -> Imported:
    """The file at ``path``; ``overrides`` are settings of ours that replace what it sets, or lacks (such as ``dataset``).

    ``without``: settings of the file to leave out, which would have it refused.
    """
    table = parse_text(read_text_file(path), Path(path))
    return import_table(table, Path(path), without=without, **overrides)


def import_text(text: str, name: str, *, without: Collection[str] = (), **overrides: Any) -> Imported:
    """A text that is in no file, such as a command line; ``name`` stands for it in messages."""
    if len(text) > MAX_FILE or "\0" in text:
        raise FormatError(f"{name}: is not a configuration: {len(text)} letters")
    return import_table(parse_text(text, Path(name)), Path(name), without=without, **overrides)


def import_table(table: dict[str, Any], path: Path, *, without: Collection[str] = (), **overrides: Any) -> Imported:
    """A table that was read from ``path``."""
    try:
        commands = table.get(COMMANDS)
        kind, settings = _recognize({name: value for name, value in table.items() if name != COMMANDS})
        out = Translation(exact=True, without=frozenset(without))
        if commands:
            out.notes.append(f"{commands} training commands: the longest is imported, the first where they are equal")
        if kind == "kohya":
            out.notes += [f"{each}; the last one counts" for each in _sections(table)[1]]
        try:
            implied = _translate(kind, settings, path, out)
        except (ValueError, TypeError, OverflowError, ArithmeticError, AttributeError) as error:
            raise ConfigError([*out.problems, with_setting_name(str(error), settings)]) from None
        if "script" in settings:
            out.notes += _unset_variables(settings)
        out.notes += _differences(kind, settings, out)
        unknown = [name for name in out.unknown if settings.get(name) not in OFF]
        out.unset += [name for name in out.unknown if settings.get(name) in OFF]
        out.no_equivalent += [f"{name[:200]}: is not known here" for name in unknown]
        no_equivalent, out.no_equivalent, out.unknown = out.no_equivalent, [], []
        if kind != "inweave":
            implied |= _base_model(out, settings, overrides)
            _settle(out, overrides)
        replaced = {*overrides, *({"steps", "epochs"} if {"steps", "epochs"} & overrides.keys() else ())}
        overrides = _with_tables(out, overrides)
        out.fields = {name: value for name, value in out.fields.items() if name not in replaced} | overrides
        _refuse(out, overrides, dict.fromkeys(implied, kind))
        config = TrainConfig.from_translation(out)
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in at_most([*map(str, error.problems)])]) from None
    except RecursionError:
        raise FormatError(f"{path}: is nested too deeply") from None
    notes = [
        *dict.fromkeys(out.notes),
        *(f"{name}: not in the file; {kind}'s default, {for_message(v)}, is used" for name, v in implied.items()),
        *(f"{name}: is off, empty or the same here" for name in dict.fromkeys(out.unset)),
    ]
    mapping = {name: ours for name, ours in out.mapping.items() if name not in implied}
    unset = [name for name in dict.fromkeys(out.unset) if name not in mapping]
    return Imported(config, mapping, list(dict.fromkeys(no_equivalent)), notes, kind, implied, unset)


def _with_tables(out: Translation, overrides: dict[str, Any]) -> dict[str, Any]:
    """A folder that stands in for the one of a file keeps what the file says of it: resolutions, repeats, captions."""
    folder, tables = overrides.get("dataset"), out.fields.get("dataset")
    is_folder = isinstance(folder, str) and Path(folder).suffix not in (".toml", ".json", ".jsonl", ".txt")
    if is_folder and folder != "inweave/pixel" and isinstance(tables, Mapping):
        if (same := with_folder(tables, str(folder))) is not None:
            return {**overrides, "dataset": same}
        out.note("dataset", "the file has several folders, whose own settings are left out")
    return overrides


def _unset_variables(settings: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: {for_message(value)} has a variable that the file does not set; put its value in"
        for name, value in settings.items()
        if isinstance(value, str) and UNSET_VARIABLE.search(value)
    ]


def _differences(kind: str, settings: Mapping[str, Any], out: Translation) -> list[str]:
    """What is done in another way here although every setting is the same."""
    lines = []
    if kind in ("OneTrainer", "ai-toolkit") or out.family in MUSUBI:
        lines.append(
            "buckets: their sizes are chosen by inweave's own rule, so that an image may be cropped to a slightly different one"
        )
    if kind in ("kohya", "kohya_ss") and is_off(settings.get("enable_wildcard")):
        lines.append(
            "captions: {a|b} is a random choice and ||| ends the tags that stay in place, as kohya does when it is asked to"
        )
    return lines


def _translate(kind: str, settings: dict[str, Any], path: Path, out: Translation) -> dict[str, Any]:
    own = frozenset(TrainConfig.model_fields)
    if kind == "OneTrainer":
        return onetrainer.import_onetrainer(_with_concepts(settings, path), out)
    if kind == "ai-toolkit":
        return ai_toolkit.import_toolkit(settings, out)
    if kind == "diffusers":
        return diffusers.import_diffusers(settings, out)
    if kind == "SimpleTuner":
        return simpletuner.import_simpletuner(settings, out, lambda name: _file_beside(name, path))
    if kind == "inweave":
        out.exact = False
        translate({name: value for name, value in settings.items() if value not in (None, "")}, kohya.KOHYA, own, out)
        return {}
    implied: dict[str, Any] = {}
    if kind == "kohya_ss":
        settings, implied = kohya_gui.from_gui(settings, out)
    elif isinstance(settings.get("config_file"), str):
        settings = _with_config_file(settings, path)
    implied = {**kohya_import.import_kohya(settings, out, own), **implied}
    dataset = settings.get("dataset_config")
    table = _file_beside(dataset, path, parse_toml) if out.family in MUSUBI and isinstance(dataset, str) else None
    if isinstance(table, Mapping) and is_musubi_dataset(table):
        out.fields["dataset"] = musubi_tables(table, out)
    return implied


def _refuse(out: Translation, overrides: Mapping[str, Any], implied: Mapping[str, str]) -> None:
    """One reason: what the file asks for, or its trainer does by default (``implied``), and cannot be trained here."""
    refused = {name: why for name, why in out.refused.items() if out.replaceable.get(name) not in overrides}
    out.refused = {}
    if refused:
        default = {name: f" ({tool}'s default, which the file does not set)" for name, tool in implied.items()}
        listed = "; ".join(f"{name}: {why}{default.get(name, '')}" for name, why in list(refused.items())[:20])
        removable = [name for name in refused if name not in out.replaceable][:20]
        others = dict.fromkeys(out.replaceable[name] for name in refused if name in out.replaceable)
        ways = [f"--set {name}=... to choose another" for name in others]
        ways += [f"--without {','.join(removable)} to import the rest"] if removable else []
        raise ConfigError(f"cannot be trained here as it is: {listed} ({'; '.join(ways)})")


def _base_model(out: Translation, settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The model of a preset, which names none: the one its family is known for."""
    if out.fields.get("model") or "model" in overrides:
        return {}
    family = "sd2" if out.family == "sd" and not is_off(settings.get("v2")) else out.family
    out.fields["model"] = defaults("models", "values")[family]
    return {"model": out.fields["model"]}


def _settle(out: Translation, overrides: Mapping[str, Any]) -> None:
    """Every setting that neither the file nor its tool's defaults decide, at the value that changes nothing."""
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
    if fields.get("buckets") is False and isinstance(side, int) and isinstance(step, int) and gcd(side, step) >= 8:
        fields["bucket_step"] = gcd(side, step)  # images are cropped to the resolution itself there
    if fields.get("network") != "lokr":
        fields["lokr_factor"] = -1
    if fields.get("network") == "lora":
        fields.pop("conv_rank", None)
        fields.pop("conv_alpha", None)


# --- recognition ---------------------------------------------------------------------------------------------------


def _recognize(table: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(the tool that wrote the file, its settings)."""
    config = table.get("config")
    if isinstance(config, Mapping) and isinstance(config.get("process"), list):
        leaves = leaves_of(table)
        return "ai-toolkit", {name.removeprefix("config.process.0."): value for name, value in leaves.items()}
    concepts = table.get("concepts")
    has_folders = isinstance(concepts, list) and any(isinstance(each, Mapping) and "path" in each for each in concepts)
    if (
        "training_method" in table
        or has_folders
        or ("model_type" in table and ("base_model_name" in table or "lora_rank" in table))
    ):
        if not {"model_family", "--model_family"} & table.keys():
            return "OneTrainer", leaves_of(table)
    if diffusers.is_diffusers_script(table.get("script")):
        return "diffusers", dict(table)
    if kohya_gui.is_gui(table):
        return "kohya_ss", dict(table)
    plain = {name.lstrip("-") for name in table}
    if "model_family" in plain or ({"model_type", "data_backend_config"} <= plain):
        return "SimpleTuner", dict(table)
    if isinstance(table.get("datasets"), list) and not table.keys() - {"general", "datasets"}:
        raise ConfigError("is a dataset, not a training run; set `dataset` to it")
    for marks, what in _OTHER_FILES:
        if marks & table.keys():
            raise ConfigError(
                f"is {what}; files of kohya, kohya_ss, OneTrainer, ai-toolkit and SimpleTuner can be imported"
            )
    fields, twice = _sections(table)
    if {
        *kohya.KOHYA.plain,
        *kohya.KOHYA.readers,
        "script",
        "model_train_type",
    } & fields.keys() - TrainConfig.model_fields.keys():
        return "kohya", fields
    if TrainConfig.model_fields.keys() & fields.keys():
        if twice:
            raise ConfigError(twice)
        return "inweave", fields
    raise ConfigError(
        "is not recognized; files of kohya, kohya_ss, OneTrainer, ai-toolkit and SimpleTuner can be imported"
    )


_OTHER_FILES = (
    ({"plugin_unet", "plugin_TE", "_base_", "tokenizer_pt"}, "a configuration of HCP-Diffusion"),
    ({"enable_conv", "unet_target_module", "unet_target_name", "text_encoder_target_module"}, "a preset of LyCORIS"),
    ({"micro_batch_size_per_gpu", "pipeline_stages"}, "a configuration of diffusion-pipe"),
    ({"peft_type", "target_modules", "base_model_name_or_path"}, "the description of a PEFT adapter"),
)


def _sections(table: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(settings, those that are set twice): sections only group, and kohya takes the last of two values."""
    fields: dict[str, Any] = {}
    twice: list[str] = []
    for name, value in table.items():
        inside, _ = flatten_sections({name: value}, keep=("parts", "optimizer_args", "dataset"))
        for key, each in inside.items():
            if key in fields and fields[key] != each:
                twice.append(
                    f"{key}: is set twice, to {for_message(fields[key])} and, in [{name}], {for_message(each)}"
                )
            fields[key] = each
    return fields, twice


# --- files that a file names -----------------------------------------------------------------------------------------


def _file_beside(name: str, path: Path, parse: Callable[[str, str], Any] = parse_json) -> Any:
    """What is in a file that the configuration names, next to it or below the folder it runs in; None without one."""
    if not name or "\0" in name or Path(name).is_absolute():
        return None
    for folder in (path.parent, path.parent.parent, Path()):
        for place in (folder / name, folder / Path(name).name):
            try:
                file, root = place.resolve(), folder.resolve()
                if file.is_relative_to(root):
                    return parse(read_text_file(file), name)
            except (InweaveError, ValueError, OSError, RuntimeError):
                continue
    return None


def _with_concepts(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    """OneTrainer keeps its folders in a file of their own, relative to the folder it runs in; no other file is read."""
    name = settings.get("concept_file_name")
    if any(key.startswith("concepts.") for key in settings) or not isinstance(name, str) or not name or "\0" in name:
        return settings
    for folder in (path.parent, path.parent.parent, Path()):
        try:
            file, root = (folder / name).resolve(), folder.resolve()
            if Path(name).is_absolute() or not file.is_relative_to(root):
                continue
            concepts = parse_json(read_text_file(file), name)
        except (InweaveError, ValueError, OSError, RuntimeError):
            continue
        return {**settings, **leaves_of({"concepts": concepts})}
    return settings


def _with_config_file(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    """A command that takes its settings from a file: those of the command override them."""
    name = str(settings["config_file"])
    for place in (path.parent / name, path.parent / Path(name).name):
        try:
            inner, _ = _sections(parse_text(read_text_file(place), place))
        except (InweaveError, ValueError, OSError):
            continue
        return {**inner, **{key: value for key, value in settings.items() if key != "config_file"}}
    raise ConfigError(f"config_file: {for_message(name)} is not next to this file; import that file instead")
