"""Import training files of other trainers: kohya's TOML and command lines, kohya_ss's JSON, OneTrainer's JSON,
ai-toolkit's YAML, SimpleTuner's JSON, diffusion-pipe's TOML, command lines of diffusers' scripts.

    file ──text──► table ──the tool that wrote it──► settings + its defaults ──tables──► fields ──settle──► TrainConfig

The tool is recognized by its contents. Every setting is translated, noted as harmless, reported as done in another way
here, or refused by name; nothing is lost silently. Where a file leaves out a setting, the tool's own default is written
down, and every other setting at its neutral value, so that no preset changes the run.

To add a trainer, write a package with an `IMPORTER` and list it in `IMPORTERS`. Secrets in a file are neither read nor
printed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from inweave.checked import for_message
from inweave.errors import ConfigError, FormatError
from inweave.files.paths import as_path
from inweave.files.reading import ensure_regular, read_foreign_text
from inweave.training.config.aliases import ALIASES, translate_aliases
from inweave.training.config.schema import TrainConfig
from inweave.training.config.toml import MAX_FILE, at_most, read_text_file
from inweave.training.config.translate import Translation, names_in
from inweave.training.config.values import OFF, with_setting_name
from inweave.training.importers.ai_toolkit import settings as ai_toolkit
from inweave.training.importers.diffusers import settings as diffusers
from inweave.training.importers.diffusion_pipe import settings as diffusion_pipe
from inweave.training.importers.files import SCRIPTS, parse_text
from inweave.training.importers.kohya import easy as kohya_easy
from inweave.training.importers.kohya import gui as kohya_gui
from inweave.training.importers.kohya import importer as kohya
from inweave.training.importers.onetrainer import settings as onetrainer
from inweave.training.importers.settle import (
    base_model,
    differences,
    foreign_paths,
    refuse,
    settle,
    unset_variables,
    with_tables,
)
from inweave.training.importers.shell import COMMANDS
from inweave.training.importers.simpletuner import settings as simpletuner
from inweave.training.importers.source import Importer, Source

_FILES = "files of kohya, kohya_ss, OneTrainer, ai-toolkit, SimpleTuner and diffusion-pipe can be imported"
#: names that only another kind of file has
_OTHER_FILES = (
    ({"plugin_unet", "plugin_TE", "_base_", "tokenizer_pt"}, "a configuration of HCP-Diffusion"),
    ({"enable_conv", "unet_target_module", "unet_target_name", "text_encoder_target_module"}, "a preset of LyCORIS"),
    ({"micro_batch_size_per_gpu", "pipeline_stages"}, "a configuration of diffusion-pipe without its model"),
    ({"peft_type", "target_modules", "base_model_name_or_path"}, "the description of a PEFT adapter"),
)


def _refuse_other_files(table: Mapping[str, Any]) -> None:
    if isinstance(table.get("datasets"), list) and not table.keys() - {"general", "datasets"}:
        raise ConfigError("is a dataset, not a training run; set `dataset` to it")
    if isinstance(table.get("directory"), list) and "model" not in table:
        raise ConfigError("is a dataset of diffusion-pipe; import the configuration that names it")
    for marks, what in _OTHER_FILES:
        if marks & table.keys():
            raise ConfigError(f"is {what}; {_FILES}")


def _recognize_own(table: Mapping[str, Any]) -> dict[str, Any] | None:
    fields, twice = kohya.sections(table)
    ours = {*TrainConfig.model_fields, *names_in(ALIASES)} & fields.keys()
    if not TrainConfig.model_fields.keys() & ours or 2 * len(ours) < len(fields):
        return None  # a name or a seed is in files of every program
    if twice:
        raise ConfigError(twice)
    return fields


def _prepare_own(source: Source) -> Translation:
    return source.start("", {name: value for name, value in source.settings.items() if value not in (None, "")}, {})


def _translate_own(out: Translation, source: Source) -> None:
    translate_aliases(out, TrainConfig.model_fields)


INWEAVE: Final = Importer("inweave", _recognize_own, _prepare_own, _translate_own)
#: in the order in which they are asked; kohya's files and ours, flat tables of settings, have no mark of their own
IMPORTERS: Final = (
    ai_toolkit.IMPORTER,
    onetrainer.IMPORTER,
    diffusers.IMPORTER,
    diffusion_pipe.IMPORTER,
    kohya_gui.IMPORTER,
    kohya_easy.IMPORTER,
    simpletuner.IMPORTER,
    kohya.IMPORTER,
    INWEAVE,
)


def recognize(table: Mapping[str, Any]) -> tuple[Importer, dict[str, Any]]:
    """Return (the importer of the tool that wrote a table, its settings)."""
    for importer in IMPORTERS:
        if importer is kohya.IMPORTER:
            _refuse_other_files(table)
        if (settings := importer.recognize(table)) is not None:
            return importer, settings
    raise ConfigError(f"is not recognized; {_FILES}")


@dataclass(frozen=True, slots=True)
class Imported:
    """An imported configuration, and what became of each setting.

    ``mapping``: their setting -> ours; ``defaults``: those of the tool that were written; ``no_equivalent``: "setting:
    why", done in another way here or unknown; ``notes``: settings without an effect; ``unset``: settings that are off;
    ``differ``: the notes about what differs here although the settings are the same.
    """

    config: TrainConfig
    mapping: dict[str, str]
    no_equivalent: list[str]
    notes: list[str]
    kind: str = ""
    defaults: dict[str, Any] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    differ: list[str] = field(default_factory=list)

    def report(self, verbose: bool = False) -> list[str]:
        """Return lines about what became of the file: what is done in another way here, then how much else there is.

        With ``verbose`` the trainer's defaults and the settings without an effect are listed too.
        """
        lines = [f"{self.kind}: {len(self.mapping)} settings were translated"]
        reasons: dict[str, list[str]] = {}
        for line in self.no_equivalent:
            name, _, why = line.partition(": ")
            reasons.setdefault(why, []).append(name)
        lines += [f"no equivalent: {', '.join(names)}: {why}" for why, names in reasons.items()]
        lines += [f"differs: {line}" for line in self.differ]
        quiet = {*(f"{name}:" for name in self.defaults), *(f"{name}:" for name in self.unset), *self.differ}
        notes = [line for line in self.notes if not any(line.startswith(each) for each in quiet)]
        if not verbose:
            counts = {"defaults written": self.defaults, "notes": notes, "settings off or empty": self.unset}
            if any(counts.values()):
                rest = ", ".join(f"{len(each)} {what}" for what, each in counts.items() if each)
                lines.append(f"{rest}: --verbose lists them")
            return lines
        if self.defaults:
            values = ", ".join(f"{name} = {for_message(value)}" for name, value in self.defaults.items())
            lines.append(f"not in the file, written at {self.kind}'s defaults: {values}")
        return [*lines, *(f"note: {line}" for line in notes), *self._unset_line()]

    def _unset_line(self) -> list[str]:
        return [f"off or empty: {', '.join(self.unset)}"] if self.unset else []


def import_config(path: str | Path, *, without: Collection[str] = (), **overrides: Any) -> Imported:
    """Import a file.

    Args:
        path: the file.
        without: settings of the file to leave out, which would have it refused.
        overrides: our settings, which replace those of the file or add what it lacks (such as ``dataset``).

    Returns:
        The configuration, and what became of each setting.

    Raises:
        ConfigError: if the file cannot be trained here, with the reasons.
        FormatError: if the file cannot be a configuration.
    """
    ensure_regular(as_path(path), ConfigError)
    text, encoding = read_foreign_text(path, MAX_FILE)  # PowerShell writes UTF-16
    if "\0" in text or not (encoding.startswith("utf") or Path(path).suffix.lower() in SCRIPTS):
        text = read_text_file(path)  # refuses it
    table = parse_text(text, Path(path))
    return import_table(table, Path(path), without=without, **overrides)


def import_text(text: str, name: str, *, without: Collection[str] = (), **overrides: Any) -> Imported:
    """Import a text that is not in a file, such as a command line; messages call it ``name``."""
    if len(text) > MAX_FILE or "\0" in text:
        raise FormatError(f"{name}: is not a configuration: {len(text)} letters")
    return import_table(parse_text(text, Path(name)), Path(name), without=without, **overrides)


def import_table(table: dict[str, Any], path: Path, *, without: Collection[str] = (), **overrides: Any) -> Imported:
    """Import a table that was read from ``path``."""
    commands = table.get(COMMANDS)
    table = {name: value for name, value in table.items() if name != COMMANDS}
    notes = (
        [f"{commands} training commands: the longest is imported, the first where they are equal"] if commands else []
    )
    try:
        importer, settings = recognize(table)
        out = _translated(importer, Source(table, settings, path, frozenset(without), notes))
        return _checked(importer.name, settings, out, overrides)
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in at_most([*map(str, error.problems)])]) from None
    except RecursionError:
        raise FormatError(f"{path}: is nested too deeply") from None


def _translated(importer: Importer, source: Source) -> Translation:
    out = None
    try:
        out = importer.prepare(source)
        importer.translate(out, source)
    except (TypeError, AttributeError) as error:
        problems = out.problems if out is not None else []
        raise ConfigError([*problems, _wrong_type(str(error), source.settings)]) from None
    except (ValueError, OverflowError, ArithmeticError) as error:
        problems = out.problems if out is not None else []
        raise ConfigError([*problems, with_setting_name(str(error), source.settings)]) from None
    except KeyError as error:  # a field whose setting was refused or left out
        problems = [f"{name}: {why}" for name, why in out.refused.items()] if out is not None else []
        raise ConfigError([*problems, f"{error.args[0]}: is needed by other settings; do not leave it out"]) from None
    return out


def _wrong_type(message: str, settings: Mapping[str, Any]) -> str:
    """Return which settings may have a value of a type that their trainer does not write."""
    if (text := with_setting_name(message, settings)) != message:
        return text
    odd = [name for name, value in settings.items() if not isinstance(value, str | int | float)]
    names = f"; check {', '.join(odd[:5])}" if odd else ""
    return f"a setting has a value of another type than its trainer writes ({message}){names}"


def _checked(kind: str, settings: Mapping[str, Any], out: Translation, overrides: dict[str, Any]) -> Imported:
    """Return the complete configuration, or raise every reason why it cannot be trained."""
    if "script" in settings:
        out.notes += unset_variables(settings)
    differ = differences(kind, settings, out)
    out.notes += differ
    out.unset += [name for name in out.unknown if settings.get(name) in OFF]
    unknown = [f"{name[:200]}: is not known here" for name in out.unknown if settings.get(name) not in OFF]
    implied = dict(out.implied)
    if kind != INWEAVE.name:
        implied |= base_model(out, settings, overrides)
        settle(out, overrides)
    replaced = {*overrides, *({"steps", "epochs"} if {"steps", "epochs"} & overrides.keys() else ())}
    overrides = with_tables(out, overrides)
    refuse(out, overrides, dict.fromkeys(implied, kind))
    fields = {name: value for name, value in out.fields.items() if name not in replaced} | overrides
    config = TrainConfig.from_fields(fields, out.mapping, out.problems)
    if kind != INWEAVE.name:
        out.no_equivalent += foreign_paths(fields)
    notes = [
        *dict.fromkeys(out.notes),
        *(f"{name}: not in the file; {kind}'s default, {for_message(v)}, is used" for name, v in implied.items()),
        *(f"{name}: is off, empty or the same here" for name in dict.fromkeys(out.unset)),
    ]
    mapping = {name: ours for name, ours in out.mapping.items() if name not in implied}
    unset = [name for name in dict.fromkeys(out.unset) if name not in mapping]
    no_equivalent = list(dict.fromkeys([*out.no_equivalent, *unknown]))
    return Imported(config, mapping, no_equivalent, notes, kind, implied, unset, differ)
