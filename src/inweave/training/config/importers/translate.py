"""Settings of other trainers, translated into ours.

    name = value ──► plain      another name, the same value
                     readers    another name and another notation; may look at the other settings
                     harmless   does not change what is trained; noted
                     missing    has no equivalent here, and why
                     otherwise  unknown

A `SettingsDialect` is such a set of tables; `translate` is the one way through them, so that no setting is passed over.
Names in tables may contain `*`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from inweave.checked import for_message

_OFF: tuple[Any, ...] = (None, "", 0, [], {}, ())  # 0 stands for False and 0.0 too


@dataclass(slots=True)
class Translation:
    """Our fields, and what became of every setting."""

    fields: dict[str, Any] = field(default_factory=dict)
    mapping: dict[str, str] = field(default_factory=dict)  # their name -> ours
    no_equivalent: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)

    def put(self, theirs: str, ours: str, value: Any) -> None:
        if ours in self.fields and self.fields[ours] != value:
            other = next((name for name, target in self.mapping.items() if target == ours), ours)
            values = f"{for_message(self.fields[ours])} and {for_message(value)}"
            self.problems.append(f"{other} and {theirs} set {ours} to different values: {values}; keep one")
        self.fields.setdefault(ours, value)
        self.mapping[theirs] = ours

    def unsupported(self, theirs: str, why: str) -> None:
        self.no_equivalent.append(f"{theirs}: {why}")

    def note(self, theirs: str, why: str) -> None:
        self.notes.append(f"{theirs}: {why}")

    def override(self, other: Translation, replaced: Collection[str]) -> None:
        """Take over another translation, whose fields replace those of the names in ``replaced``."""
        self.fields = {name: value for name, value in self.fields.items() if name not in replaced} | other.fields
        self.mapping = {name: ours for name, ours in self.mapping.items() if ours not in replaced} | other.mapping
        self.problems += other.problems
        self.unknown += other.unknown
        self.no_equivalent += other.no_equivalent
        self.notes += other.notes


Reader = Callable[[Translation, str, Any, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class SettingsDialect:
    plain: Mapping[str, str]
    readers: Mapping[str, Reader]
    harmless: Mapping[str, str]
    missing: Mapping[str, str]
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # values of `missing` that change nothing
    finish: Callable[[Translation, Mapping[str, Any]], None] | None = None


def translate(settings: Mapping[str, Any], dialect: SettingsDialect, own: frozenset[str] = frozenset()) -> Translation:
    """Every setting under our name for it; ``own``: names that are ours already."""
    out = Translation()
    for name, value in settings.items():
        if name in own and (value is None or name not in dialect.readers):
            out.put(name, name, value)
        elif name in dialect.plain or (reader := _entry(dialect.readers, name)):
            if value is None or value == "":
                out.unset.append(name)
            elif name in dialect.plain:
                out.put(name, dialect.plain[name], value)
            else:
                try:
                    reader(out, name, value, settings)
                except (ValueError, TypeError, OverflowError, ArithmeticError) as error:
                    out.problems.append(f"{name}: {error}")
        elif why := _entry(dialect.harmless, name):
            out.note(name, why)
        elif why := _entry(dialect.missing, name):
            if value in _OFF or value in (_entry(dialect.neutral, name) or ()):
                out.unset.append(name)
            else:
                out.unsupported(name, why)
        else:
            out.unknown.append(name)
    if dialect.finish is not None:
        dialect.finish(out, settings)
    return out


def _entry(table: Mapping[str, Any], name: str) -> Any:
    return table.get(name) or next((v for k, v in table.items() if "*" in k and fnmatchcase(name, k)), None)


def known_names(dialect: SettingsDialect) -> list[str]:
    return [name for name in (*dialect.plain, *dialect.readers, *dialect.harmless) if "*" not in name]


# --- notations of a value -------------------------------------------------------------------------------------------


def normalize_name(value: Any) -> str:
    """A name without its case and punctuation: AdamW8bit, ADAMW_8BIT and adamw-8bit are one."""
    return "".join(
        letter for letter in (value if isinstance(value, str) else for_message(value))[:100].lower() if letter.isalnum()
    )


def parse_bool(value: Any) -> bool:
    text = normalize_name(value)
    if text in ("true", "1", "yes", "on"):
        return True
    if text in ("false", "0", "no", "off", "none"):
        return False
    raise ValueError(f"expected true or false, got {for_message(value)}")


def parse_number(value: Any) -> float:
    try:
        if (
            isinstance(value, int | float | str)
            and not isinstance(value, bool)
            and math.isfinite(parsed := float(value))
        ):
            return parsed
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"expected a number, got {for_message(value)}")


def parse_int(value: Any) -> int:
    if (parsed := parse_number(value)) != int(parsed):
        raise ValueError(f"expected a whole number, got {for_message(value)}")
    return int(parsed)


def choice(ours: str, table: Mapping[str, str], otherwise: str) -> Reader:
    def read(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
        if normalize_name(value) in table:
            out.put(name, ours, table[normalize_name(value)])
        else:
            supported = ", ".join(dict.fromkeys(table.values()))
            out.unsupported(name, f"{for_message(value)} is not supported, only {supported}; {otherwise}")

    return read


def switch(ours: str, on: Any, off: Any) -> Reader:
    return lambda out, name, value, settings: out.put(name, ours, on if parse_bool(value) else off)


def parse_pairs(value: Any) -> dict[str, str]:
    """["a=1", "b=2"], "a=1 b=2" or a table."""
    if isinstance(value, Mapping):
        return {str(name): each for name, each in value.items()}
    listed = value.split() if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(each, str) and "=" in each for each in listed):
        raise ValueError(f'expected a list such as ["name=value"], got {for_message(value)}')
    return {name.strip(): text.strip() for name, _, text in (each.partition("=") for each in listed)}


def parse_scalar(value: Any) -> Any:
    """true, 3, 0.5 out of text; other text as it is."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            parsed = kind(value)
        except ValueError:
            continue
        return parsed if math.isfinite(parsed) else value
    return value


