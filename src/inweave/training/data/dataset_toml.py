"""Tables of a dataset file, checked against the fields of a dataclass.

    [general] < [[datasets]] < [[datasets.subsets]]      an inner table overrides the outer ones

A field made with `toml_field` has a name in TOML, a kind of values, and the tables it may appear in. `parse_table`
applies one table to an instance and collects every problem, with its place in the file.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import field, fields, replace
from typing import Any, NamedTuple, TypeVar

from inweave.checked import for_message

T = TypeVar("T")
_TABLES = {"g": "[general]", "d": "[[datasets]]", "s": "[[datasets.subsets]]"}


class ValueKind(NamedTuple):
    expected: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


def normalize_extension(extension: str) -> str:
    """Return an extension with its dot: txt and .txt are the same."""
    return "." + extension.strip().removeprefix(".")


def _integer(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


def _is_size(value: Any) -> bool:
    sides = value if isinstance(value, list) and len(value) == 2 else [value]
    return all(map(_integer(1), sides))


KINDS = {
    "flag": ValueKind("true or false", lambda value: isinstance(value, bool)),
    "inverted": ValueKind("true or false", lambda value: isinstance(value, bool), lambda value: not value),
    "positive": ValueKind("a whole number of 1 or more", _integer(1)),
    "natural": ValueKind("a whole number of 0 or more", _integer(0)),
    "fraction": ValueKind("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1),
    "text": ValueKind("text", lambda value: isinstance(value, str)),
    "separator": ValueKind("text of one character or more", lambda value: isinstance(value, str) and value != ""),
    "extension": ValueKind(
        'a file extension such as ".txt"', lambda v: isinstance(v, str), lambda v: (normalize_extension(v),)
    ),
    "size": ValueKind(
        "a side or [width, height] in pixels", _is_size, lambda v: (v, v) if isinstance(v, int) else tuple(v)
    ),
}  # fmt: skip


#: kohya's settings that are not supported -> the values that change nothing
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "color_aug": (False,), "face_crop_aug_range": (None, "", 0), "token_warmup_min": (0, 1), "token_warmup_step": (0,),
    "secondary_separator": ("",), "caption_dropout_every_n_epochs": (0,), "validation_split": (0,),
    "network_multiplier": (1,), "custom_attributes": ({},), "skip_image_resolution": ("", 0), "metadata_file": ("",),
    "conditioning_data_dir": ("",), "in_json": ("",),
}  # fmt: skip
#: kohya's settings that do not affect training
_HARMLESS = frozenset({"cache_info", "validation_seed", "resize_interpolation", "debug_dataset", "num_workers"})


def toml_field(name: str, default: Any, kind: str, tables: str = "gds") -> Any:
    """Return a dataclass field that a dataset file may set, in the ``tables`` of these initials."""
    return field(default=default, metadata={"name": name, "kind": KINDS[kind], "tables": tables})


def parse_table(
    table: Any, level: str, where: str, base: T, problems: list[str], other_keys: tuple[str, ...] = ()
) -> T:
    """Return ``base`` with the values of a table; skips ``other_keys``, and appends to ``problems``."""
    if not isinstance(table, dict):
        problems.append(f"{where}: expected a table of settings, got {for_message(table)}")
        return base
    known = {each.metadata["name"]: each for each in fields(base)}  # type: ignore[arg-type]
    allowed = [name for name, each in known.items() if level in each.metadata["tables"]] + list(other_keys)
    values = {}
    for name, value in table.items():
        if name in other_keys:
            continue
        if name in _HARMLESS or (name in _UNSUPPORTED and value in _UNSUPPORTED[name]):
            continue
        if name in _UNSUPPORTED:
            problems.append(f"{where}.{name}: {for_message(value)} is not supported; remove it")
            continue
        if name not in known:
            near = difflib.get_close_matches(name[:100], allowed, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(allowed)}"
            problems.append(f"{where}.{name[:100]}: there is no such setting; {hint}")
            continue
        kind, tables = known[name].metadata["kind"], known[name].metadata["tables"]
        if level not in tables:
            problems.append(f"{where}.{name}: belongs in {' or '.join(_TABLES[each] for each in tables)}")
        elif not kind.accepts(value):
            problems.append(f"{where}.{name}: expected {kind.expected}, got {for_message(value)}")
        else:
            values[known[name].name] = kind.convert(value)
    return replace(base, **values)  # type: ignore[type-var]


def iter_tables(
    data: dict[str, Any], name: str, prefix: str, problems: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place in the file, table) for a list of tables."""
    tables = data.get(name)
    if not isinstance(tables, list) or not tables or not all(isinstance(each, dict) for each in tables):
        problems.append(
            f"{prefix}{name}: expected [[{'datasets.' if prefix else ''}{name}]] tables, got {for_message(tables)}"
        )
        return
    yield from ((f"{prefix}{name}[{number}]", each) for number, each in enumerate(tables))
