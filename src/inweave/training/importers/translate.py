"""Settings of other trainers, translated into ours.

    name = value ──► plain      another name, the same value
                     readers    another name and another notation; may look at the other settings
                     harmless   does not change what is trained; noted
                     refused    changes what is trained and cannot be expressed here: refused by name where it is on
                     missing    is done in another way here, and how; reported where it is on
                     otherwise  unknown

A `SettingsDialect` is such a set of tables; `translate` is the one way through them, so that no setting is passed over.
Names in tables may contain `*`. A setting of `refused` and `missing` that is off, or at a value of `neutral`, asks for
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from inweave.checked import for_message
from inweave.training.config.fields import Settings
from inweave.training.importers.targets import FLOW
from inweave.training.importers.values import (
    is_off,
    normalize_name,
    parse_bool,
    parse_int,
    parse_scalar,
    parse_sizes,
)

#: the settings of another trainer's file
OtherSettings = Mapping[str, Any]


@dataclass(slots=True)
class Translation:
    """Our fields, and what became of every setting.

    ``exact``: an import, which trains exactly what the other trainer would; else its names stand for ours.
    ``without``: settings that the user asked to leave out instead of having the file refused.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    mapping: dict[str, str] = field(default_factory=dict)  # their name -> ours
    no_equivalent: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # their name -> why
    replaceable: dict[str, str] = field(default_factory=dict)  # their name -> our setting that would stand in for it
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)
    exact: bool = False
    family: str = ""
    optimizer_name: str = ""  # theirs
    without: frozenset[str] = frozenset()

    def put(self, theirs: str, ours: str, value: Any) -> None:
        if ours in self.fields and self.fields[ours] != value:
            other = next((name for name, target in self.mapping.items() if target == ours), ours)
            values = f"{for_message(self.fields[ours])} and {for_message(value)}"
            self.problems.append(f"{other} and {theirs} set {ours} to different values: {values}; keep one")
        self.fields.setdefault(ours, value)
        self.mapping[theirs] = ours

    def refuse(self, theirs: str, why: str, ours: str = "") -> None:
        """What cannot be trained here; left out where the user asked for that, or sets ``ours``, which stands in for it."""
        if not ours and (theirs in self.without or theirs.partition(".")[0] in self.without):
            self.no_equivalent.append(f"{theirs}: left out; {why}")
            return
        self.refused.setdefault(theirs, why)
        if ours:
            self.replaceable[theirs] = ours

    def unsupported(self, theirs: str, why: str) -> None:
        self.no_equivalent.append(f"{theirs}: {why}")

    def note(self, theirs: str, why: str) -> None:
        self.notes.append(f"{theirs}: {why}")

    def add_rules(self, theirs: str, rules: list[dict[str, Any]]) -> None:
        self.fields["rules"] = [*self.fields.get("rules", ()), *rules]
        self.mapping[theirs] = "rules"

    def override(self, other: Translation, replaced: Collection[str]) -> None:
        """Take over another translation, whose fields replace those of the names in ``replaced``."""
        self.fields = {name: value for name, value in self.fields.items() if name not in replaced} | other.fields
        self.mapping = {name: ours for name, ours in self.mapping.items() if ours not in replaced} | other.mapping
        self.problems += other.problems
        self.unknown += other.unknown
        self.no_equivalent += other.no_equivalent
        self.refused |= other.refused
        self.notes += other.notes


Reader = Callable[[Translation, str, Any, OtherSettings], None]


@dataclass(frozen=True, slots=True)
class SettingsDialect:
    plain: Mapping[str, str]
    readers: Mapping[str, Reader]
    harmless: Mapping[str, str]
    missing: Mapping[str, str]
    refused: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # values that change nothing
    finish: Callable[[Translation, OtherSettings], None] | None = None


def translate(
    settings: OtherSettings,
    dialect: SettingsDialect,
    own: frozenset[str] = frozenset(),
    out: Translation | None = None,
) -> Translation:
    """Every setting under our name for it; ``own``: names that are ours already."""
    out = out or Translation()
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
        elif why := _entry(dialect.refused, name) or _entry(dialect.missing, name):
            if is_off(value) or value in (_entry(dialect.neutral, name) or ()):
                out.unset.append(name)
            elif _entry(dialect.refused, name):
                out.refuse(name, f"{for_message(value)}: {why}")
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


# --- readers --------------------------------------------------------------------------------------------------------


