"""Imports the training file of another trainer: kohya's TOML, OneTrainer's JSON, ai-toolkit's YAML.

    file ──text──► JSON | TOML | YAML ──► leaves: {"network.linear": 16, ...} ──tables──► TrainConfig

The tool that wrote it is recognized by its contents. Every leaf is translated, noted as harmless, or listed as having no
equivalent; nothing is lost silently. Where a file leaves out a setting whose default differs between the tools (an alpha
of 1, say), their default is written down too, so that the run stays the same.

Secrets in such a file are neither read nor printed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from inweave.checked import for_message
from inweave.errors import ConfigError, FormatError, InweaveError
from inweave.training.config.importers import ai_toolkit, kohya, onetrainer
from inweave.training.config.importers.translate import SettingsDialect, translate
from inweave.training.config.schema import TrainConfig
from inweave.training.config.toml import at_most, ensure_plain, flatten_sections, parse_json, parse_toml, read_text_file

MAX_LEAVES = 20_000
MAX_YAML = 2**16  # bytes; real ones have a few thousand, and the parser is slow
MAX_BRACKETS = 64  # open at once; the parser takes the square of their number


@dataclass(frozen=True, slots=True)
class Imported:
    """``mapping``: their setting -> ours; ``no_equivalent``: "setting: why"; ``notes``: what was not needed."""

    config: TrainConfig
    mapping: dict[str, str]
    no_equivalent: list[str]
    notes: list[str]
    kind: str = ""


def import_config(path: str | Path, **overrides: Any) -> Imported:
    """The file at ``path``; ``overrides`` are settings of ours that replace what it sets, or lacks (such as ``dataset``)."""
    table = _parse(read_text_file(path), Path(path))
    try:
        kind, settings = _recognize(table)
        if kind == "OneTrainer":
            settings = _with_concepts(settings, Path(path))
        dialect, implied = _DIALECTS[kind]
        defaults = {name: value for name, value in implied(settings).items() if settings.get(name) is None}
        own = frozenset(TrainConfig.model_fields) if kind in ("kohya", "inweave") else frozenset()
        empty = [name for name in settings if name in own and settings[name] in (None, "")]
        translation = translate(
            {name: value for name, value in {**settings, **defaults}.items() if name not in empty}, dialect, own
        )
        translation.fields.update(overrides)
        unknown = translation.unknown
        no_equivalent = translation.no_equivalent + [
            f"{name[:200]}: is not known here" for name in unknown if settings.get(name) not in _OFF
        ]
        unset = translation.unset + empty + [name for name in unknown if settings.get(name) in _OFF]
        translation.no_equivalent, translation.unknown = [], []
        config = TrainConfig.from_translation(translation)
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in at_most(error.problems)]) from None
    except RecursionError:
        raise FormatError(f"{path}: is nested too deeply") from None
    notes = [
        *translation.notes,
        *(f"{name}: not in the file; {kind}'s default, {for_message(v)}, is used" for name, v in defaults.items()),
        *(f"{name}: is off, empty or the same here" for name in unset),
    ]
    mapping = {name: ours for name, ours in translation.mapping.items() if name not in defaults}
    return Imported(config, mapping, no_equivalent, notes, kind)


# --- files ---------------------------------------------------------------------------------------------------------

_OFF: tuple[Any, ...] = (None, "", 0, [], {})


def _parse(text: str, path: Path) -> dict[str, Any]:
    """By its looks: JSON starts with a brace, TOML has `name = value`, the rest may be YAML."""
    table: Any
    if text.lstrip()[:1] == "{":
        table = parse_json(text, str(path))
    elif re.search(r"^\s*[\w\"'.-]+\s*=", text, re.MULTILINE) and path.suffix not in (".yaml", ".yml"):
        table = parse_toml(text, str(path))
    else:
        table = _yaml(text, path)
    if not isinstance(table, dict) or not table:
        raise ConfigError(f"{path}: contains no settings")
    return table


def _yaml(text: str, path: Path) -> Any:
    if len(text) > MAX_YAML:
        raise FormatError(f"{path}: is larger than {MAX_YAML} bytes, too large for a configuration in YAML")
    depth = 0
    for letter in re.findall(r"[\[\]{}]", text):
        depth += 1 if letter in "[{" else -1
        if depth > MAX_BRACKETS:
            raise FormatError(f"{path}: is nested too deeply")
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(f"{path}: reading YAML needs PyYAML: pip install 'inweave[train]'") from None
    from inweave.training.config.importers.yaml_loader import BoundedLoader

    try:
        table = yaml.load(text, BoundedLoader)  # it is a safe one
    except RecursionError:
        raise FormatError(f"{path}: is nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError, ArithmeticError, AttributeError, LookupError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{path}: is neither TOML, JSON nor YAML: {reason}") from None
    ensure_plain(table, str(path))
    return table


def _leaves(table: Mapping[str, Any]) -> dict[str, Any]:
    """{"a": {"b": [{"c": 1}]}} as {"a.b.0.c": 1}; lists of plain values are leaves. Bounded, since YAML may repeat itself."""
    leaves: dict[str, Any] = {}
    todo: list[tuple[str, Any]] = [("", table)]
    seen = 0
    while todo:
        name, value = todo.pop()
        seen += 1
        if seen > MAX_LEAVES or len(name) > 1000:
            raise ConfigError("has too many settings, or too deep ones, for a training run")
        if isinstance(value, Mapping) and value:
            inside = [(key if isinstance(key, str) else for_message(key), each) for key, each in value.items()]
        elif isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
            inside = [(str(index), each) for index, each in enumerate(value)]
        else:
            leaves[name] = value
            continue
        todo += [(f"{name}.{key}" if name else key, each) for key, each in reversed(inside)]
    return leaves


def _recognize(table: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(the tool that wrote the file, its leaves)."""
    config = table.get("config")
    if isinstance(config, Mapping) and isinstance(config.get("process"), list):
        leaves = _leaves(table)
        return "ai-toolkit", {name.removeprefix("config.process.0."): value for name, value in leaves.items()}
    if "training_method" in table or ("model_type" in table and ("base_model_name" in table or "lora_rank" in table)):
        return "OneTrainer", _leaves(table)
    if isinstance(table.get("datasets"), list) and not table.keys() - {"general", "datasets"}:
        raise ConfigError("is a dataset, not a training run; set `dataset` to it")
    fields, problems = flatten_sections(table, keep=("parts", "optimizer_args"))
    if problems:
        raise ConfigError(problems)
    if {*kohya.KOHYA.plain, *kohya.KOHYA.readers} & fields.keys() - TrainConfig.model_fields.keys():
        return "kohya", fields
    if TrainConfig.model_fields.keys() & fields.keys():
        return "inweave", fields
    raise ConfigError("is not recognized; files of kohya, OneTrainer and ai-toolkit can be imported")


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
        return {**settings, **_leaves({"concepts": concepts})}
    return settings


_DIALECTS: Final[dict[str, tuple[SettingsDialect, Callable[[Mapping[str, Any]], dict[str, Any]]]]] = {
    "kohya": (kohya.KOHYA, kohya.implied),
    "inweave": (kohya.KOHYA, lambda settings: {}),
    "OneTrainer": (onetrainer.ONE_TRAINER, onetrainer.implied),
    "ai-toolkit": (ai_toolkit.AI_TOOLKIT, ai_toolkit.implied),
}
