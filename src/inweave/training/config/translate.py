"""Settings of another trainer, translated into ours by a table with one row per name.

    name = value ──► to, choice, switch, only   our setting, with the value converted
                     custom                     a function, which may look at the other settings
                     ignored                    does not change what is trained; noted
                     refused                    changes what is trained and cannot be expressed here: refused by name
                     different                  is done in another way here; reported
                     otherwise                  unknown

Rows are made by the functions of `row`. `translate` is the only way through a table, so that no setting is lost. Names
may contain `*` and `?`; an exact name comes first, then the first pattern that matches. A `refused` or `different`
setting that is off, or has one of the row's neutral values, asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from inweave.checked import for_message
from inweave.training.config.values import is_off, normalize_name, parse_scalar


@dataclass(slots=True)
class Translation:
    """Our fields, and a record of what each setting of the other trainer became.

    ``settings``: theirs, complete; ``implied``: those among them that are their trainer's defaults; ``without``:
    settings that the user asked to leave out instead of having the file refused.
    """

    settings: Mapping[str, Any]
    family: str = ""
    implied: Mapping[str, Any] = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    mapping: dict[str, str] = field(default_factory=dict)  # their name -> ours
    no_equivalent: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # their name -> why
    replaceable: dict[str, str] = field(default_factory=dict)  # their name -> our setting that can replace it
    problems: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of one of their settings."""
        return self.settings.get(name, default)

    def is_on(self, name: str) -> bool:
        """Return whether one of their settings asks for something."""
        return not is_off(self.settings.get(name))

    def word(self, name: str) -> str:
        """Return the value of one of their settings without case and punctuation."""
        return normalize_name(self.settings.get(name))

    def put(self, theirs: str, ours: str, value: Any) -> None:
        """Set one of our fields, unless the user asked to leave it out; a second, different value is a problem."""
        if theirs in self.without:
            self.no_equivalent.append(f"{theirs}: left out")
            return
        if ours in self.fields and self.fields[ours] != value:
            other = next((name for name, target in self.mapping.items() if target == ours), ours)
            values = f"{for_message(self.fields[ours])} and {for_message(value)}"
            self.problems.append(f"{other} and {theirs} set {ours} to different values: {values}; keep one")
        self.fields.setdefault(ours, value)
        self.mapping[theirs] = ours

    def refuse(self, theirs: str, why: str, ours: str = "") -> None:
        """Refuse a setting, unless the user asked to leave it out; setting ``ours`` replaces it."""
        if not ours and (theirs in self.without or theirs.partition(".")[0] in self.without):
            self.no_equivalent.append(f"{theirs}: left out; {why}")
            return
        self.refused.setdefault(theirs, why)
        if ours:
            self.replaceable[theirs] = ours

    def refuse_value(self, theirs: str, why: str = "is not supported", ours: str = "") -> None:
        """Refuse a setting with its value: "name: value: why"."""
        self.refuse(theirs, f"{for_message(self.settings.get(theirs))}: {why}", ours)

    def unsupported(self, theirs: str, why: str) -> None:
        """Report a setting that is done in another way here."""
        self.no_equivalent.append(f"{theirs}: {why}")

    def note(self, theirs: str, why: str) -> None:
        """Note a setting that has no effect."""
        self.notes.append(f"{theirs}: {why}")

    def add_rules(self, theirs: str, rules: list[dict[str, Any]]) -> None:
        """Append rules by module pattern."""
        self.fields["rules"] = [*self.fields.get("rules", ()), *rules]
        self.mapping[theirs] = "rules"

    def add_part(self, theirs: str, part: str, value: Any) -> None:
        """Load a component of the model from elsewhere."""
        self.fields["parts"] = {**self.fields.get("parts", {}), part: value}
        self.mapping[theirs] = "parts"

    def forget_default(self, name: str) -> None:
        """Forget a default of the trainer that nothing uses, since every entry has its own value."""
        self.implied = {theirs: value for theirs, value in self.implied.items() if theirs != name}
        self.mapping.pop(name, None)

    def override(self, other: Translation, replaced: Collection[str]) -> None:
        """Merge another translation, whose fields replace those of the names in ``replaced``."""
        self.fields = {name: value for name, value in self.fields.items() if name not in replaced} | other.fields
        self.mapping = {name: ours for name, ours in self.mapping.items() if ours not in replaced} | other.mapping
        self.problems += other.problems
        self.unknown += other.unknown
        self.no_equivalent += other.no_equivalent
        self.refused |= other.refused
        self.notes += other.notes


Reader = Callable[[Translation, str, Any], None]


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One foreign setting: its ``reader`` and our name, or the reason why it has none."""

    kind: Literal["read", "ignored", "refused", "different"]
    why: str = ""
    ours: str = ""
    reader: Reader | None = None
    neutral: tuple[Any, ...] = ()

    def read(self, out: Translation, name: str, value: Any) -> None:
        """Translate one value."""
        assert self.reader is not None
        self.reader(out, name, value)


Table = Mapping[str, SettingRow]


def translate(
    out: Translation, table: Table, own: Collection[str] = frozenset(), skip: Collection[str] = frozenset()
) -> Translation:
    """Translate every setting but those of ``skip``; ``own``: names that are ours already."""
    for name, value in out.settings.items():
        row = _row(table, name)
        if name in skip:
            continue
        if name in own and (value is None or row is None or row.kind != "read" or name not in table):
            out.put(name, name, value)
        elif row is None:
            out.unknown.append(name)
        elif row.kind == "read":
            if value is None or value == "":
                out.unset.append(name)
                continue
            try:
                row.read(out, name, value)
            except (ValueError, TypeError, OverflowError, ArithmeticError) as error:
                out.problems.append(f"{name}: {error}")
        elif row.kind == "ignored":
            out.note(name, row.why)
        elif is_off(value) or parse_scalar(value) in row.neutral:
            out.unset.append(name)
        elif row.kind == "refused":
            out.refuse(name, f"{for_message(value)}: {row.why}")
        else:
            out.unsupported(name, row.why)
    return out


def _row(table: Table, name: str) -> SettingRow | None:
    if name in table:
        return table[name]
    return next((row for pattern, row in table.items() if _is_pattern(pattern) and fnmatchcase(name, pattern)), None)


def _is_pattern(name: str) -> bool:
    return "*" in name or "?" in name


def names_in(table: Table, *kinds: str) -> list[str]:
    """Return the names of rows of some kinds, or of all, without patterns."""
    return [name for name, row in table.items() if not _is_pattern(name) and (not kinds or row.kind in kinds)]
