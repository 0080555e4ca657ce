"""The configuration of a training run: flat, typed, and checked before any work starts, all problems at once.

    fields ──kohya's names──► our names ──pydantic──► types and limits ──contradictions──► TrainConfig
    fields that the user did not set ──with_preset(family)──► the family's values

A field records whether it was set (`model_fields_set`): presets fill only unset fields, and `to_toml` writes only set
ones, so that a file read back means the same. TOML has no null: "none" clears a field that holds a number.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr, model_validator

from inweave.checked import did_you_mean, for_message
from inweave.errors import ConfigError
from inweave.training.config.aliases import ALIASES, translate_aliases
from inweave.training.config.fields import CLEARED_BY_NONE, TrainSettings, names_where
from inweave.training.config.presets import ADAPTIVE, OPTIMIZER_PRESETS, preset_objective, presets
from inweave.training.config.toml import (
    at_most,
    flatten_sections,
    format_toml_tables,
    format_toml_value,
    parse_toml,
    read_text_file,
)
from inweave.training.config.translate import Translation, names_in
from inweave.training.config.types import memory_bytes, side_of, warmup_in_steps
from inweave.training.config.validation import ensure_consistent, is_for_other_objective, objective_hint, validate_into

_LENGTH = frozenset({"steps", "epochs"})
#: settings that are tables themselves, and not sections of settings
_TABLES = ("parts", "optimizer_args", "lr_scheduler_args", "dataset")


class TrainConfig(TrainSettings):
    """The settings of one training run.

    A field that is not set takes the value of the family's preset (`with_preset`), or its default. `of` and `load`
    accept kohya's names too.

    Args:
        fields: settings, as in the table of docs/training.md; ``dataset`` is required.

    Raises:
        ConfigError: with every invalid value and contradiction.
    """

    _explicit: frozenset[str] | None = PrivateAttr(None)

    def _validate(self, fields: Mapping[str, Any]) -> None:
        validate_into(self, fields, labels={})

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        ensure_consistent(self)
        return self

    @classmethod
    def of(cls, **fields: Any) -> TrainConfig:
        """Build a configuration from fields under our names or kohya's.

        Args:
            fields: settings; dashes count as underscores. A name of kohya's that changes nothing is warned about.

        Returns:
            The configuration.

        Raises:
            ConfigError: with every unknown name, invalid value and contradiction.
        """
        translation = _translate(fields)
        return _warn(cls._from_translation(translation), translation.notes)

    @classmethod
    def _from_translation(cls, translation: Translation) -> TrainConfig:
        names = [*cls.model_fields, *names_in(ALIASES, "read", "ignored")]
        unknown = [name if len(name) <= 100 else f"{name[:97]}..." for name in translation.unknown[:50]]
        problems = [
            *translation.problems,
            *(f"{name}: there is no such setting{did_you_mean(name, names)}" for name in unknown),
            *(f"{line} (no equivalent here)" for line in translation.no_equivalent),
            *(f"{name}: {why} (no equivalent here)" for name, why in translation.refused.items()),
        ]
        return cls.from_fields(translation.fields, translation.mapping, problems)

    @classmethod
    def from_fields(
        cls, fields: Mapping[str, Any], mapping: Mapping[str, str], problems: Iterable[str] = ()
    ) -> TrainConfig:
        """Build a configuration from translated fields.

        Args:
            fields: settings under our names.
            mapping: the name that the user wrote -> ours, for messages.
            problems: those known before.

        Returns:
            The configuration.

        Raises:
            ConfigError: with every problem, under the names that the user wrote.
        """
        labels = {ours: theirs for theirs, ours in reversed(list(mapping.items())) if ours != theirs}
        config = cls.__new__(cls)
        validate_into(config, fields, labels, problems)
        return config

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> TrainConfig:
        """Read a configuration from a TOML file, whose sections only group.

        Args:
            path: the file.
            overrides: settings that replace those of the file.

        Returns:
            The configuration.

        Raises:
            ConfigError: with every problem, the file, and the line where it is known.
            FormatError: if the file cannot be a configuration.
        """
        text = read_text_file(path)
        fields, problems = flatten_sections(parse_toml(text, str(path)), keep=_TABLES)
        translation, more = _translate(fields), _translate(overrides)
        replaced = {*more.fields, *(_LENGTH if _LENGTH & more.fields.keys() else ())}
        from_overrides = [problem for problem in more.problems if problem not in translation.problems]
        translation.override(more, replaced)
        try:
            config = cls._from_translation(translation)
        except ConfigError as error:
            problems += map(str, error.problems)
        if problems:
            raise ConfigError([
                problem if problem in from_overrides else f"{path}{_line_of(problem, text)}: {problem}"
                for problem in at_most(problems)
            ])  # fmt: skip
        return _warn(config, translation.notes)

    def to_toml(self, *, everything: bool = False, without: Collection[str] = ()) -> str:
        """Write the fields as TOML, as `load` reads them.

        Args:
            everything: write defaults too, not only fields that were set.
            without: names to leave out.

        Returns:
            The text of a file.
        """
        lines: list[str] = []
        tables = ""
        for name in (each for each in type(self).model_fields if each not in without):
            value = getattr(self, name)
            if value is None and name in CLEARED_BY_NONE:
                value = "none"
            if value is not None and (everything or name in self.model_fields_set):
                if name == "dataset" and isinstance(value, dict):
                    tables = format_toml_tables(value, name)  # after everything else, as TOML wants it
                    continue
                plain = [rule.model_dump(exclude_defaults=True) for rule in value] if name == "rules" else value
                lines.append(f"{name} = {format_toml_value(plain)}")
        return "\n".join([*lines, ""]) + (f"\n[dataset]\n{tables}" if tables else "")

    def with_preset(self, family: str) -> TrainConfig:
        """Fill the fields that the user did not set from a family's preset.

        Args:
            family: the name of a preset.

        Returns:
            A new configuration, whose `explicit_fields` are those of this one.

        Raises:
            ConfigError: if there is no such preset, or settings do not suit the family.
        """
        if family not in presets():
            raise ConfigError(f"there is no preset for {for_message(family)}; known are {', '.join(presets())}")
        length = _LENGTH if self.steps or self.epochs else frozenset()
        own = {name: getattr(self, name) for name in self.model_fields_set - (_LENGTH - length)}
        preset = {name: value for name, value in presets()[family].items() if name not in length}
        if self.objective != "auto":  # an explicit objective overrides the preset's
            kind = self.objective_kind
            preset = {name: value for name, value in preset.items() if not is_for_other_objective(name, value, kind)}
        if self.timestep_sampling not in ("auto", "shift"):  # other distributions have no shift
            preset.pop("timestep_shift", None)
        preset |= OPTIMIZER_PRESETS.get(self.optimizer, {})
        if self.optimizer in ADAPTIVE:  # it adapts every learning rate itself
            preset.pop("text_encoder_learning_rate", None)
        if (side := side_of(own.get("resolution") or preset.get("resolution") or 512)) < 512:
            preset["min_bucket"] = max(8, side // 2)  # the default leaves small images no bucket
        filled = type(self)(**{**preset, **own})
        kind = self.objective_kind or preset_objective(family)
        if problems := [
            f"{name}: {objective_hint(kind)}, which {family} is not"
            for name in own
            if is_for_other_objective(name, own[name], kind)
        ]:
            raise ConfigError(problems)
        filled._explicit = self.explicit_fields
        return filled

    @property
    def drops(self) -> bool:
        """Whether the adapter has any dropout."""
        rates = (self.dropout, self.hidden_dropout, self.rank_dropout, self.module_dropout, self.output_dropout)
        return any(rates)

    @property
    def explicit_fields(self) -> frozenset[str]:
        """Fields that the user set, not those that a preset filled in."""
        return self._explicit if self._explicit is not None else frozenset(self.model_fields_set)

    @property
    def side(self) -> int | None:
        """Side of a square with the area of the resolution; None if the model's own is used."""
        return self.resolution and side_of(self.resolution)

    @property
    def vram_bytes(self) -> int | None:
        """Memory limit in bytes; None without one, or if the free memory decides."""
        return None if self.vram in (None, "auto") else memory_bytes(str(self.vram))

    @property
    def is_planned(self) -> bool:
        """Whether settings are chosen to fit a memory limit: `vram`, or the free memory."""
        return self.vram is not None or not self.batch_size or self.quantize == "auto"

    @property
    def ram_bytes(self) -> int | None:
        """Host memory limit in bytes; None without one, or if the free memory decides."""
        return None if self.ram in (None, "auto") else memory_bytes(str(self.ram))

    def warmup_steps(self, steps: int) -> int:
        """Return the length of the warmup.

        Args:
            steps: the length of the run.

        Returns:
            Steps of the warmup; a preset's that is longer than a short run takes half of it.
        """
        warmup = warmup_in_steps(self.warmup, steps)
        return warmup if "warmup" in self.explicit_fields else min(warmup, steps // 2)

    def encoder_steps(self, steps: int) -> int | None:
        """Return the number of steps that train the text encoders.

        Args:
            steps: the length of the run.

        Returns:
            Steps, at least 1; None if the text encoders are trained to the end.
        """
        return max(1, warmup_in_steps(self.text_encoder_stop, steps)) if self.text_encoder_stop else None


def other_task_settings(config: TrainConfig, task: str) -> list[str]:
    """Return the settings that the user set to something else than their default, and that are for another task."""
    fields = TrainConfig.model_fields
    return [
        name
        for name in sorted(names_where(task=task) & config.model_fields_set)
        if getattr(config, name) != fields[name].get_default(call_default_factory=True)
    ]


_OWN_NAMES = frozenset(TrainConfig.model_fields)


def _translate(fields: Mapping[str, Any]) -> Translation:
    settings = {name.lstrip("-").replace("-", "_"): value for name, value in fields.items()}
    return translate_aliases(Translation(settings), _OWN_NAMES)


def _warn(config: TrainConfig, notes: Iterable[str]) -> TrainConfig:
    for note in notes:
        warnings.warn(note, stacklevel=3)
    return config


def _line_of(problem: str, text: str) -> str:
    """Return ":12" if the file sets the field that a problem begins with in line 12."""
    name = re.match(r"[A-Za-z_]\w*", problem)
    match = name and re.search(rf"^[ \t]*[\"']?{name[0]}[\"']?[ \t]*=", text, re.MULTILINE)
    return f":{text.count(chr(10), 0, match.start()) + 1}" if match else ""
