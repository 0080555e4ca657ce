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

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, FormatError, amount
from inweave.files.paths import exists, is_file, is_folder, printable_path
from inweave.training.config.dataset_toml import Subset, normalize_extension
from inweave.training.config.toml import parse_json, read_text_file
from inweave.training.data.images import ImageInfo, mask_orientation
from inweave.training.data.metadata import LISTED, LISTS, is_list, refuse_parquet
from inweave.training.data.references import ReferenceImage
from inweave.training.data.scanner import IMAGES, Scanner, split_folder
from inweave.training.data.types import Dataset, Example, ReadReport
from inweave.training.data.verdicts import OnFile, Verdicts
from inweave.training.importers.folder_lists import tables_of_list

METADATA = LISTS[0]


def read_dataset(
    path: str | os.PathLike[str] | Mapping[str, Any],
    *,
    caption: str | None = None,
    caption_extensions: Sequence[str] = (".txt", ".caption"),
    skip_unreadable: bool = False,
    control: Sequence[str] = (),
    cache: Path | None = None,
    on_file: OnFile | None = None,
) -> Dataset:
    """Read and check a dataset; ``caption`` is for images without one, regularization images excepted.

    ``path`` may be the tables of a dataset file; their paths start from the current folder. ``control``: folders of
    reference images, where no table names its own. ``cache``: the folder of
    verdicts on files; ``on_file``: called with the number of files that are checked and of all.
    """
    scanner, notes = Scanner(), list[str]()
    base = Subset(caption_extensions=tuple(map(normalize_extension, caption_extensions)), control=tuple(control))
    if isinstance(path, Mapping):
        tables, path = dict(path), Path()
        scanner.scan_tables(tables, path, base, "dataset")
    elif is_folder(path := Path(path)):
        scanner.root = path
        scanner.scan_tree(split_folder(path, *scanner.entries(path)), base)
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
    seen = [reference.path for each in scanner.examples for reference in each.references]
    files = dict.fromkeys([*(each.path for each in scanner.examples), *sorted(masks), *seen])
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
        if any(reference.path in unusable for reference in each.references):
            continue
        mask = "alpha" if each.mask is None and info.has_alpha and each.subset.alpha_mask else each.mask
        captions = each.captions or ((caption,) if caption is not None and not each.regularization else ())
        example = replace(each, size=info.size, sha256=info.sha256, mask=mask, captions=captions)
        if each.references:
            example = replace(example, references=tuple(_probed(reference, infos) for reference in each.references))
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


def _probed(reference: ReferenceImage, infos: Mapping[Path, ImageInfo | str]) -> ReferenceImage:
    info = infos[reference.path]
    assert isinstance(info, ImageInfo)
    return replace(reference, size=info.size, sha256=info.sha256)


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


def _same_captions(scanner: Scanner) -> tuple[tuple[Path, ...], ...]:
    """Group images with the same captions from different places."""
    shared = [set(users) for users in scanner.caption_users.values()]
    groups = [group for group in scanner.written.values() if len(group) > 1 and set(group) not in shared]
    return tuple(tuple(group) for group in groups)


def _ensure_trainable(path: Path, scanner: Scanner, examples: list[Example]) -> None:
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
            f"{printable_path(path)}: none of {amount(len(subjects), 'image')} has a caption; looked for "
            f'{", ".join(extensions)} files next to {printable_path(subjects[0].path)} and the others, for "text" or '
            f'"caption" in {METADATA}, '
            "and for words in folder names like '10_name'; write captions, or set `caption`, one for all images"
        )
