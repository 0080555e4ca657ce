"""A training set on disk, read and proven before anything is trained on it.

    folder/  a.png  a.txt  a-masklabel.png   pictures; captions beside them, one line a variant; masks
    folder/  10_name class/  a.png           10 repeats; "name class" is the caption where there is no file with one
    folder/  metadata.jsonl                  {"file_name": "a.png", "text": "..."} a line; only what it lists is read
    folder/  reg/                            regularisation pictures, in any of these forms
    set.toml                                 [general] < [[datasets]] < [[datasets.subsets]], paths from its folder

The order of examples is the order of names. Every picture is decoded fully; its size is that after turning it upright,
its hash that of its upright pixels. What cannot be read stops everything, or is listed where that was asked for; so does
a mask of another shape than its picture. What looks as if it belonged to the set and does not is listed: pictures in
folders that are not gone into or of a kind that is not read, masks and captions without a picture.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from inweave.errors import ConfigError, FormatError
from inweave.training.data.captions import KEEP, beside, dotted, read_metadata, shown
from inweave.training.data.report import Look, look, setting, tables, taken, turn_of

if TYPE_CHECKING:
    from inweave.training.config.schema import TrainConfig

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
FOREIGN = (
    ".gif", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jxl", ".psd", ".svg", ".jp2", ".j2k", ".jfif", ".jpe", ".tga",
    ".ico", ".apng", ".ppm", ".pgm", ".exr", ".hdr", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".xcf", ".kra",
)  # fmt: skip
MASK = "-masklabel.png"
METADATA = "metadata.jsonl"


@dataclass(frozen=True, slots=True)
class Subset:
    """What a part of the set says about its pictures; None leaves it to the run. Beside each: its name in TOML."""

    repeats: int = setting("num_repeats", 1, "count")
    regularisation: bool = setting("is_reg", False, "flag", "s")
    class_tokens: str = setting("class_tokens", "", "text", "s")
    caption_extensions: tuple[str, ...] = setting("caption_extension", (".txt", ".caption"), "ending")
    shuffle_tags: bool | None = setting("shuffle_caption", None, "flag")
    keep_tokens: int | None = setting("keep_tokens", None, "natural")
    keep_separator: str = setting("keep_tokens_separator", KEEP, "mark")
    separator: str | None = setting("caption_separator", None, "mark")
    prefix: str = setting("caption_prefix", "", "text")
    suffix: str = setting("caption_suffix", "", "text")
    wildcards: bool = setting("enable_wildcard", True, "flag")
    caption_dropout: float | None = setting("caption_dropout_rate", None, "share")
    tag_dropout: float | None = setting("caption_tag_dropout_rate", None, "share")
    flip: bool | None = setting("flip_aug", None, "flag")
    random_crop: bool | None = setting("random_crop", None, "flag")
    alpha_mask: bool = setting("alpha_mask", False, "flag")
    resolution: tuple[int, int] | None = setting("resolution", None, "frame", "gd")
    batch_size: int | None = setting("batch_size", None, "count", "gd")
    bucketed: bool | None = setting("enable_bucket", None, "flag", "gd")
    bucket_minimum: int | None = setting("min_bucket_reso", None, "count", "gd")
    bucket_maximum: int | None = setting("max_bucket_reso", None, "count", "gd")
    bucket_step: int | None = setting("bucket_reso_steps", None, "count", "gd")
    upscale: bool | None = setting("bucket_no_upscale", None, "not", "gd")


#: what may be left open, and how it was written down before it could be: checkpoints compare that
OFF: dict[str, Any] = {
    "shuffle_tags": False, "keep_tokens": 0, "separator": ",", "caption_dropout": 0.0, "tag_dropout": 0.0, "flip": False,
    "random_crop": False,
}  # fmt: skip


def run_settings(config: TrainConfig) -> dict[str, Any]:
    """The run's word for what a table of the dataset's file may leave open, by the names of a subset's fields."""
    return {
        "shuffle_tags": config.shuffle_tags, "keep_tokens": config.keep_tokens, "separator": config.tag_separator,
        "caption_dropout": config.caption_dropout, "tag_dropout": config.tag_dropout, "flip": config.flip,
        "random_crop": config.crop == "random",
    }  # fmt: skip


