"""Finding the files of a dataset, before any image is opened; see `inweave.training.data.reader` for its layouts."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from inweave.checked import for_message
from inweave.errors import ConfigError, FormatError
from inweave.files.paths import expand_home, is_file, is_folder, printable_path
from inweave.training.config.dataset_toml import Subset, TableFolder, read_tables
from inweave.training.config.toml import parse_toml, read_text_file
from inweave.training.data.balance import balanced
from inweave.training.data.captions import caption_file
from inweave.training.data.metadata import LISTED, LISTS, is_listing, read_metadata
from inweave.training.data.references import ReferenceImage, by_stem, control_folders, partners
from inweave.training.data.types import Example

IMAGES = (
    ".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif", ".tif", ".tiff", ".gif", ".heic", ".heif", ".hif", ".jfif",
    ".jpe", ".apng",
)  # fmt: skip
UNSUPPORTED = (
    ".jxl", ".psd", ".svg", ".jp2", ".j2k", ".tga", ".ico", ".ppm", ".pgm", ".exr", ".hdr", ".dng", ".cr2", ".cr3",
    ".nef", ".arw", ".raf", ".xcf", ".kra",
)  # fmt: skip
MASK = "-masklabel.png"
#: names of folders in a dataset whose images are not trained on, unless the folder is named or asked for
OTHER_USES = ("masks", "model", "models", "log", "logs", "sample", "samples", "output", "reg")


class Scanner:
    """Finds the files of a dataset, before any image is opened."""

    def __init__(self) -> None:
        self.examples: list[Example] = []
        self.unreadable: list[tuple[Path, str]] = []
        self.ignored: list[Path] = []
        self.unsupported_formats: list[Path] = []
        self.orphan_captions: list[Path] = []
        self.other_files: list[Path] = []
        self.encodings: dict[Path, str] = {}  # of caption files
        self.caption_users: dict[Path, dict[Path, None]] = {}  # images by the file their captions are from
        self.written: dict[tuple[str, ...], dict[Path, None]] = {}  # images by their own captions
        self.root = Path()  # where folders of references start
        self.controls: dict[Path, dict[str, list[Path]]] = {}  # their images by name
        self.folders: dict[Path, bool] = {}  # True if a metadata file lists its part of the dataset
        self.entries = functools.cache(_entries)

    def scan_tree(self, folder: Path, subset: Subset) -> None:
        before, project, plain = len(self.examples), False, True
        listed = self.scan_folder(folder, subset)
        for sub in self.entries(folder)[1]:
            numbered = _numbered(sub)
            plain = plain and not numbered
            if sub.name == "img" and not listed and any(map(_numbered, self.entries(sub)[1])):
                project = True
                self.scan_tree(sub, subset)
            elif sub.name == "reg" and not subset.regularization:
                self.scan_tree(sub, replace(subset, regularization=True))
            elif listed:
                continue  # the metadata file lists the images of subfolders too
            elif numbered and int(numbered[1]):
                self.scan_folder(sub, replace(subset, repeats=int(numbered[1]), class_tokens=numbered[2].strip()))
        plain = plain and not (project or listed or subset.numbered or subset.regularization)
        if plain and len(self.examples) + len(self.unreadable) == before:
            self.scan_below(folder, subset, choose=True)
        if project:
            self.examples[before:], left_out = balanced(self.examples[before:])
            self.ignored += [example.path for example in left_out]

    def scan_below(self, folder: Path, subset: Subset, *, choose: bool = False) -> None:
        """Add the images of all folders below one that was read, whatever other tables read of them.

        A folder that links lead to is read once. With ``choose``, folders of another use are left out.
        """
        read = {folder.resolve(): False}  # True if a metadata file lists the images below
        for here, folders, _ in os.walk(folder, onerror=lambda error: self.ignored.append(Path(error.filename))):
            subs = sorted(
                (Path(here, name) for name in folders if name[0] != "."), key=lambda sub: (sub.is_symlink(), sub)
            )
            folders.clear()
            for sub in subs:
                if choose and (_numbered(sub) or sub.name.lower() in OTHER_USES):
                    continue
                if self._is_control(sub, subset):
                    continue
                if (place := sub.resolve()) not in read:
                    read[place] = self.scan_folder(sub, subset)
                if not read[place]:
                    folders.append(sub.name)

    def scan_folder(self, folder: Path, subset: Subset, metadata: Path | None = None) -> bool:
        """Add the images of one folder; returns whether a metadata file lists them."""
        files, folder_name = self.entries(folder)[0], folder.resolve().name
        names = {path.name.lower(): path for path in files} | {path.name: path for path in files}
        rows: dict[Path, tuple[str, ...] | None] = {path: None for path in files if _is_image(path)}
        masks = {path for path in files if path.name.lower().endswith(MASK)}
        listed_references: dict[str, tuple[str, ...]] = {}
        metadata = metadata or next((names[each] for each in LISTS if each in names and is_listing(names[each])), None)
        listed = self.folders[folder] = metadata is not None
        may_have_masks = listed or bool(masks)  # listed images may be in other folders
        if metadata is not None:
            entries, problems = read_metadata(metadata, self.encodings, folder, listed_references)
            self.unreadable += [(metadata, "; ".join(problems))] if problems else []
            chosen = {folder / name: captions for name, captions in entries.items()}
            seen = {folder / name for names in listed_references.values() for name in names}
            self.ignored += [path for path in rows if path not in chosen and path not in seen]
            rows = dict(chosen)
        unsupported = [path for path in files if path.suffix.lower() in UNSUPPORTED and path not in rows]
        self.unsupported_formats += unsupported
        if not listed:
            self.orphan_captions += _orphan_captions(files, [*rows, *unsupported], subset.caption_extensions)
        read = {*rows, *masks, *unsupported, *self.orphan_captions, *self.ignored, metadata}
        endings = () if listed else tuple(each.lower() for each in subset.caption_extensions)
        self.other_files += [path for path in files if path not in read and not path.name.lower().endswith(endings)]
        for path, row in rows.items():
            try:
                captions = self._sidecar(path, names, subset) if row is None else row
                references = self._references(path, folder, subset, listed_references)
            except FormatError as error:
                self.unreadable.append((path, str(error)))
                continue
            if captions and not subset.regularization:
                self.written.setdefault(captions, {})[path] = None
            captions = captions or ((subset.class_tokens,) if subset.class_tokens else ())
            mask = path.with_name(path.stem + MASK) if may_have_masks else None
            masks -= {mask}
            self.examples.append(
                Example(
                    path, captions, subset.repeats, (0, 0), mask if mask and is_file(mask) else None,
                    subset.regularization, "", subset, folder_name, references=references,
                )
            )  # fmt: skip
        self.ignored += sorted(masks)
        return listed

    def _references(
        self, path: Path, folder: Path, subset: Subset, listed: Mapping[str, Sequence[str]]
    ) -> tuple[ReferenceImage, ...]:
        """Return the references of an image: those its row lists, else those of its name in the folders."""
        own = next((listed[name] for name in listed if folder / name == path), None)
        if own is not None:
            return tuple(ReferenceImage(folder / name) for name in own)
        folders = control_folders(subset.control, (self.root, folder))
        for control in folders:
            if control not in self.controls:
                self.controls[control] = by_stem(control, self.entries, _is_image)
        return tuple(map(ReferenceImage, partners(path, folders, self.controls)))

    def _is_control(self, folder: Path, subset: Subset) -> bool:
        """Return whether a folder holds references of a subset."""
        places = (self.root, folder.parent)
        return any(place / expand_home(name) in (folder,) for name in subset.control for place in places)

    def _sidecar(self, path: Path, names: Mapping[str, Path], subset: Subset) -> tuple[str, ...]:
        captions, file, encoding = caption_file(path, names, subset.caption_extensions)
        if file is not None:
            self.encodings[file] = encoding
            self.caption_users.setdefault(file, {})[path] = None
        return captions

    def note_unread_folders(self) -> None:
        """List folders with images below those that were read: the topmost of each branch, by file names alone."""
        known = {folder.resolve() for folder in (*self.folders, *self.controls)}
        known |= {reference.path.parent.resolve() for each in self.examples for reference in each.references}
        below = [sub for folder, listed in self.folders.items() if not listed for sub in self.entries(folder)[1]]
        for top in below:
            walk = os.walk(top, onerror=lambda error: self.ignored.append(Path(error.filename)))
            for here, folders, files in walk:
                if Path(here).resolve() in known:
                    folders.clear()
                elif any(name[0] != "." and _is_image(Path(name), (*IMAGES, *UNSUPPORTED)) for name in files):
                    self.ignored.append(Path(here))
                    folders.clear()
                folders[:] = sorted(name for name in folders if name[0] != ".")

    def scan_toml(self, file: Path, base: Subset) -> None:
        """Read a dataset file; inner tables override outer ones."""
        try:
            data = parse_toml(read_text_file(file), printable_path(file))
        except ConfigError as error:
            raise FormatError(f"{error} (not a readable TOML file)") from None
        self.scan_tables(data, file.parent, base, printable_path(file))

    def scan_tables(self, data: dict[str, Any], root: Path, base: Subset, where_from: str) -> None:
        """Read the tables of a dataset file, whose paths start at ``root``."""
        self.root = root
        datasets, problems = read_tables(data, base)
        for folders in datasets:
            before = len(self.examples)
            for each in folders:
                self._scan_subset(root, each, problems)
            if folders and folders[0].subset.balance:
                self.examples[before:], left_out = balanced(self.examples[before:])
                self.ignored += [example.path for example in left_out]
        if problems:
            raise ConfigError([f"{where_from}: {problem}" for problem in problems])

    def _scan_subset(self, root: Path, entry: TableFolder, problems: list[str]) -> None:
        folder, where, subset = root / expand_home(entry.image_dir), entry.where, entry.subset
        if not is_folder(folder):
            problems.append(f"{where}.image_dir: expected the path of a folder, got {for_message(entry.image_dir)}")
            return
        before = len(self.examples) + len(self.unreadable)
        if subset.numbered:
            self.scan_tree(folder, subset)
        elif not self.scan_folder(folder, subset, self._listing(root, entry, problems)) and subset.subfolders:
            self.scan_below(folder, subset)
        if len(self.examples) + len(self.unreadable) == before:
            subs = ", ".join(sub.name for sub in self.entries(folder)[1][:3])
            hint = f"; it has subfolders ({subs}), and each needs a table of its own" if subs else ""
            problems.append(f"{where}.image_dir: no {', '.join(IMAGES)} in {printable_path(folder)}{hint}")

    def _listing(self, root: Path, entry: TableFolder, problems: list[str]) -> Path | None:
        """Return the file that lists the images of a subset, if it names one."""
        if not entry.subset.metadata:
            return None
        file = root / expand_home(entry.subset.metadata)
        if file.suffix.lower() in LISTED and is_file(file):
            return file
        expected = f"expected the path of a {', '.join(LISTED)} file"
        problems.append(f"{entry.where}.metadata_file: {expected}, got {for_message(entry.subset.metadata)}")
        return None


def _numbered(folder: Path) -> re.Match[str] | None:
    """Return (repeats, words) of the name of a folder such as 10_name."""
    return re.fullmatch(r"([0-9]{1,6})_(.*)", folder.name, re.DOTALL)


def split_folder(folder: Path, files: Sequence[Path], folders: Sequence[Path]) -> Path:
    """Return the train/ of an imagefolder's root, which has no images itself; else the folder."""
    plain = any(_is_image(path) or is_listing(path) for path in files)
    known = {sub.name: sub for sub in folders}
    numbered = any(re.fullmatch(r"[0-9]{1,6}_.*", name, re.DOTALL) for name in known)
    return folder if plain or numbered else known.get("train", folder)


def _is_image(path: Path, extensions: tuple[str, ...] = IMAGES) -> bool:
    return path.suffix.lower() in extensions and not path.name.lower().endswith(MASK)


def _orphan_captions(files: Iterable[Path], images: Iterable[Path], extensions: Sequence[str]) -> list[Path]:
    """Return files with a caption's extension that belong to no image."""
    endings = tuple(extension.lower() for extension in extensions)
    expected = {(name + ending).lower() for path in images for name in (path.stem, path.name) for ending in endings}
    return [path for path in files if path.name.lower().endswith(endings) and path.name.lower() not in expected]


def _entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return (files, folders) ordered by name, without hidden ones; a broken link counts as a file."""
    try:
        with os.scandir(folder) as listing:  # which says what is a folder without another look at each
            names = sorted(
                (entry.name, is_folder(entry) if entry.is_symlink() else entry.is_dir())
                for entry in listing if entry.name[0] != "."
            )  # fmt: skip
    except OSError as error:
        raise FormatError(f"{printable_path(folder)}: the folder cannot be listed: {error.strerror}") from None
    entries: tuple[list[Path], list[Path]] = ([], [])
    for name, inside in names:
        entries[inside].append(folder / name)
    return entries