def choice(ours: str, table: Mapping[str, str]) -> Reader:
    """One of a list of names; another one is refused by name."""

    def read(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
        if normalize_name(value) in table:
            out.put(name, ours, table[normalize_name(value)])
        else:
            known = ", ".join(dict.fromkeys(table.values()))
            out.refuse(name, f"{for_message(value)} is not supported, only {known}", ours)

    return read


def switch(ours: str, on: Any, off: Any) -> Reader:
    return lambda out, name, value, settings: out.put(name, ours, on if parse_bool(value) else off)


def only(ours: str, value: Any, when: bool = True) -> Reader:
    """A switch that has a meaning in one position only."""

    def read(out: Translation, name: str, switch: Any, settings: OtherSettings) -> None:
        out.put(name, ours, value) if parse_bool(switch) is when else out.unset.append(name)

    return read


def optional(ours: str, parse: Callable[[Any], Any], instead: str = "") -> Reader:
    """A value that is off at zero; refused while there is no such setting here, or done ``instead``."""

    def read(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
        if is_own(out, name):
            out.put(name, name, value)
        elif is_off(value):
            out.unset.append(name)
        elif ours in Settings.model_fields:
            out.put(name, ours, parse(value))
        elif instead:
            out.unsupported(name, instead)
        else:
            out.refuse(name, f"{for_message(value)}: there is no such setting here")

    return read


def is_own(out: Translation, name: str) -> bool:
    """Whether a name means our own setting, outside of an import."""
    return not out.exact and name in Settings.model_fields


def used_if(ours: str, enabled: Callable[[Mapping[str, Any]], bool], why: str) -> Reader:
    """Used where the switch it belongs to is on."""

    def read(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
        out.put(name, ours, value) if enabled(settings) else out.note(name, why)

    return read


PRECISIONS = {
    "no": "fp32", "fp32": "fp32", "float": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16",
    "half": "fp16", "bf16": "bf16", "bfloat16": "bf16",
}  # fmt: skip
precision = choice("precision", PRECISIONS)
save_dtype = choice("save_dtype", PRECISIONS)

SPEED = "only affects speed or memory, which are handled automatically"
MEMORY = "set vram, a memory limit, instead; the base model keeps its precision"
OWN_FILE = "is read from the model's own files"
ELSEWHERE = "is covered by the settings around it"
NO_PART = "is not used by this run"
UPLOAD = "nothing is uploaded"
LOGS = "logs are written into output"
METADATA = "is not written into the adapter"


def cosine_cycles(kind: str) -> Reader:
    """Cycles of a cosine; the other schedulers of their tool ignore it."""

    def read(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
        if parse_int(value) > 1 and "restarts" in normalize_name(settings.get(kind)):
            out.put(name, "cosine_cycles", parse_int(value))
        else:
            out.note(name, "only used by cosine_with_restarts")

    return read


def min_snr(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    """Min-SNR weighting, which their trainers pass over for flow models."""
    if out.family in FLOW:
        out.note(name, "is ignored for this model")
    else:
        out.put(name, "min_snr_gamma", parse_scalar(value) or None)


def log_with(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    """The programs that show a run: tensorboard, wandb, all, or several of them."""
    for each in value if isinstance(value, list) else str(value).split(","):
        kind = normalize_name(each)
        if kind in ("tensorboard", "all"):
            out.put(name, "tensorboard", True)
        if kind in ("wandb", "all"):
            out.put(name, "wandb", True)
        if kind in ("", "none"):
            out.unset.append(name)
        elif kind not in ("tensorboard", "wandb", "all"):
            out.unsupported(name, f"{for_message(each)}: runs are shown by TensorBoard and Weights & Biases")


def refuse_hidden_dropout(out: Translation, name: str) -> None:
    """Refuse a dropout between the factors of an adapter that has none there; each trainer drops something else of it."""
    network = out.fields.get("network", "lora")
    if out.fields.get("hidden_dropout") and network not in ("lora", "locon"):
        value = for_message(out.fields.pop("hidden_dropout"))
        out.refuse(name, f"{value}: {network} has dropout on the adapter's inputs only", "dropout")


def parse_resolutions(value: Any) -> list[int]:
    """A size, or a list of them that are trained together; a rectangle counts as the square of its area."""
    listed = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    sides = [parse_sizes(each) for each in listed]
    areas = dict.fromkeys(round(side[0] if len(side) == 1 else (side[0] * side[1]) ** 0.5) for side in sides)
    if not areas:
        raise ValueError("expected a size, got none")
    return sorted(areas)


def substring_patterns(values: Any) -> list[str]:
    """Substrings of module names, as patterns for whole names."""
    listed = [each for each in (values if isinstance(values, list) else [values]) if isinstance(each, str) and each]
    return [f".*{re.escape(each.removeprefix('transformer.'))}.*" for each in listed]


def sample_prompt(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    """One prompt of a list of samples; its other options are the model's own here."""
    if name.endswith(".prompt") and isinstance(value, str):
        out.fields["sample_prompts"] = [*out.fields.get("sample_prompts", []), value]
        out.mapping[name] = "sample_prompts"
    else:
        out.note(name, "samples use the model's own settings")
