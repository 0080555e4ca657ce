"""The files of kohya's scripts: TOML, with or without sections, and command lines, with the file that they name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from inweave.checked import for_message
from inweave.errors import ConfigError, InweaveError
from inweave.training.config.toml import flatten_sections, read_text_file
from inweave.training.config.translate import Translation
from inweave.training.importers.files import parse_text
from inweave.training.importers.kohya.files import OWN, prepare_kohya, translate_kohya
from inweave.training.importers.kohya.settings import KOHYA
from inweave.training.importers.source import Importer, Source

_NAMES: Final = {*(name for name, row in KOHYA.items() if row.kind == "read"), "script", "model_train_type"} - OWN


def sections(table: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return (settings, problems of those that are set twice): sections only group, and kohya takes the last value."""
    fields: dict[str, Any] = {}
    twice: list[str] = []
    for name, value in table.items():
        inside, _ = flatten_sections({name: value}, keep=("parts", "optimizer_args", "dataset"))
        for key, each in inside.items():
            if key in fields and fields[key] != each:
                values = f"{for_message(fields[key])} and, in [{name}], {for_message(each)}"
                twice.append(f"{key}: is set twice, to {values}")
            fields[key] = each
    return fields, twice


def _recognize(table: Mapping[str, Any]) -> dict[str, Any] | None:
    fields, _ = sections(table)
    return fields if _NAMES & fields.keys() else None


def _prepare(source: Source) -> Translation:
    source.notes.extend(f"{each}; the last one counts" for each in sections(source.table)[1])
    settings = source.settings
    return prepare_kohya(source, _with_file(source) if isinstance(settings.get("config_file"), str) else settings)


def _with_file(source: Source) -> dict[str, Any]:
    """Return the settings of a command and of the file that it names; the command's override it."""
    name = str(source.settings["config_file"])
    for place in (source.path.parent / name, source.path.parent / Path(name).name):
        try:
            inner, _ = sections(parse_text(read_text_file(place), place))
        except (InweaveError, ValueError, OSError):
            continue
        return {**inner, **{key: value for key, value in source.settings.items() if key != "config_file"}}
    raise ConfigError(f"config_file: {for_message(name)} is not next to this file; import that file instead")


IMPORTER = Importer("kohya", _recognize, _prepare, translate_kohya)
