"""diffusion-pipe's dataset file: folders, each trained at each of its resolutions.

    resolutions = [512, [1280, 720]]      areas; a folder's own settings override those above the folders
    enable_ar_bucket = false              every image is cropped to a square; otherwise to the closest of num_ar_buckets
                                          ratios from min_ar to max_ar, or of ar_buckets, with sides in steps of 16
    cache_shuffle_num = 4                 each image is seen with four shuffled captions per epoch
    [[directory]] path, num_repeats, ...

micro_batch_size_per_gpu may be a list of (size, batch): the closest size to a resolution counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from inweave.checked import for_message
from inweave.training.config.translate import Translation
from inweave.training.config.values import (
    is_off,
    names,
    parse_bool,
    parse_int,
    parse_number,
    parse_sizes,
    with_setting_name,
)
from inweave.training.importers.datasets import Folder, put_folders
from inweave.training.importers.defaults import defaults
from inweave.training.importers.files import leaves_of
from inweave.training.importers.readers import parse_resolutions

_STEP: Final = 16  # sides of images are multiples of this
_BUCKET_STEP: Final = 64
_READ = names("""
    resolutions enable_ar_bucket min_ar max_ar num_ar_buckets ar_buckets num_repeats caption_prefix shuffle_tags
    cache_shuffle_num cache_shuffle_delimiter path control_path size_buckets
