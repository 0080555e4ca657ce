"""How to train: one flat, typed configuration, checked before any work starts, all problems at once.

    fields given ──aliases──► our names ──pydantic──► types and limits ──contradictions──► TrainConfig
    what the user did not set ──with_preset(family)──► the family's values

A field remembers whether it was set (`model_fields_set`): presets fill only the others, and `to_toml` writes only those
that were, so that a file read back means what was meant. TOML has no null: "none" empties a field that holds a number.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr, model_validator

from inweave.errors import ConfigError
from inweave.training.config.fields import EMPTIED_BY_NONE, Settings
from inweave.training.config.importers.kohya import KOHYA
from inweave.training.config.importers.translate import Translation, known_names, translate
from inweave.training.config.presets import KINDS, PRESETS
from inweave.training.config.toml import (
    at_most,
    flatten_sections,
    for_message,
    format_toml_value,
    parse_toml,
    read_text_file,
)
from inweave.training.config.types import memory_bytes
from inweave.training.config.validation import (
    Contradictions,
    contradictions,
    did_you_mean,
    meant_for,
    out_of_place,
    validate,
)


class TrainConfig(Settings):
    """One training run. Fields left out take the family's preset (`with_preset`), then the defaults here."""

    _said: frozenset[str] | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> TrainConfig:
        if found := contradictions(self):
            raise Contradictions(found)
        return self

    @classmethod
    def of(cls, **fields: Any) -> TrainConfig:
        """Checked, under our names or kohya's: everything that is wrong comes back in one `ConfigError`."""
        said = _ours(fields)
        return _noted(cls.from_translation(said), said.notes)

    @classmethod
    def from_translation(cls, said: Translation) -> TrainConfig:
        """The configuration, or all that is wrong with it: names, values, and values that contradict each other."""
        names = [*cls.model_fields, *known_names(KOHYA)]
        problems = [
            *said.problems,
            *(
                f"{name}: there is no such setting{did_you_mean(name, names)}"
                for name in map(_short, said.unknown[:50])
            ),
            *(f"{told} (no equivalent here)" for told in said.no_equivalent),
        ]
        labels = {ours: theirs for theirs, ours in reversed(said.taken.items()) if ours != theirs}
        return validate(cls, said.fields, labels, problems)

    @classmethod
    def load(cls, path: str | Path, **over: Any) -> TrainConfig:
        """From a TOML file; its sections, if any, only group. What is given besides goes before what it says.

        Problems name the file, and the line where it is known.
        """
        text = read_text_file(path)
        fields, problems = flatten_sections(parse_toml(text, str(path)), keep=("parts", "optimizer_args"))
        said, more = _ours(fields), _ours(over)
        replaced = {*more.fields, *(("steps", "epochs") if {"steps", "epochs"} & more.fields.keys() else ())}
        told = [problem for problem in more.problems if problem not in said.problems]
        said.fields = {**{name: value for name, value in said.fields.items() if name not in replaced}, **more.fields}
        said.taken = {**{name: ours for name, ours in said.taken.items() if ours not in replaced}, **more.taken}
        for name in ("problems", "unknown", "no_equivalent", "notes"):
            getattr(said, name).extend(getattr(more, name))
        try:
            config = cls.from_translation(said)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError([
                problem if problem in told else f"{path}{_line_of(problem, text)}: {problem}" for problem in at_most(problems)
            ])  # fmt: skip
        return _noted(config, said.notes)

    def to_toml(self, *, everything: bool = False, without: Collection[str] = ()) -> str:
        """What was set (or ``everything``), as `load` reads it."""
        lines: list[str] = []
        for name in (each for each in type(self).model_fields if each not in without):
            value = getattr(self, name)
            if value is None and name in EMPTIED_BY_NONE:
                value = "none"
            if value is not None and (everything or name in self.model_fields_set):
                plain = [rule.model_dump(exclude_defaults=True) for rule in value] if name == "rules" else value
                lines.append(f"{name} = {format_toml_value(plain)}")
        return "\n".join([*lines, ""])

    def with_preset(self, family: str) -> TrainConfig:
        """Fields the user did not set, from the family's preset; what the family cannot do is an error."""
        if family not in PRESETS:
            raise ConfigError(f"there is no preset for {for_message(family)}; known are {', '.join(PRESETS)}")
        length = {"steps", "epochs"} if self.steps or self.epochs else set()
        said = {name: getattr(self, name) for name in self.model_fields_set - ({"steps", "epochs"} - length)}
        given = {name: value for name, value in PRESETS[family].items() if name not in length}
        if self.objective != "auto":  # an objective that was asked for outweighs what suits the usual one
            given = {name: value for name, value in given.items() if not out_of_place(name, value, self.kind)}
        if self.timestep_sampling not in ("auto", "shift"):  # another way to draw them takes no shift
            given.pop("timestep_shift", None)
        if self.optimizer == "prodigy":  # it finds every rate itself
            given["learning_rate"] = 1.0
            given.pop("text_encoder_learning_rate", None)
        if (side := said.get("resolution") or given.get("resolution") or 512) < 512:
            given["min_bucket"] = max(8, side // 2)  # the usual one leaves small pictures no bucket
        filled = self.from_translation(Translation(fields={**given, **said}))
        kind = self.kind or KINDS.get(family)
        if wrong := [
            f"{name}: {meant_for(kind)}, and {family} is not" for name in said if out_of_place(name, said[name], kind)
        ]:
            raise ConfigError(wrong)
        filled._said = self.said
        return filled

    @property
    def said(self) -> frozenset[str]:
        """What the user set, whatever a preset has filled in since."""
        return self._said if self._said is not None else frozenset(self.model_fields_set)

    @property
    def vram_bytes(self) -> int | None:
        """The memory to stay within; None without a limit, or where what is free decides."""
        return None if self.vram in (None, "auto") else memory_bytes(str(self.vram))

    def warmup_steps(self, steps: int) -> int:
        """Of a run of so many steps; a preset's may be longer than a short run, and then takes half of it."""
        found = round(self.warmup * steps) if self.warmup < 1 else int(self.warmup)
        return found if "warmup" in self.said else min(found, steps // 2)


_OWN = frozenset(TrainConfig.model_fields)


def _ours(fields: Mapping[str, Any]) -> Translation:
    return translate({name.lstrip("-").replace("-", "_"): value for name, value in fields.items()}, KOHYA, _OWN)


def _noted(config: TrainConfig, notes: Iterable[str]) -> TrainConfig:
    for note in notes:
        warnings.warn(note, stacklevel=3)
    return config


def _short(name: str) -> str:
    return name if len(name) <= 100 else f"{name[:97]}..."


def _line_of(problem: str, text: str) -> str:
    """`:12` where the field a problem begins with stands in the file."""
    name = re.match(r"[A-Za-z_]\w*", problem)
    found = name and re.search(rf"^[ \t]*[\"']?{name[0]}[\"']?[ \t]*=", text, re.MULTILINE)
    return f":{text.count(chr(10), 0, found.start()) + 1}" if found else ""