def within(subset: Subset, run: Mapping[str, Any]) -> Subset:
    """What counts for a part of the set: its own word, and the run's where it has none; ``run``: see `run_settings`."""
    return replace(subset, **{name: value for name, value in run.items() if getattr(subset, name) is None})


def noted(subset: Subset, run: Mapping[str, Any]) -> dict[str, Any]:
    """A subset as a fingerprint of the data holds it.

    What is left open stands there as off, as it always did; what asks for less than the run does, which once had no
    effect, stands there a second time.
    """
    said = {name: value for name, value in asdict(subset).items() if name in OFF and value is not None}
    less = {n: v for n, v in said.items() if v != run[n] and (v == OFF[n] if isinstance(v, str) else v < run[n])}
    return {**asdict(subset), **OFF, **said} | ({"less": less} if less else {})


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
    mask_turn: int = 1  # how the mask's file is turned to lie on the picture, in EXIF's numbers
    mask_black: bool = False  # it is open nowhere


@dataclass(frozen=True, slots=True)
class ReadReport:
    unreadable: tuple[tuple[Path, str], ...] = ()  # and why
    duplicates: tuple[tuple[Path, ...], ...] = ()  # groups of the same pixels
    uncaptioned: tuple[Path, ...] = ()
    ignored: tuple[Path, ...] = ()  # folders and files that look as if they were meant to be read
    formats: tuple[Path, ...] = ()  # pictures of a kind that is not read
    orphans: tuple[Path, ...] = ()  # captions without a picture
    upright_masks: tuple[Path, ...] = ()  # of pictures that EXIF turns, and the size does not say whether they are too


@dataclass(frozen=True, slots=True)
class Dataset:
    examples: tuple[Example, ...]
    report: ReadReport


