"""Reference images of a dataset, for edit models: matched by file name, or listed in a metadata file.

    control = ["before/", "mask/"]    before/a.png and mask/a.webp belong to a.png, in the order of the folders
    before/a_0.png  before/a_1.png    several of one folder, in the order of their numbers
    {"file_name": "a.png", "control": ["before/a.png", "mask/a.png"]}          a row of metadata.jsonl; see `columns`

A folder is looked up from the dataset file, or the dataset's folder, and then from the folder of the images. An image
without a partner in every folder, or with two of one name, cannot be used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inweave.checked import for_message
from inweave.errors import ConfigError, FormatError
from inweave.files.paths import expand_home, is_folder, printable_path

#: columns of a metadata file; the numbered ones follow those without a number
COLUMNS = ("control", "control_path", "edit_image")
_NUMBERED = re.compile(r"(?:control|control_path)_([0-9]{1,3})")
Listing = Callable[[Path], tuple[list[Path], list[Path]]]


@dataclass(frozen=True, slots=True)
class ReferenceImage:
    """A reference image: its file, its size once upright, and the hash of its pixels."""

    path: Path
    size: tuple[int, int] = (0, 0)
    sha256: str = ""


def control_folders(control: Sequence[str], places: Sequence[Path]) -> tuple[Path, ...]:
    """Return the folders of references; raise ConfigError for each that is in none of the ``places``."""
    folders, missing = list[Path](), list[str]()
    for name in control:
        candidates = [place / expand_home(name) for place in places]
        folder = next(filter(is_folder, candidates), None)
        if folder is None:
            missing.append(f"control: no folder {for_message(name)} in {printable_path(places[0])}")
        else:
            folders.append(folder)
    if missing:
        raise ConfigError(missing)
    return tuple(folders)


def partners(image: Path, folders: Sequence[Path], listing: Mapping[Path, Mapping[str, list[Path]]]) -> list[Path]:
    """Return the references of an image in order; raise FormatError where a folder has none, or two of one name."""
    images = list[Path]()
    for folder in folders:
        by_stem = listing[folder]
        own = [path for path in by_stem.get(image.stem, []) if path.resolve() != image.resolve()]
        numbered = [(number, by_stem.get(f"{image.stem}_{number}", [])) for number in range(10)]
        several = [(number, paths) for number, paths in numbered if paths]
        names = [path for _, paths in several for path in paths]
        where = printable_path(folder)
        if len(own) > 1 or any(len(paths) > 1 for _, paths in several) or (own and several):
            doubled = ", ".join(path.name for path in (*own, *names))
            raise FormatError(f"its reference in {where} is there more than once ({doubled}); leave one of them")
        if not own and not several:
            raise FormatError(f"no reference image {image.stem}.* in {where}")
        if several and [number for number, _ in several] != list(range(several[0][0], several[0][0] + len(several))):
            raise FormatError(f"its references in {where} are {', '.join(p.name for p in names)}; a number is missing")
        images += own or names
    return images


def by_stem(folder: Path, entries: Listing, is_image: Callable[[Path], bool]) -> dict[str, list[Path]]:
    """Return the images of a folder by their name without its extension."""
    images: dict[str, list[Path]] = {}
    for path in filter(is_image, entries(folder)[0]):
        images.setdefault(path.stem, []).append(path)
    return images


def columns(row: Mapping[str, Any]) -> list[str]:
    """Return the references that a row of a metadata file lists; raise FormatError for any other value."""
    numbered = sorted((int(match[1]), name) for name in row if (match := _NUMBERED.fullmatch(str(name))))
    paths = list[str]()
    for name in (*COLUMNS, *(name for _, name in numbered)):
        value = row.get(name)
        values = value if isinstance(value, list) else [] if value in (None, "") else [value]
        if not all(isinstance(path, str) and path and "\0" not in path for path in values):
            raise FormatError(f"{name} is {for_message(value)}, expected a path or a list of paths")
        paths += values
    return paths