""")
_HARMLESS = names("shuffle_metadata")
_UNSUPPORTED = {
    "mask_path": "masks are files next to their images, such as photo-masklabel.png",
    "default_mask_file": "masks are files next to their images, such as photo-masklabel.png",
    "online_captions": "captions are files next to images, not lists in captions.json",
    "subsample_ratio": "all images of a folder are trained",
}


def put_dataset(out: Translation, dataset: Mapping[str, Any] | None) -> None:
    """Set the dataset, and what holds for its captions; the batch size alone if the file is missing."""
    name = out.get("dataset")
    if dataset is None:
        why = "is not next to the configuration; put it there, or name a folder with --dataset"
        out.unsupported("dataset", f"{for_message(name)} {why}; its resolutions, buckets and captions are not known")
        out.fields["batch_size"] = _batch_size(out, None)
    else:
        put_folders(out, _folders(out, dataset))
    out.mapping["dataset"] = "dataset"
    out.fields |= {"upscale": True, "drop_incomplete": True, "wildcards": False, "caption_extensions": [".txt"]}
    out.unsupported("captions", "the lines of a caption file are one caption there; here the first is used")


def batch_sizes(out: Translation) -> list[tuple[float | None, int]]:
    """Return (size, batch) pairs, of which a single batch has no size; those of images count before those of videos."""
    for name in ("image_micro_batch_size_per_gpu", "micro_batch_size_per_gpu"):
        pairs = [value for key, value in out.settings.items() if key.startswith(f"{name}.")]
        if pairs:
            if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
                raise ValueError(f"expected pairs of a size and a batch size, got {for_message(pairs)}")
            return [(parse_number(size), parse_int(batch)) for size, batch in pairs]
        if (value := out.get(name)) is not None:
            return [(None, parse_int(value))]
    return [(None, 1)]


def _batch_size(out: Translation, side: float | None) -> int:
    pairs = batch_sizes(out)
    if len({batch for _, batch in pairs}) == 1:
        return pairs[0][1]
    if side is None:
        out.unsupported("micro_batch_size_per_gpu", "the resolutions are not known; set batch_size")
        return min(batch for _, batch in pairs)
    return min(pairs, key=lambda pair: abs((pair[0] or 0) - side))[1]


def _folders(out: Translation, dataset: Mapping[str, Any]) -> list[Folder]:
    listed = dataset.get("directory")
    listed = [listed] if isinstance(listed, Mapping) else listed
    if not isinstance(listed, list) or not listed or not all(isinstance(each, Mapping) for each in listed):
        out.problems.append(f"dataset: expected [[directory]] tables, got {for_message(listed)}")
        return []
    usual = {key: value for key, value in dataset.items() if key != "directory"}
    folders: list[Folder] = []
    for index, own in enumerate(listed):
        at, table = f"directory.{index}", {**defaults("diffusion_pipe", "dataset"), **usual, **own}
        try:
            folders += _of_directory(out, at, table)
        except (ValueError, TypeError, ArithmeticError) as error:
            out.problems.append(with_setting_name(str(error), {f"{at}.{key}": each for key, each in table.items()}))
    for key, value in usual.items():
        _account(out, key, value)
    for index, own in enumerate(listed):
        for key, value in own.items():
            _account(out, f"directory.{index}.{key}", value)
    _put_batches(out, folders)
    return folders


def _account(out: Translation, name: str, value: Any) -> None:
    """Record what became of one setting; refuse those that change training and have no equivalent."""
    key = name.rpartition(".")[2]
    if key in _READ:
        out.mapping[name] = "dataset"
    elif key in _HARMLESS:
        out.note(name, "only affects the order in which images are cached")
    elif key == "frame_buckets":
        if value in (1, [1]):
            out.unset.append(name)
        else:
            out.unsupported(name, "only images are trained; videos are left out")
    elif key == "skip_empty_caption":
        out.mapping[name] = "dataset"
    elif key in _UNSUPPORTED and not is_off(value) and not (key == "subsample_ratio" and value == 1):
        out.refuse(name, f"{for_message(value)}: {_UNSUPPORTED[key]}")
    elif key in _UNSUPPORTED or is_off(value):
        out.unset.append(name)
    else:
        out.unknown += list(leaves_of({name: value}))[:20]


def _of_directory(out: Translation, at: str, table: Mapping[str, Any]) -> list[Folder]:
    """Return a folder for each of its resolutions, which may differ in size, limits of buckets and batch."""
    path = table.get("path")
    if not isinstance(path, str) or not path:
        out.problems.append(f"{at}.path: expected the path of a folder, got {for_message(path)}")
        return []
    options: dict[str, Any] = {"caption_extension": ".txt", "enable_bucket": False}
    repeats = parse_number(table["num_repeats"])
    if repeats != int(repeats) or repeats < 1:
        out.refuse(f"{at}.num_repeats", f"{repeats:g}: images are repeated a whole number of times")
    variants = parse_int(table["cache_shuffle_num"])
    if variants or parse_bool(table["shuffle_tags"]):
        variants = max(variants, 1)
        options["shuffle_caption"] = True
        options["caption_separator"] = str(table["cache_shuffle_delimiter"])
        out.fields["caption_variants"] = max(variants, out.fields.get("caption_variants", 1))
    if prefix := str(table["caption_prefix"]):
        options["caption_prefix"] = prefix
        if not prefix.endswith(" ") or prefix.endswith("  "):
            out.unsupported(f"{at}.caption_prefix", f"{for_message(prefix)}: one space follows it here")
    if control := table.get("control_path"):
        options["control"] = [str(control)]
        out.unsupported(f"{at}.control_path", "references keep their own shape here; set reference_resolution")
    if parse_bool(table["skip_empty_caption"]):
        out.unsupported("skip_empty_caption", "images without a caption are left out there; here they have none")
    count = max(int(repeats), 1) * max(variants, 1)
    sizes = _sizes(out, at, table)
    return [Folder(f"{at}.path", path, [size], count, options={**options, **own}) for size, own in sizes]


def _sizes(out: Translation, at: str, table: Mapping[str, Any]) -> list[tuple[int | list[int], dict[str, Any]]]:
    """Return (a side or an exact size, the options of its buckets) of each resolution."""
    if table.get("size_buckets") is not None:
        return _exact_sizes(out, at, table["size_buckets"])
    sides = parse_resolutions(table.get("resolutions"))
    if not parse_bool(table["enable_ar_bucket"]):
        return [(_rounded(side), {}) for side in sides]
    ratios = _ratios(table)
    if len(set(ratios)) == 1:
        root = math.sqrt(ratios[0])
        return [([_rounded(side * root), _rounded(side / root)], {}) for side in sides]
    least, most = min(*ratios, 1.0), max(*ratios, 1.0)
    widest = math.sqrt(max(most, 1 / least))
    return [
        (
            side,
            {
                "enable_bucket": True, "bucket_reso_steps": min(_BUCKET_STEP, side),
                "min_bucket_reso": max(int(side / widest) // _BUCKET_STEP, 1) * _BUCKET_STEP,
                "max_bucket_reso": -(-math.ceil(side * widest) // _BUCKET_STEP) * _BUCKET_STEP,
            },
        )
        for side in sides
    ]  # fmt: skip


def _ratios(table: Mapping[str, Any]) -> list[float]:
    """Return the ratios of width to height of the buckets."""
    if listed := table.get("ar_buckets"):
        pairs = [parse_sizes(each) if isinstance(each, list) else [parse_number(each), 1.0] for each in listed]
        ratios = [pair[0] / pair[1] for pair in pairs if len(pair) == 2]
        if len(ratios) != len(listed):
            raise ValueError(f"expected ratios, or pairs of width and height, got {for_message(listed)}")
    else:
        ratios = [parse_number(table.get(name)) for name in ("min_ar", "max_ar")]
        ratios = ratios[:1] if parse_int(table.get("num_ar_buckets")) == 1 else ratios
    if min(ratios) <= 0:
        raise ValueError(f"expected a ratio above 0, got {for_message(min(ratios))}")
    return ratios


def _exact_sizes(out: Translation, at: str, listed: Any) -> list[tuple[int | list[int], dict[str, Any]]]:
    sizes = [each for each in listed if isinstance(each, list) and len(each) == 3] if isinstance(listed, list) else []
    images = [parse_sizes(each[:2]) for each in sizes if parse_int(each[2]) == 1]
    if not sizes or len(sizes) != len(listed) or not images:
        raise ValueError(f"expected lists of width, height and one frame, got {for_message(listed)}")
    if len(images) > 1:
        out.refuse(f"{at}.size_buckets", f"{for_message(listed)}: the sizes of buckets are not chosen one by one")
    return [([_rounded(side) for side in images[0]], {})]


def _rounded(side: float) -> int:
    return max(round(side / _STEP) * _STEP, _STEP)


def _put_batches(out: Translation, folders: list[Folder]) -> None:
    """Set the batch size of the run, or of each resolution."""
    sizes = [_batch_size(out, math.sqrt(math.prod(_pair(folder.resolutions[0])))) for folder in folders]
    if len(set(sizes)) == 1:
        out.fields["batch_size"] = sizes[0]
    elif sizes:
        out.fields["batch_size"] = min(sizes)
        for folder, size in zip(folders, sizes, strict=True):
            folder.options["batch_size"] = size
    for name in ("image_micro_batch_size_per_gpu", "micro_batch_size_per_gpu"):
        out.mapping |= {key: "batch_size" for key in out.settings if key == name or key.startswith(f"{name}.")}


def _pair(size: int | list[int]) -> list[int]:
    return size if isinstance(size, list) else [size, size]
