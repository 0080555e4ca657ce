"""Reading a dataset of images from disk, and checking all of it before training.

    folder/  a.png  a.txt  a-masklabel.png   images; captions next to them, one variant per line; masks
    folder/  10_name class/  a.png           10 repeats; "name class" is the caption if no file has one
    folder/  metadata.jsonl, or .csv         {"file_name": "a.png", "text": "..."} per line; only listed images are read
    folder/metadata.jsonl, meta.json         such a file itself, and kohya's (`metadata`)
    folder/  cats/  dogs/old/  a.png         folders of images, where the outer one has none; not `OTHER_USES`
    folder/  train/  a.png                   the root of an imagefolder, which has no images itself
    folder/  reg/                            regularization images, in any of these forms
    folder/  img/10_name/  reg/1_class/      a project of kohya_ss: reg/ is balanced as its scripts do (`balance`)
    set.toml                                 [general] < [[datasets]] < [[datasets.subsets]], paths from its folder

Examples are ordered by name. Every image is decoded fully, once (`verdicts`); its size and hash are those of its
upright pixels, of an animation those of the first frame. A file that cannot be read, or a mask of another shape than
its image, is an error, unless unreadable files are to be skipped: then they are listed. Files that look as if they
belonged to the dataset are listed too: images in folders that are not read or in unsupported formats, masks and
captions without an image.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from inweave.checked import for_message
from inweave.errors import ConfigError, FormatError, amount
from inweave.files.paths import exists, expand_home, is_file, is_folder, printable_path
from inweave.training.config.dataset_toml import Subset, TableFolder, normalize_extension, read_tables
from inweave.training.config.toml import parse_json, parse_toml, read_text_file
from inweave.training.data.balance import balanced
from inweave.training.data.captions import caption_file
from inweave.training.data.images import ImageInfo, mask_orientation
from inweave.training.data.metadata import LISTED, LISTS, is_list, is_listing, read_metadata, refuse_parquet
from inweave.training.data.types import Dataset, Example, ReadReport
from inweave.training.data.verdicts import OnFile, Verdicts
from inweave.training.importers.folder_lists import tables_of_list

IMAGES = (
    ".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif", ".tif", ".tiff", ".gif", ".heic", ".heif", ".hif", ".jfif",
    ".jpe", ".apng",
)  # fmt: skip
UNSUPPORTED = (
    ".jxl", ".psd", ".svg", ".jp2", ".j2k", ".tga", ".ico", ".ppm", ".pgm", ".exr", ".hdr", ".dng", ".cr2", ".cr3",
    ".nef", ".arw", ".raf", ".xcf", ".kra",
)  # fmt: skip
MASK = "-masklabel.png"
METADATA = LISTS[0]
#: names of folders in a dataset whose images are not trained on, unless the folder is named or asked for
OTHER_USES = ("masks", "model", "models", "log", "logs", "sample", "samples", "output", "reg")


def read_dataset(
    path: str | os.PathLike[str] | Mapping[str, Any],
    *,
    caption: str | None = None,
    caption_extensions: Sequence[str] = (".txt", ".caption"),
    skip_unreadable: bool = False,
    cache: Path | None = None,
    on_file: OnFile | None = None,
) -> Dataset:
    """Read and check a dataset; ``caption`` is for images without one, regularization images excepted.

    ``path`` may be the tables of a dataset file; their paths start from the current folder. ``cache``: the folder of
    verdicts on files; ``on_file``: called with the number of files that are checked and of all.
    """
    scanner, notes = _Scanner(), list[str]()
    base = Subset(caption_extensions=tuple(map(normalize_extension, caption_extensions)))
    if isinstance(path, Mapping):
        tables, path = dict(path), Path()
        scanner.scan_tables(tables, path, base, "dataset")
    elif is_folder(path := Path(path)):
        scanner.scan_tree(_split_folder(path, *scanner.entries(path)), base)
    elif path.suffix.lower() == ".toml":
        scanner.scan_toml(path, base)
    elif path.suffix.lower() == ".parquet":
        raise refuse_parquet(path)
    elif path.suffix.lower() == ".json" and is_list(path):
        listed = parse_json(read_text_file(path), printable_path(path))
        tables, notes = tables_of_list(listed, path)
        scanner.scan_tables(tables, path.parent, base, printable_path(path))
    elif path.suffix.lower() in LISTED and is_file(path):
        scanner.scan_folder(path.parent, base, path)
    else:
        problem = "is neither" if exists(path) else "does not exist"
        raise ConfigError(
            f"dataset {printable_path(path)}: expected a folder of images or a dataset .toml, or a metadata file "
            f"(.jsonl, .csv, .json); this {problem}"
        )
    scanner.note_unread_folders()
    masks = {each.mask for each in scanner.examples if isinstance(each.mask, Path)}
    files = dict.fromkeys([*(each.path for each in scanner.examples), *sorted(masks)])
    verdicts = Verdicts(cache)
    infos = verdicts.probe({file: file in masks for file in files}, on_file)
    unusable = dict(scanner.unreadable) | {file: info for file, info in infos.items() if isinstance(info, str)}
    mask_problems = {each.path: why for each in scanner.examples if (why := _mask_problem(each, infos))}
    unusable |= mask_problems
    if unusable and not skip_unreadable:
        lines = [
            f"{printable_path(path)}: {amount(len(unusable), 'file')} cannot be used; repair or remove them, or skip "
            "them with --skip-unreadable (skip_unreadable = true)"
        ]
        lines += [f"  {printable_path(file)}: {why}" for file, why in list(unusable.items())[:20]]
        raise FormatError("\n".join(lines) + (f"\n  and {len(unusable) - 20} more" if len(unusable) > 20 else ""))
    examples, ambiguous = [], []
    for each in scanner.examples:
        info = infos[each.path]
        if isinstance(info, str) or each.path in mask_problems or each.mask in unusable:
            continue
        mask = "alpha" if each.mask is None and info.has_alpha and each.subset.alpha_mask else each.mask
        captions = each.captions or ((caption,) if caption is not None and not each.regularization else ())
        example = replace(each, size=info.size, sha256=info.sha256, mask=mask, captions=captions)
        if mask == "alpha":
            example = replace(example, mask_is_black=info.black)
        elif mask is not None and isinstance(mask_info := infos[mask], ImageInfo):
            orientation = mask_orientation(mask_info, info) or 1
            example = replace(example, mask_is_black=mask_info.black, mask_orientation=orientation)
            fits_both_ways = info.orientation != 1 and info.stored_size == info.size and mask_info.orientation == 1
            ambiguous += [mask] if fits_both_ways else []
        examples.append(example)
    _ensure_trainable(path, scanner, examples)
    by_pixels: dict[str, dict[Path, None]] = {}
    for example in examples:
        by_pixels.setdefault(example.sha256, {})[example.path] = None
    report = ReadReport(
        unreadable=tuple(unusable.items()),
        duplicates=tuple(tuple(group) for group in by_pixels.values() if len(group) > 1),
        uncaptioned=tuple(example.path for example in examples if not example.captions),
        ignored=tuple(dict.fromkeys(scanner.ignored)),
        unsupported_formats=tuple(dict.fromkeys(scanner.unsupported_formats)),
        orphan_captions=tuple(dict.fromkeys(scanner.orphan_captions)),
        ambiguous_masks=tuple(dict.fromkeys(ambiguous)),
        first_frames=tuple(
            path for path, info in infos.items() if isinstance(info, ImageInfo) and info.has_more_frames
        ),
        shared_captions=tuple((file, tuple(users)) for file, users in scanner.caption_users.items() if len(users) > 1),
        same_captions=_same_captions(scanner),
        encodings=tuple((file, name) for file, name in scanner.encodings.items() if name != "utf-8"),
        other_files=tuple(dict.fromkeys(scanner.other_files)),
        decoded=verdicts.decoded,
        notes=(*notes, *verdicts.notes),
    )
    return Dataset(tuple(examples), report)


def _mask_problem(example: Example, infos: Mapping[Path, ImageInfo | str]) -> str | None:
    """Return what is wrong with the shape of an image's mask; unreadable files are reported elsewhere."""
    image, mask = infos[example.path], infos[example.mask] if isinstance(example.mask, Path) else ""
    if isinstance(image, str) or isinstance(mask, str) or mask_orientation(mask, image) is not None:
        return None
    assert isinstance(example.mask, Path)
    mask_size, image_size = ("x".join(map(str, size)) for size in (mask.size, image.size))
    stored = "x".join(map(str, image.stored_size))
    upright = f" once upright ({stored} in its file)" if image.stored_size != image.size else ""
    return (
        f"its mask {printable_path(Path(example.mask.name))} is {mask_size} and the image {image_size}{upright}, which "
        "is another shape; save the mask in the image's size, or remove it"
    )


