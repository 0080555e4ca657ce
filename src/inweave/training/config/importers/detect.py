"""A rival's training file as one of ours: kohya's TOML, OneTrainer's JSON, ai-toolkit's YAML.

    file ──text──► JSON | TOML | YAML ──► leaves: {"network.linear": 16, ...} ──tables──► TrainConfig

Which tool wrote it is told by what is in it. Every leaf is taken, noted as harmless, or listed as having no equivalent;
nothing vanishes. Where their tool does something else than ours when a file is silent (an alpha of 1, say), their
default is written down too, so that the run stays the one that was meant.

Secrets such a file may hold are neither read nor shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from inweave.errors import ConfigError, FormatError, InweaveError
from inweave.training.config.importers import ai_toolkit, kohya, onetrainer
from inweave.training.config.importers.translate import Dialect, translate
from inweave.training.config.schema import TrainConfig
from inweave.training.config.toml import at_most, flatten_sections, for_message, parse_toml, read_text_file

MAX_LEAVES = 20_000
MAX_YAML = 2**16  # bytes; real ones have a few thousand, and the parser is slow
MAX_BRACKETS = 64  # open at once; the parser takes the square of their number


@dataclass(frozen=True, slots=True)
class Imported:
    """``taken``: their setting -> ours; ``no_equivalent``: "setting: why"; ``notes``: all that was not needed."""

    config: TrainConfig
    taken: dict[str, str]
    no_equivalent: list[str]
    notes: list[str]
    kind: str = ""


def import_config(path: str | Path, **fields: Any) -> Imported:
    """The rival's file at ``path``; ``fields`` of ours replace what it says (or lacks, such as ``dataset``)."""
    table = _parsed(read_text_file(path), Path(path))
    try:
        kind, given = _recognised(table)
        if kind == "OneTrainer":
            given = _with_concepts(given, Path(path))
        dialect, implied = _DIALECTS[kind]
        silent = {name: value for name, value in implied(given).items() if given.get(name) is None}
        own = frozenset(TrainConfig.model_fields) if kind in ("kohya", "inweave") else frozenset()
        empty = [name for name in given if name in own and given[name] in (None, "")]
        said = translate(
            {name: value for name, value in {**given, **silent}.items() if name not in empty}, dialect, own
        )
        said.fields.update(fields)
        said.no_equivalent += [
            f"{name[:200]}: is not known here" for name in said.unknown if given.get(name) not in _OFF
        ]
        said.unset += empty + [name for name in said.unknown if given.get(name) in _OFF]
        lost, said.no_equivalent, said.unknown = said.no_equivalent, [], []
        config = TrainConfig.from_translation(said)
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in at_most(error.problems)]) from None
    except RecursionError:
        raise FormatError(f"{path}: is nested too deeply") from None
    notes = [
        *said.notes,
        *(f"{name}: not in the file; {kind}'s default, {for_message(v)}, is used" for name, v in silent.items()),
    ]
    notes += [f"{name}: is off, empty or as it is here" for name in said.unset]
    return Imported(config, {name: ours for name, ours in said.taken.items() if name not in silent}, lost, notes, kind)


# --- files ---------------------------------------------------------------------------------------------------------

_OFF: tuple[Any, ...] = (None, "", 0, [], {})


def _parsed(text: str, path: Path) -> dict[str, Any]:
    """By what it looks like: JSON starts with a brace, TOML has `name = value`, the rest may be YAML."""
    table: Any
    if text.lstrip()[:1] == "{":
        try:
            table = json.loads(text, parse_constant=lambda name: name)
        except RecursionError:
            raise FormatError(f"{path}: is nested too deeply") from None
        except ValueError as error:
            raise ConfigError(f"{path}: is no JSON: {error}") from None
    elif re.search(r"^\s*[\w\"'.-]+\s*=", text, re.MULTILINE) and path.suffix not in (".yaml", ".yml"):
        table = parse_toml(text, str(path))
    else:
        table = _yaml(text, path)
    if not isinstance(table, dict) or not table:
        raise ConfigError(f"{path}: holds no settings")
    return table


def _yaml(text: str, path: Path) -> Any:
    if len(text) > MAX_YAML:
        raise FormatError(f"{path}: is larger than {MAX_YAML} bytes, which no configuration in YAML is")
    depth = 0
    for letter in re.findall(r"[\[\]{}]", text):
        depth += 1 if letter in "[{" else -1
        if depth > MAX_BRACKETS:
            raise FormatError(f"{path}: is nested too deeply")
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(f"{path}: reading YAML needs PyYAML: pip install pyyaml") from None
    try:
        return yaml.safe_load(text)
    except RecursionError:
        raise FormatError(f"{path}: is nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError, ArithmeticError, AttributeError, LookupError) as error:
        said = " ".join(str(error).split())[:300]
        raise ConfigError(f"{path}: is neither TOML, JSON nor YAML: {said}") from None


def _leaves(table: Mapping[str, Any]) -> dict[str, Any]:
    """{"a": {"b": [{"c": 1}]}} as {"a.b.0.c": 1}; lists of plain values are leaves. Bounded, since YAML may repeat itself."""
    found: dict[str, Any] = {}
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
            found[name] = value
            continue
        todo += [(f"{name}.{key}" if name else key, each) for key, each in reversed(inside)]
    return found


def _recognised(table: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(whose file it is, its leaves)."""
    config = table.get("config")
    if isinstance(config, Mapping) and isinstance(config.get("process"), list):
        found = _leaves(table)
        return "ai-toolkit", {name.removeprefix("config.process.0."): value for name, value in found.items()}
    if "training_method" in table or ("model_type" in table and ("base_model_name" in table or "lora_rank" in table)):
        return "OneTrainer", _leaves(table)
    if isinstance(table.get("datasets"), list) and not table.keys() - {"general", "datasets"}:
        raise ConfigError("is a dataset, not a training run; give it as dataset")
    fields, problems = flatten_sections(table, keep=("parts", "optimizer_args"))
    if problems:
        raise ConfigError(problems)
    if {*kohya.KOHYA.plain, *kohya.KOHYA.readers} & fields.keys() - TrainConfig.model_fields.keys():
        return "kohya", fields
    if TrainConfig.model_fields.keys() & fields.keys():
        return "inweave", fields
    raise ConfigError("is of no trainer known here; those of kohya, OneTrainer and ai-toolkit are")


def _with_concepts(given: dict[str, Any], path: Path) -> dict[str, Any]:
    """OneTrainer keeps its folders in a file of their own, named from the folder it runs in."""
    named = given.get("concept_file_name")
    if any(name.startswith("concepts.") for name in given) or not isinstance(named, str) or not named or "\0" in named:
        return given
    for folder in (path.parent, path.parent.parent, Path()):
        try:
            listed = json.loads(read_text_file(folder / named))
        except (InweaveError, ValueError, OSError, RecursionError):
            continue
        return {**given, **_leaves({"concepts": listed})}
    return given


_DIALECTS: Final[dict[str, tuple[Dialect, Callable[[Mapping[str, Any]], dict[str, Any]]]]] = {
    "kohya": (kohya.KOHYA, kohya.implied),
    "inweave": (kohya.KOHYA, lambda given: {}),
    "OneTrainer": (onetrainer.ONE_TRAINER, onetrainer.implied),
    "ai-toolkit": (ai_toolkit.AI_TOOLKIT, ai_toolkit.implied),
}
