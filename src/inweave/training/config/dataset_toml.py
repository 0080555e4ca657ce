"""Tables of a dataset file, and the settings of a subset that they are checked against.

    [general] < [[datasets]] < [[datasets.subsets]]      an inner table overrides the outer ones

A field made with `toml_field` has a name in TOML, a kind of values, and the tables it may appear in. `read_tables`
applies the tables to a subset and collects every problem, with its place in the file. A setting that is None is open;
the run's own value counts then.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from inweave.checked import for_message

KEEP_SEPARATOR = "|||"
_TOP = ("general", "datasets")
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
    "folders": ValueKind(
        "a folder or a list of folders",
        lambda v: all(isinstance(each, str) and each for each in (v if isinstance(v, list) else [v])),
        lambda v: (v,) if isinstance(v, str) else tuple(v),
    ),
    "size": ValueKind(
        "a side or [width, height] in pixels", _is_size, lambda v: (v, v) if isinstance(v, int) else tuple(v)
    ),
}  # fmt: skip


#: kohya's settings that are not supported -> the values that change nothing
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "color_aug": (False,), "face_crop_aug_range": (None, "", 0), "token_warmup_min": (0, 1), "token_warmup_step": (0,),
    "secondary_separator": ("",), "caption_dropout_every_n_epochs": (0,), "validation_split": (0,),
    "network_multiplier": (1,), "custom_attributes": ({},), "skip_image_resolution": ("", 0),
    "conditioning_data_dir": ("",), "in_json": ("",),
}  # fmt: skip
#: kohya's settings that do not affect training
_HARMLESS = frozenset({"cache_info", "validation_seed", "resize_interpolation", "debug_dataset", "num_workers"})


def toml_field(name: str, default: Any, kind: str, tables: str = "gds") -> Any:
    """Return a dataclass field that a dataset file may set, in the ``tables`` of these initials."""
    return field(default=default, metadata={"name": name, "kind": KINDS[kind], "tables": tables})


@dataclass(frozen=True, slots=True)
class Subset:
    """The settings of one part of a dataset, each with its name in a dataset file."""

    repeats: int = toml_field("num_repeats", 1, "positive")
    regularization: bool = toml_field("is_reg", False, "flag", "s")
    balance: bool = toml_field("balance_regularization", False, "flag", "gd")  # as many regularization images as others
    class_tokens: str = toml_field("class_tokens", "", "text", "s")
    numbered: bool = toml_field("numbered_folders", False, "flag", "s")  # image_dir holds folders such as 10_name
    subfolders: bool = toml_field("include_subfolders", False, "flag")
    metadata: str = toml_field("metadata_file", "", "text", "s")  # lists the images of image_dir
    control: tuple[str, ...] = toml_field("control", (), "folders")  # of reference images; see `data.references`
    caption_extensions: tuple[str, ...] = toml_field("caption_extension", (".txt", ".caption"), "extension")
    shuffle_tags: bool | None = toml_field("shuffle_caption", None, "flag")
    keep_tokens: int | None = toml_field("keep_tokens", None, "natural")
    keep_separator: str = toml_field("keep_tokens_separator", KEEP_SEPARATOR, "separator")
    tag_separator: str | None = toml_field("caption_separator", None, "separator")
    prefix: str = toml_field("caption_prefix", "", "text")
    suffix: str = toml_field("caption_suffix", "", "text")
    wildcards: bool | None = toml_field("enable_wildcard", None, "flag")
    caption_dropout: float | None = toml_field("caption_dropout_rate", None, "fraction")
    tag_dropout: float | None = toml_field("caption_tag_dropout_rate", None, "fraction")
    flip: bool | None = toml_field("flip_aug", None, "flag")
    random_crop: bool | None = toml_field("random_crop", None, "flag")
    alpha_mask: bool = toml_field("alpha_mask", False, "flag")
    resolution: tuple[int, int] | None = toml_field("resolution", None, "size", "gd")
    batch_size: int | None = toml_field("batch_size", None, "positive", "gd")
    buckets: bool | None = toml_field("enable_bucket", None, "flag", "gd")
    min_bucket: int | None = toml_field("min_bucket_reso", None, "positive", "gd")
    max_bucket: int | None = toml_field("max_bucket_reso", None, "positive", "gd")
    bucket_step: int | None = toml_field("bucket_reso_steps", None, "positive", "gd")
    upscale: bool | None = toml_field("bucket_no_upscale", None, "inverted", "gd")


@dataclass(frozen=True, slots=True)
class TableFolder:
    """A folder of images: its place in the file, its path as written there, and its settings."""

    where: str
    image_dir: str
    subset: Subset


def read_tables(data: Mapping[str, Any], base: Subset | None = None) -> tuple[list[list[TableFolder]], list[str]]:
    """Return (the folders of each dataset, problems) of the tables of a dataset file."""
    problems = [f"{key}: there is no such table; known are {' and '.join(_TOP)}" for key in data if key not in _TOP]
    general = _parse_table(data.get("general", {}), "g", "general", base or Subset(), problems)
    datasets: list[list[TableFolder]] = []
    for where, block in _iter_tables(data, "datasets", "", problems):
        settings = _parse_table(block, "d", where, general, problems, ("subsets",))
        datasets.append([])
        for here, table in _iter_tables(block, "subsets", where + ".", problems):
            subset = _parse_table(table, "s", here, settings, problems, ("image_dir",))
            folder = table.get("image_dir")
            if isinstance(folder, str) and folder:
                datasets[-1].append(TableFolder(here, folder, subset))
            else:
                problems.append(f"{here}.image_dir: expected the path of a folder, got {for_message(folder)}")
    return datasets, problems


def _parse_table(
    table: Any, level: str, where: str, base: Subset, problems: list[str], other_keys: tuple[str, ...] = ()
) -> Subset:
    """Return ``base`` with the values of a table; skips ``other_keys``, and appends to ``problems``."""
    if not isinstance(table, dict):
        problems.append(f"{where}: expected a table of settings, got {for_message(table)}")
        return base
    known = {each.metadata["name"]: each for each in fields(base)}
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
    return replace(base, **values)


def _iter_tables(
    data: Mapping[str, Any], name: str, prefix: str, problems: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place in the file, table) for a list of tables."""
    tables = data.get(name)
    if not isinstance(tables, list) or not tables or not all(isinstance(each, dict) for each in tables):
        problems.append(
            f"{prefix}{name}: expected [[{'datasets.' if prefix else ''}{name}]] tables, got {for_message(tables)}"
        )
        return
    yield from ((f"{prefix}{name}[{number}]", each) for number, each in enumerate(tables))