def _same_captions(scanner: _Scanner) -> tuple[tuple[Path, ...], ...]:
    """Group images with the same captions from different places."""
    shared = [set(users) for users in scanner.caption_users.values()]
    groups = [group for group in scanner.written.values() if len(group) > 1 and set(group) not in shared]
    return tuple(tuple(group) for group in groups)


def _ensure_trainable(path: Path, scanner: _Scanner, examples: list[Example]) -> None:
    subjects = [example for example in examples if not example.regularization]
    others = [*scanner.ignored, *scanner.unsupported_formats][:5]
    unread = f"; not read: {', '.join(map(printable_path, others))}" if others else ""
    if not subjects:
        searched = f"looked for {', '.join(IMAGES)} in it, in subfolders named like '10_name', and for {METADATA}"
        which = "only regularization images" if examples else "none that can be read" if scanner.examples else "none"
        raise ConfigError(f"{printable_path(path)}: no images to train on ({which}); {searched}{unread}")
    if not any(example.captions for example in subjects):
        extensions = dict.fromkeys(extension for each in subjects for extension in each.subset.caption_extensions)
        raise ConfigError(
            f"{printable_path(path)}: none of {len(subjects)} images has a caption; looked for {', '.join(extensions)} "
            f'files next to {printable_path(subjects[0].path)} and the others, for "text" or "caption" in {METADATA}, '
            "and for words in folder names like '10_name'; write captions, or set `caption`, one for all images"
        )


class _Scanner:
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
        metadata = metadata or next((names[each] for each in LISTS if each in names and is_listing(names[each])), None)
        listed = self.folders[folder] = metadata is not None
        may_have_masks = listed or bool(masks)  # listed images may be in other folders
        if metadata is not None:
            entries, problems = read_metadata(metadata, self.encodings, folder)
            self.unreadable += [(metadata, "; ".join(problems))] if problems else []
            chosen = {folder / name: captions for name, captions in entries.items()}
            self.ignored += [path for path in rows if path not in chosen]
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
                    subset.regularization, "", subset, folder_name,
                )
            )  # fmt: skip
        self.ignored += sorted(masks)
        return listed

    def _sidecar(self, path: Path, names: Mapping[str, Path], subset: Subset) -> tuple[str, ...]:
        captions, file, encoding = caption_file(path, names, subset.caption_extensions)
        if file is not None:
            self.encodings[file] = encoding
            self.caption_users.setdefault(file, {})[path] = None
        return captions

    def note_unread_folders(self) -> None:
        """List folders with images below those that were read: the topmost of each branch, by file names alone."""
        known = {folder.resolve() for folder in self.folders}
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


def _split_folder(folder: Path, files: Sequence[Path], folders: Sequence[Path]) -> Path:
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
