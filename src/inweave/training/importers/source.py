"""The contract of an importer, and the file that it reads.

table ──recognize──► settings ──prepare──► Translation, with the trainer's defaults ──translate──► our fields
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inweave.errors import InweaveError
from inweave.training.config.toml import parse_json, read_text_file
from inweave.training.config.translate import Translation


@dataclass(frozen=True, slots=True)
class Source:
    """A file of another trainer: the ``table`` in it, its ``settings`` by name, and where it is."""

    table: Mapping[str, Any]
    settings: dict[str, Any]
    path: Path
    without: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)

    def note(self, theirs: str, why: str) -> None:
        """Note a setting that has no effect."""
        self.notes.append(f"{theirs}: {why}")

    def start(self, family: str, settings: Mapping[str, Any], implied: Mapping[str, Any]) -> Translation:
        """Return the translation of complete settings, of which some are the trainer's defaults."""
        return Translation(settings, family, implied, self.without, self.notes, self.unset)

    def read_file(self, name: str, parse: Callable[[str, str], Any] = parse_json, *, anywhere: bool = True) -> Any:
        """Return the content of a file that the configuration names; None if there is no such file.

        It is next to the configuration, or below the folder above or the current one, under its path or, with
        ``anywhere``, its name alone. Otherwise it is at its absolute path, if it is a .toml or .json there. No other
        file is read.
        """
        if not name or "\0" in name:
            return None
        path = Path(name.replace("\\", "/"))
        below = [] if path.is_absolute() or re.match("[A-Za-z]:", name) else [path]
        places = [*below, *([Path(path.name)] if anywhere else [])]
        for folder in (self.path.parent, self.path.parent.parent, Path()):
            for place in places:
                try:
                    file, root = (folder / place).resolve(), folder.resolve()
                    if file.is_relative_to(root):
                        return parse(read_text_file(file), name)
                except (InweaveError, ValueError, OSError, RuntimeError):
                    continue
        try:
            known = anywhere and path.is_absolute() and path.suffix.lower() in (".toml", ".json")
            return parse(read_text_file(path), name) if known else None
        except (InweaveError, ValueError, OSError, RuntimeError):
            return None


@dataclass(frozen=True, slots=True)
class Importer:
    """How the files of one trainer are imported.

    ``recognize`` returns the settings in a table, None for another trainer's; ``prepare`` adds the trainer's defaults,
    and refuses a file that does not train an adapter of a known model; ``translate`` fills the fields.
    """

    name: str
    recognize: Callable[[Mapping[str, Any]], dict[str, Any] | None]
    prepare: Callable[[Source], Translation]
    translate: Callable[[Translation, Source], None]
