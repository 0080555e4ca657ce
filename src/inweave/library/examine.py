"""Facts about LoRA files: from headers and sidecars (fast), and from whole files (at the speed of the disk).

Most files of a collection share their layout, the names and shapes of their tensors, with many others; facts that
follow from the layout are computed once (`inweave.library.layouts`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from inweave.errors import InweaveError
from inweave.exchange.check import scan_values
from inweave.exchange.hashes import hash_file
from inweave.exchange.inspect import trigger_words
from inweave.exchange.load import load
from inweave.files.paths import printable_path
from inweave.files.reading import open_regular
from inweave.library.entry import MAX_PROBLEMS, Contents, LibraryFacts
from inweave.library.layouts import LayoutReader, exact_layout
from inweave.library.sidecars import MAX_TEXT, Sidecars, bounded, read_sidecars
from inweave.library.walk import PEFT_WEIGHTS

MAX_METADATA = 200
_SAMPLE = 4096
MAX_NAME = 500


class Examiner:
    """Reads files, and caches the facts of their layouts."""

    def __init__(self) -> None:
        self._layouts = LayoutReader()

    def facts(self, path: Path, names: Collection[str]) -> LibraryFacts:
        """Return facts from the header of ``path`` and its sidecars, which are among the ``names`` of its folder."""
        sidecars = read_sidecars(path.parent, path.stem, names)
        try:
            layout, metadata = self._layouts.read(path)
        except InweaveError as error:
            return _facts_of_unreadable(_reason(str(error), path), sidecars)
        return LibraryFacts(
            **layout.as_dict() | {"warnings": (*sidecars.problems, *layout.warnings)[:MAX_PROBLEMS]},
            alias=metadata.get("ss_output_name", "")[:MAX_NAME] or None,
            title=metadata.get("modelspec.title", "")[:MAX_NAME] or None,
            triggers=(*sidecars.triggers, *_triggers(metadata)),
            description=sidecars.description or metadata.get("modelspec.description", "")[:MAX_TEXT] or None,
            notes=sidecars.notes,
            preferred_strength=sidecars.preferred_strength,
            negative_text=sidecars.negative_text,
            preview=sidecars.preview,
            sidecars=sidecars.names,
            metadata={name: value[:2000] for name, value in sorted(metadata.items())[:MAX_METADATA]},
        )

    def contents(self, path: Path, facts: LibraryFacts) -> tuple[Contents, LibraryFacts] | None:
        """Read the whole file and return its contents and the corrected facts; None if it cannot be read."""
        try:
            hashes = hash_file(path)
            adapter = load(path)
            nonfinite, zeros = scan_values(adapter, "full")
            expected, _ = self._layouts.read(path)
            layout = exact_layout(adapter)
        except (InweaveError, OSError):
            return None
        contents = Contents(
            hashes.sha256, hashes.autov1, hashes.autov2, hashes.autov3,
            tuple(str(row["key"]) for row in nonfinite)[:MAX_PROBLEMS], tuple(zeros)[:MAX_PROBLEMS],
        )  # fmt: skip
        if layout == expected:
            return contents, facts
        of_sidecars = tuple(text for text in facts.warnings if text not in expected.warnings)
        corrected = layout.as_dict() | {"warnings": (*of_sidecars, *layout.warnings)[:MAX_PROBLEMS]}
        return contents, replace(facts, **corrected)


def sample(path: Path) -> str | None:
    """Return a cheap digest of both ends of a file, which differs for nearly all files; None if it cannot be read."""
    weights = path / PEFT_WEIGHTS if path.is_dir() else path
    try:
        with open_regular(weights, buffering=0) as file:
            head = file.read(_SAMPLE)
            file.seek(max(os.fstat(file.fileno()).st_size - _SAMPLE, 0))
            return hashlib.sha256(head + file.read(_SAMPLE)).hexdigest()[:32]
    except InweaveError:
        return None


def _triggers(metadata: Mapping[str, str]) -> list[dict[str, object]]:
    """Return the trigger words in a file's metadata, limited in number and length."""
    return [{**source, "words": bounded(source["words"])} for source in trigger_words(metadata)]


def _reason(message: str, path: Path) -> str:
    """Return an error message without the path of its file, which lists print anyway and clients must not see."""
    return message.removeprefix(f"{path}: ").removeprefix(f"{printable_path(path)}: ").replace(f"{path}", path.name)


def _facts_of_unreadable(reason: str, sidecars: Sidecars) -> LibraryFacts:
    return LibraryFacts(
        error=reason, preview=sidecars.preview, sidecars=sidecars.names, description=sidecars.description,
        warnings=sidecars.problems,
    )  # fmt: skip
