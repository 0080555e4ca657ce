"""The LoRA files below a folder, with just enough to detect changes: no file is opened.

Adapter files end in .safetensors; a folder with `adapter_config.json` and `adapter_model.safetensors` is one PEFT
adapter. Links that lead out of the folder are skipped, as are devices, pipes, hidden folders and names that are not
Unicode. Folders are opened without following links, so one that is swapped for a link meanwhile is not entered.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inweave.files.confinement import open_beneath

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SIDECAR_ENDINGS = (".json", ".civitai.info", ".png", ".jpg", ".jpeg", ".webp")
MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Sighting:
    """A file in the listing of a folder; ``stamp`` changes whenever the file or one of its sidecars does."""

    path: str  # below the root
    size: int
    modified_ns: int
    inode: int
    stamp: str
    siblings: frozenset[str]


@dataclass(frozen=True, slots=True)
class Identity:
    """The properties that identify a file without reading it."""

    size: int
    modified_ns: int
    inode: int
    changed_ns: int  # of a new name and a new mode too

    @property
    def mark(self) -> str:
        """The first part of the stamp."""
        return f"{self.modified_ns}-{self.changed_ns}"

    def is_renamed(self, sighting: Sighting) -> bool:
        """Return whether this is the sighted file, perhaps under another name."""
        return (self.size, self.modified_ns, self.inode) == (sighting.size, sighting.modified_ns, sighting.inode)


def walk(root: Path, passed_over: list[str]) -> Iterator[Sighting]:
    """Yield every adapter below ``root``; skipped files are appended to ``passed_over`` with the reason."""
    stack: list[tuple[str, int]] = [("", 0)]
    while stack:
        prefix, depth = stack.pop()
        sightings, folders = _look(root, prefix, passed_over)
        yield from sightings
        if depth < MAX_DEPTH:
            stack += [(f"{prefix}{name}/", depth + 1) for name in folders]
        elif folders:
            passed_over.append(f"{prefix}: deeper than {MAX_DEPTH} folders")


def sight(root: Path, path: str) -> Sighting | None:
    """Return the adapter at a path, or None if it is gone."""
    parent = path.rpartition("/")[0]
    for prefix in (f"{parent}/" if parent else "", f"{path}/"):
        for sighting in _look(root, prefix, [])[0]:
            if sighting.path == path:
                return sighting
    return None


def identity(root: Path, path: str) -> Identity | None:
    """Return the identity of the file at a path below ``root``; None if there is none, or a link leads out."""
    try:
        place = Path(os.path.realpath(root / path, strict=True))
        if not place.is_relative_to(os.path.realpath(root)):
            return None
        status = os.lstat(place)
        if stat.S_ISDIR(status.st_mode):
            status = os.lstat(place / PEFT_WEIGHTS)
    except (OSError, ValueError):
        return None
    return _identity_of(status) if stat.S_ISREG(status.st_mode) else None


def _identity_of(status: os.stat_result) -> Identity:
    return Identity(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)


def _look(root: Path, prefix: str, passed_over: list[str]) -> tuple[list[Sighting], list[str]]:
    """Return (adapters, subfolders to enter) of the folder at ``prefix``, which is empty or ends in a slash."""
    files, folders = _read(root, prefix, passed_over)
    if PEFT_CONFIG in files and PEFT_WEIGHTS in files and prefix:
        weights = files[PEFT_WEIGHTS]
        stamp = f"{_identity_of(weights).mark}/{_identity_of(files[PEFT_CONFIG]).mark}"
        adapter = Sighting(prefix.rstrip("/"), weights.st_size, weights.st_mtime_ns, weights.st_ino, stamp, frozenset())
        return [adapter], []
    names = frozenset(files)
    stamps = {name: _identity_of(status).mark for name, status in files.items() if name.endswith(SIDECAR_ENDINGS)}
    sightings = []
    for name, status in sorted(files.items()):
        if not name.endswith(".safetensors"):
            continue
        stem = name.removesuffix(".safetensors")
        sidecar_stamps = [
            stamps.get(f"{stem}{middle}{ending}") for middle in ("", ".preview") for ending in SIDECAR_ENDINGS
        ]
        stamp = "/".join(filter(None, (_identity_of(status).mark, *sidecar_stamps)))
        sightings.append(Sighting(prefix + name, status.st_size, status.st_mtime_ns, status.st_ino, stamp, names))
    return sightings, folders


def _read(root: Path, prefix: str, passed_over: list[str]) -> tuple[dict[str, os.stat_result], list[str]]:
    """Return (regular files, subfolders) of one folder."""
    files: dict[str, os.stat_result] = {}
    folders: list[str] = []
    try:
        descriptor = open_beneath(root, prefix or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    try:
                        _sort_in(entry, prefix, root, files, folders, passed_over)
                    except FileNotFoundError:
                        continue  # only this file is gone
        finally:
            os.close(descriptor)
    except OSError as error:
        passed_over.append(f"{prefix or '.'}: {error.strerror}; the files in it are left out")
    return files, sorted(folders, reverse=True)


def _sort_in(
    entry: os.DirEntry[str], prefix: str, root: Path, files: dict[str, os.stat_result], folders: list[str],
    passed_over: list[str],
) -> None:  # fmt: skip
    adapter = entry.name.endswith(".safetensors")
    if not is_unicode(entry.name):
        if adapter or entry.is_dir():
            passed_over.append(f"{prefix}{ascii(entry.name)[1:-1]}: its name is not Unicode; rename it")
    elif entry.is_symlink() and not _inside(root / prefix / entry.name, root):
        if adapter or entry.is_dir():
            passed_over.append(f"{prefix}{entry.name}: a link that leads out of the library")
    elif entry.is_dir(follow_symlinks=False):
        if not entry.name.startswith("."):
            folders.append(entry.name)
    elif entry.is_file():
        files[entry.name] = entry.stat()
    elif adapter:
        passed_over.append(f"{prefix}{entry.name}: not a regular file")


def is_unicode(name: str) -> bool:
    """Return whether a name is valid Unicode.

    Invalid UTF-8 arrives as unpaired surrogates, which an index, a prompt or an answer cannot contain.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _inside(link: Path, root: Path) -> bool:
    try:
        return link.resolve(strict=True).is_relative_to(root.resolve())
    except (OSError, RuntimeError):
        return False