def read_dataset(
    place: str | os.PathLike[str],
    *,
    caption: str | None = None,
    caption_extensions: Sequence[str] = (".txt", ".caption"),
    skip_unreadable: bool = False,
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
    reader.beyond()
    masks = {each.mask for each in reader.found if isinstance(each.mask, Path)}
    paths = list(dict.fromkeys([*(each.path for each in reader.found), *sorted(masks)]))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        looks = dict(zip(paths, pool.map(look, paths, (path in masks for path in paths)), strict=True))
    bad = dict(reader.bad) | {path: seen for path, seen in looks.items() if isinstance(seen, str)}
    unfit = {each.path: why for each in reader.found if (why := _misfit(each, looks))}
    bad |= unfit
    if bad and not skip_unreadable:
        told = [
            f"{shown(place)}: {len(bad)} files cannot be used; repair or remove them, or leave them out with --skip-unreadable (skip_unreadable)"
        ]
        told += [f"  {shown(path)}: {why}" for path, why in list(bad.items())[:20]]
        raise FormatError("\n".join(told) + (f"\n  and {len(bad) - 20} more" if len(bad) > 20 else ""))
    examples, either = [], []
    for each in reader.found:
        seen = looks[each.path]
        if isinstance(seen, str) or each.path in unfit or each.mask in bad:
            continue
        mask = "alpha" if each.mask is None and seen.alpha and each.subset.alpha_mask else each.mask
        captions = each.captions or ((caption,) if caption and not each.regularisation else ())
        made = replace(each, size=seen.size, sha256=seen.sha256, mask=mask, captions=captions)
        if mask == "alpha":
            made = replace(made, mask_black=seen.black)
        elif mask is not None and isinstance(under := looks[mask], Look):
            made = replace(made, mask_black=under.black, mask_turn=turn_of(under, seen) or 1)
            either += [mask] if seen.turn != 1 and seen.stored == seen.size and under.turn == 1 else []
        examples.append(made)
    _require(place, reader, examples)
    same: dict[str, dict[Path, None]] = {}
    for example in examples:
        same.setdefault(example.sha256, {})[example.path] = None
    report = ReadReport(
        unreadable=tuple(bad.items()),
        duplicates=tuple(tuple(group) for group in same.values() if len(group) > 1),
        uncaptioned=tuple(example.path for example in examples if not example.captions),
        ignored=tuple(dict.fromkeys(reader.ignored)),
        formats=tuple(dict.fromkeys(reader.formats)),
        orphans=tuple(dict.fromkeys(reader.orphans)),
        upright_masks=tuple(dict.fromkeys(either)),
    )
    return Dataset(tuple(examples), report)


def _misfit(example: Example, looks: Mapping[Path, Look | str]) -> str | None:
    """What is wrong with the shape of a picture's mask; what cannot be read is told elsewhere."""
    picture, mask = looks[example.path], looks[example.mask] if isinstance(example.mask, Path) else ""
    if isinstance(picture, str) or isinstance(mask, str) or turn_of(mask, picture) is not None:
        return None
    assert isinstance(example.mask, Path)
    theirs, ours = ("x".join(map(str, size)) for size in (mask.size, picture.size))
    upright = (
        f" once upright ({'x'.join(map(str, picture.stored))} in its file)" if picture.stored != picture.size else ""
    )
    told = f"its mask {shown(Path(example.mask.name))} is {theirs} and the picture {ours}{upright}"
    return f"{told}, which is another shape; save the mask in the picture's size, or remove it"


def _require(place: Path, reader: _Reader, examples: list[Example]) -> None:
    subjects = [example for example in examples if not example.regularisation]
    others = [*reader.ignored, *reader.formats][:5]
    beyond = f"; not read: {', '.join(map(shown, others))}" if others else ""
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
        self.formats: list[Path] = []
        self.orphans: list[Path] = []
        self.read: dict[Path, bool] = {}  # folders, and whether a list says what of them and below belongs to the set

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

    def pictures(self, folder: Path, subset: Subset) -> bool:
        """The pictures of one folder; true where a list says which."""
        files, name = _entries(folder)[0], folder.resolve().name
        names = {path.name.lower(): path for path in files} | {path.name: path for path in files}
        rows: dict[Path, tuple[str, ...] | None] = {path: None for path in files if _is_picture(path)}
        masks = {path for path in files if path.name.lower().endswith(MASK)}
        listed = self.read[folder] = METADATA in names
        if listed:
            said, wrong = read_metadata(names[METADATA])
            self.bad += [(names[METADATA], "; ".join(wrong))] if wrong else []
            chosen = {folder / name: captions for name, captions in said.items()}
            self.ignored += [path for path in rows if path not in chosen]
            rows = dict(chosen)
        foreign = [path for path in files if path.suffix.lower() in FOREIGN and path not in rows]
        self.formats += foreign
        if not listed:
            self.orphans += _orphans(files, [*rows, *foreign], subset.caption_extensions)
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

    def beyond(self) -> None:
        """Folders below those that were read that hold pictures, the topmost of each branch; only names are looked at."""
        known = {folder.resolve() for folder in self.read}
        below = [sub for folder, listed in self.read.items() if not listed for sub in _entries(folder)[1]]
        for top in below:
            walk = os.walk(top, onerror=lambda error: self.ignored.append(Path(error.filename)))
            for here, folders, files in walk:
                if Path(here).resolve() in known:
                    folders.clear()
                elif any(name[0] != "." and _is_picture(Path(name), (*IMAGES, *FOREIGN)) for name in files):
                    self.ignored.append(Path(here))
                    folders.clear()
                folders[:] = sorted(name for name in folders if name[0] != ".")

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


def _is_picture(path: Path, kinds: tuple[str, ...] = IMAGES) -> bool:
    return path.suffix.lower() in kinds and not path.name.lower().endswith(MASK)


def _orphans(files: Iterable[Path], pictures: Iterable[Path], extensions: Sequence[str]) -> list[Path]:
    """Files with a caption's ending that no picture asks for."""
    endings = tuple(ending.lower() for ending in extensions)
    asked = {(name + ending).lower() for path in pictures for name in (path.stem, path.name) for ending in endings}
    return [path for path in files if path.name.lower().endswith(endings) and path.name.lower() not in asked]


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