def parse_sizes(value: Any) -> list[int]:
    """1024, "1024,1024", "512x768" or [512, 768]: the sides."""
    listed = value.replace("x", ",").split(",") if isinstance(value, str) else value
    sides = [parse_int(each) for each in (listed if isinstance(listed, list | tuple) else [listed])]
    if not sides or min(sides) < 1:
        raise ValueError(f"expected a size, got {for_message(value)}")
    return sides


OPTIMIZERS = {
    "adamw": "adamw", "adamw8bit": "adamw8bit", "pagedadamw8bit": "adamw8bit", "adam8bit": "adamw8bit",
    "adafactor": "adafactor", "prodigy": "prodigy", "schedulefree": "schedulefree",
    "adamwschedulefree": "schedulefree", "schedulefreeadamw": "schedulefree",
}  # fmt: skip
SCHEDULES = {
    "constant": "constant", "constantwithwarmup": "constant", "linear": "linear", "polynomial": "polynomial",
    "cosine": "cosine", "cosinewithrestarts": "cosine", "cosinewithhardrestarts": "cosine",
}  # fmt: skip
PRECISIONS = {
    "no": "fp32", "fp32": "fp32", "float": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16",
    "bf16": "bf16", "bfloat16": "bf16",
}  # fmt: skip
optimizer = choice(
    "optimizer", OPTIMIZERS, "an import uses adamw, at the learning rate of the file, which may not suit it"
)
lr_scheduler = choice("lr_scheduler", SCHEDULES, "an import keeps the rate constant")
precision = choice("precision", PRECISIONS, "an import leaves it to the model's preset")
save_dtype = choice("save_dtype", PRECISIONS, "an import writes fp16")


def optimizer_args(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    rest: dict[str, Any] = {}
    for key, argument in parse_pairs(value).items():
        if key == "betas":
            listed = argument.strip("()[] ").split(",") if isinstance(argument, str) else argument
            out.put(f"{name}.betas", "betas", tuple(parse_number(each) for each in listed))
        elif key in ("weight_decay", "eps"):
            out.put(f"{name}.{key}", {"eps": "epsilon"}.get(key, key), parse_number(argument))
        else:
            rest[key] = (
                argument if isinstance(value, Mapping) else parse_scalar(argument)
            )  # a table has types of its own
    out.mapping[name] = "optimizer_args"
    if rest or not value:
        out.put(name, "optimizer_args", rest)


def cosine_cycles(kind: str) -> Reader:
    """Cycles of a cosine; the other schedulers of their tool ignore it."""

    def read(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
        if parse_int(value) > 1 and "restarts" in normalize_name(settings.get(kind)):
            out.put(name, "cosine_cycles", parse_int(value))
        else:
            out.note(name, "only used by cosine_with_restarts")

    return read


SPEED = "only affects speed or memory, which are handled automatically"
MEMORY = "set vram, a memory limit, instead"
OWN_FILE = "is read from the model's own files"
ELSEWHERE = "is covered by the settings around it"
NO_PART = "is not used by this run"
LOSS = "the loss is plain MSE"


def largest_resolution(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    """Their tools train several resolutions together; here the largest is trained."""
    listed = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    areas = sorted(
        round(side[0] if len(side) == 1 else (side[0] * side[1]) ** 0.5) for side in map(parse_sizes, listed)
    )
    if not areas:
        raise ValueError("expected a size, got none")
    out.put(name, "resolution", areas[-1])
    if len(areas) > 1:
        out.unsupported(f"{name}.others", f"one resolution is trained: {areas[-1]}, the largest; not {areas[:-1]}")


def used_if(ours: str, enabled: Callable[[Mapping[str, Any]], bool], why: str) -> Reader:
    """Used where the switch it belongs to is on."""

    def read(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
        out.put(name, ours, value) if enabled(settings) else out.note(name, why)

    return read


def substring_patterns(out: Translation, name: str, value: Any, ours: str) -> None:
    """Substrings of module names, as patterns."""
    listed = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str) and each]
    patterns = [f".*{re.escape(each.removeprefix('transformer.'))}.*" for each in listed]
    if not patterns:
        out.unset.append(name)
    elif ours == "rules":
        out.put(name, "rules", [{"pattern": pattern, "skip": True} for pattern in patterns])
    else:
        out.put(name, "targets", patterns)


def sample_prompt(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    """One prompt of a list of samples; its other options are the model's own here."""
    if name.endswith(".prompt") and isinstance(value, str):
        out.fields["sample_prompts"] = [*out.fields.get("sample_prompts", []), value]
        out.mapping[name] = "sample_prompts"
    else:
        out.note(name, "samples use the model's own settings")
