"""A training set on disk, read and proven before anything is trained on it.

    folder/  a.png  a.txt  a-masklabel.png   pictures; captions beside them, one line a variant; masks
    folder/  10_name class/  a.png           10 repeats; "name class" is the caption where there is no file with one
    folder/  metadata.jsonl                  {"file_name": "a.png", "text": "..."} a line; only what it lists is read
    folder/  reg/                            regularisation pictures, in any of these forms
    set.toml                                 [general] < [[datasets]] < [[datasets.subsets]], paths from its folder

The order of examples is the order of names. Every picture is decoded fully; its size is that after turning it upright,
its hash that of its upright pixels. What cannot be read stops everything, or is listed where that was asked for.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from weft.errors import ConfigError, FormatError
from weft.train.captions import KEEP, beside, dotted, read_metadata, shown
from weft.train.check import look, setting, tables, taken

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
MASK = "-masklabel.png"
METADATA = "metadata.jsonl"


@dataclass(frozen=True, slots=True)
class Subset:
    """What a part of the set says about its pictures; None leaves it to the run. Beside each: its name in TOML."""

    repeats: int = setting("num_repeats", 1, "count")
    regularisation: bool = setting("is_reg", False, "flag", "s")
    class_tokens: str = setting("class_tokens", "", "text", "s")
    caption_extensions: tuple[str, ...] = setting("caption_extension", (".txt", ".caption"), "ending")
    shuffle_tags: bool = setting("shuffle_caption", False, "flag")
    keep_tokens: int = setting("keep_tokens", 0, "natural")
    keep_separator: str = setting("keep_tokens_separator", KEEP, "mark")
    separator: str = setting("caption_separator", ",", "mark")
    prefix: str = setting("caption_prefix", "", "text")
    suffix: str = setting("caption_suffix", "", "text")
    wildcards: bool = setting("enable_wildcard", True, "flag")
    caption_dropout: float = setting("caption_dropout_rate", 0.0, "share")
    tag_dropout: float = setting("caption_tag_dropout_rate", 0.0, "share")
    flip: bool = setting("flip_aug", False, "flag")
    random_crop: bool = setting("random_crop", False, "flag")
    alpha_mask: bool = setting("alpha_mask", False, "flag")
    resolution: tuple[int, int] | None = setting("resolution", None, "frame", "gd")
    batch_size: int | None = setting("batch_size", None, "count", "gd")
    bucketed: bool | None = setting("enable_bucket", None, "flag", "gd")
    bucket_minimum: int | None = setting("min_bucket_reso", None, "count", "gd")
    bucket_maximum: int | None = setting("max_bucket_reso", None, "count", "gd")
    bucket_step: int | None = setting("bucket_reso_steps", None, "count", "gd")
    upscale: bool | None = setting("bucket_no_upscale", None, "not", "gd")


@dataclass(frozen=True, slots=True)
class Example:
    """One picture; no caption at all is an empty tuple."""

    path: Path
    captions: tuple[str, ...]
    repeats: int
    size: tuple[int, int]
    mask: Path | Literal["alpha"] | None
    regularisation: bool
    sha256: str
    subset: Subset
    folder: str  # the name its tags are counted under


@dataclass(frozen=True, slots=True)
class ReadReport:
    unreadable: tuple[tuple[Path, str], ...] = ()  # and why
    duplicates: tuple[tuple[Path, ...], ...] = ()  # groups of the same pixels
    uncaptioned: tuple[Path, ...] = ()
    ignored: tuple[Path, ...] = ()  # folders and files that look as if they were meant to be read


@dataclass(frozen=True, slots=True)
class Dataset:
    examples: tuple[Example, ...]
    report: ReadReport


def read_dataset(
    place: str | os.PathLike[str],
    *,
    caption: str | None = None,
    caption_extensions: Sequence[str] = (".txt", ".caption"),
    skip_bad: bool = False,
    settings: Subset = Subset(),
) -> Dataset:
    """Read and prove a set.

    ``caption`` is for pictures without one, regularisation pictures excepted; ``settings`` are the run's, which the
    tables of a dataset file may change.
    """
    place, reader = Path(place), _Reader()
    base = replace(settings, caption_extensions=tuple(map(dotted, caption_extensions)))
    if place.is_dir():
        reader.tree(place, base)
    elif place.suffix.lower() == ".toml":
        reader.toml(place, base)
    else:
        raise ConfigError(f"{shown(place)}: expected a folder of pictures or a dataset .toml, and there is none here")
    paths = list(dict.fromkeys(p for each in reader.found for p in (each.path, each.mask) if isinstance(p, Path)))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        looks = dict(zip(paths, pool.map(look, paths), strict=True))
    bad = dict(reader.bad) | {path: seen for path, seen in looks.items() if isinstance(seen, str)}
    if bad and not skip_bad:
        told = [f"{shown(place)}: {len(bad)} files cannot be read; repair or remove them, or skip bad files"]
        told += [f"  {shown(path)}: {why}" for path, why in list(bad.items())[:20]]
        raise FormatError("\n".join(told) + (f"\n  and {len(bad) - 20} more" if len(bad) > 20 else ""))
    examples = []
    for each in reader.found:
        seen = looks[each.path]
        if isinstance(seen, str) or each.mask in bad:
            continue
        size, digest, alpha = seen
        mask = "alpha" if each.mask is None and alpha and each.subset.alpha_mask else each.mask
        captions = each.captions or ((caption,) if caption and not each.regularisation else ())
        examples.append(replace(each, size=size, sha256=digest, mask=mask, captions=captions))
    _require(place, reader, examples)
    same: dict[str, dict[Path, None]] = {}
    for example in examples:
        same.setdefault(example.sha256, {})[example.path] = None
    report = ReadReport(
        unreadable=tuple(bad.items()),
        duplicates=tuple(tuple(group) for group in same.values() if len(group) > 1),
        uncaptioned=tuple(example.path for example in examples if not example.captions),
        ignored=tuple(reader.ignored),
    )
    return Dataset(tuple(examples), report)


def _require(place: Path, reader: _Reader, examples: list[Example]) -> None:
    subjects = [example for example in examples if not example.regularisation]
    beyond = f"; not read: {', '.join(shown(each) for each in reader.ignored[:5])}" if reader.ignored else ""
    if not subjects:
        looked = f"looked for {', '.join(IMAGES)} in it, in sub-folders named like '10_name', and for {METADATA}"
        which = "only regularisation pictures" if examples else "none that can be read" if reader.found else "none"
        raise ConfigError(f"{shown(place)}: no pictures to train on ({which}); {looked}{beyond}")
    if not any(example.captions for example in subjects):
        endings = dict.fromkeys(ending for each in subjects for ending in each.subset.caption_extensions)
        raise ConfigError(
            f"{shown(place)}: none of {len(subjects)} pictures has a caption; looked for {', '.join(endings)} files beside "
            f'{shown(subjects[0].path)} and the others, for "text" or "caption" in {METADATA}, and for words in folder '
            "names like '10_name'; write captions, or give one for all"
        )


class _Reader:
    """What a set consists of before its pictures are opened."""

    def __init__(self) -> None:
        self.found: list[Example] = []
        self.bad: list[tuple[Path, str]] = []
        self.ignored: list[Path] = []

    def tree(self, folder: Path, subset: Subset) -> None:
        listed = self.pictures(folder, subset)
        for sub in _entries(folder)[1]:
            numbered = re.fullmatch(r"([0-9]{1,6})_(.*)", sub.name, re.DOTALL)
            if sub.name == "reg" and not subset.regularisation:
                self.tree(sub, replace(subset, regularisation=True))
            elif listed:
                continue  # the list says what of the sub-folders belongs to the set
            elif numbered and int(numbered[1]):
                self.pictures(sub, replace(subset, repeats=int(numbered[1]), class_tokens=numbered[2].strip()))
            elif any(_is_picture(path) for path in _entries(sub)[0]):
                self.ignored.append(sub)

    def pictures(self, folder: Path, subset: Subset) -> bool:
        """The pictures of one folder; true where a list says which."""
        files, name = _entries(folder)[0], folder.resolve().name
        names = {path.name.lower(): path for path in files} | {path.name: path for path in files}
        rows: dict[Path, tuple[str, ...] | None] = {path: None for path in files if _is_picture(path)}
        masks = {path for path in files if path.name.endswith(MASK)}
        listed = METADATA in names
        if listed:
            said, wrong = read_metadata(names[METADATA])
            self.bad += [(names[METADATA], "; ".join(wrong))] if wrong else []
            chosen = {folder / name: captions for name, captions in said.items()}
            self.ignored += [path for path in rows if path not in chosen]
            rows = dict(chosen)
        for path, captions in rows.items():
            try:
                found = beside(path, names, subset.caption_extensions) if captions is None else captions
            except FormatError as error:
                self.bad.append((path, str(error)))
                continue
            found = found or ((subset.class_tokens,) if subset.class_tokens else ())
            mask = path.with_name(path.stem + MASK)
            masks.discard(mask)
            there, prior = mask if mask.is_file() else None, subset.regularisation
            self.found.append(Example(path, found, subset.repeats, (0, 0), there, prior, "", subset, name))
        self.ignored += sorted(masks)
        return listed

    def toml(self, file: Path, base: Subset) -> None:
        """A dataset file; the inner table's word counts."""
        try:
            data = tomllib.loads(file.read_text("utf-8-sig"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise FormatError(f"{shown(file)}: not a TOML file that can be read: {error}") from None
        known = ("general", "datasets")
        wrong = [f"{key}: there is no such table; known are {' and '.join(known)}" for key in data if key not in known]
        general = taken(data.get("general", {}), "g", "general", base, wrong)
        for where, block in tables(data, "datasets", "", wrong):
            settings = taken(block, "d", where, general, wrong, ("subsets",))
            for here, part in tables(block, "subsets", where + ".", wrong):
                subset = taken(part, "s", here, settings, wrong, ("image_dir",))
                self._subset(file.parent, part.get("image_dir"), here, subset, wrong)
        if wrong:
            raise ConfigError([f"{shown(file)}: {problem}" for problem in wrong])

    def _subset(self, root: Path, said: Any, where: str, subset: Subset, wrong: list[str]) -> None:
        folder = root / Path(said).expanduser() if isinstance(said, str) and said else None
        if folder is None or not folder.is_dir():
            wrong.append(f"{where}.image_dir: expected the path of a folder, and {said!r} is none")
            return
        before = len(self.found) + len(self.bad)
        self.pictures(folder, subset)
        if len(self.found) + len(self.bad) == before:
            subs = ", ".join(sub.name for sub in _entries(folder)[1][:3])
            hint = f"; it has sub-folders ({subs}), and each needs a table of its own" if subs else ""
            wrong.append(f"{where}.image_dir: no {', '.join(IMAGES)} in {shown(folder)}{hint}")


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in IMAGES and not path.name.lower().endswith(MASK)


def _entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """(files, folders) in the order of their names, without hidden ones; a link that leads nowhere is a file."""
    try:
        paths = sorted((path for path in folder.iterdir() if path.name[0] != "."), key=lambda path: path.name)
    except OSError as error:
        raise FormatError(f"{shown(folder)}: the folder cannot be listed: {error.strerror}") from None
    apart: tuple[list[Path], list[Path]] = ([], [])
    for path in paths:
        apart[path.is_dir()].append(path)
    return apart
