"""Rows of the tables that `translate` reads: `row.to("rank")`, `row.ignored(row.SPEED)`, `row.refused("why", 1.0)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from inweave.checked import for_message
from inweave.training.config.translate import Reader, SettingRow, Translation
from inweave.training.config.values import is_off, normalize_name, parse_bool

SPEED: Final = "only affects speed or memory, which are handled automatically"
MEMORY: Final = "set vram, a memory limit, instead; the base model keeps its precision"
OWN_FILE: Final = "is read from the model's own files"
UPLOAD: Final = "nothing is uploaded"
METADATA: Final = "is not written into the adapter"
ALWAYS: Final = "is always the case here"
NO_EFFECT: Final = "does not affect training"
ELSEWHERE: Final = "is covered by the settings around it"
NO_PART: Final = "is not used by this run"
LOGS: Final = "logs are written into output"
SAMPLES: Final = "samples use the model's own settings"
UNSUPPORTED: Final = "is not supported"

Condition = Callable[[Translation], bool]


def each(row: SettingRow, names: str) -> dict[str, SettingRow]:
    """Return the same row for every name in a text."""
    return dict.fromkeys(names.split(), row)


def renamed(names: Mapping[str, str]) -> dict[str, SettingRow]:
    """Return rows for settings that differ from ours by name only."""
    return {theirs: to(ours) for theirs, ours in names.items()}


def ignored(why: str) -> SettingRow:
    """Return the row of a setting that does not change what is trained."""
    return SettingRow("ignored", why)


def refused(why: str, *neutral: Any) -> SettingRow:
    """Return the row of a setting that cannot be expressed here, except at its ``neutral`` values."""
    return SettingRow("refused", why, neutral=neutral)


def different(why: str, *neutral: Any) -> SettingRow:
    """Return the row of a setting that is done in another way here."""
    return SettingRow("different", why, neutral=neutral)


def custom(reader: Reader, ours: str = "") -> SettingRow:
    """Return the row of a setting that a function translates."""
    return SettingRow("read", ours=ours, reader=reader)


def to(
    ours: str,
    parse: Callable[[Any], Any] | None = None,
    *,
    when: Condition | None = None,
    otherwise: str = "",
    off: bool = False,
) -> SettingRow:
    """Return the row of one of our settings.

    Unless ``when`` holds, the setting is noted as ``otherwise``; with ``off``, zero asks for nothing.
    """

    def read(out: Translation, name: str, value: Any) -> None:
        if off and is_off(value):
            out.unset.append(name)
        elif when is not None and not when(out):
            out.note(name, otherwise)
        else:
            out.put(name, ours, value if parse is None else parse(value))

    return custom(read, ours)


def choice(ours: str, table: Mapping[str, Any]) -> SettingRow:
    """Return the row of a setting with a list of values by name; others are refused."""

    def read(out: Translation, name: str, value: Any) -> None:
        if normalize_name(value) in table:
            out.put(name, ours, table[normalize_name(value)])
        else:
            known = ", ".join(dict.fromkeys(table.values()))
            out.refuse(name, f"{for_message(value)} is not supported, only {known}", ours)

    return custom(read, ours)


def switch(ours: str, on: Any = True, off: Any = False) -> SettingRow:
    """Return the row of a setting that is on or off."""
    return to(ours, lambda value: on if parse_bool(value) else off)


def only(ours: str, value: Any = True) -> SettingRow:
    """Return the row of a switch that means something when it is on."""

    def read(out: Translation, name: str, switch: Any) -> None:
        out.put(name, ours, value) if parse_bool(switch) else out.unset.append(name)

    return custom(read, ours)


def mapped(ours: str) -> SettingRow:
    """Return the row of a setting that is read later, together with others."""
    return custom(lambda out, name, value: out.mapping.update({name: ours}))
