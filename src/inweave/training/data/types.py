"""The parts of a dataset of images: the settings of its subsets, examples, and the findings of reading them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from inweave.training.config.dataset_toml import Subset
from inweave.training.config.schema import TrainConfig
from inweave.training.data.references import ReferenceImage


def subset_defaults(config: TrainConfig) -> dict[str, Any]:
    """Return the run's values for the settings that a subset may leave open, by the names of its fields."""
    return {
        "shuffle_tags": config.shuffle_tags, "keep_tokens": config.keep_tokens, "tag_separator": config.tag_separator,
        "caption_dropout": config.caption_dropout, "tag_dropout": config.tag_dropout, "flip": config.flip,
        "random_crop": config.crop == "random", "wildcards": config.wildcards,
    }  # fmt: skip


def with_defaults(subset: Subset, defaults: Mapping[str, Any]) -> Subset:
    """Return a subset with its open settings filled in from the run's (`subset_defaults`)."""
    return replace(subset, **{name: value for name, value in defaults.items() if getattr(subset, name) is None})


def fingerprint_fields(subset: Subset, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a subset, with the run's filled in, for a fingerprint of the data."""
    fields = asdict(with_defaults(subset, defaults))
    for name in ("numbered", "balance", "subfolders", "metadata", "control"):
        del fields[name]  # the place of images and their repeats, not their content
    return fields


@dataclass(frozen=True, slots=True)
class Example:
    """One image with its captions; an image without a caption has an empty tuple."""

    path: Path
    captions: tuple[str, ...]
    repeats: int
    size: tuple[int, int]
    mask: Path | Literal["alpha"] | None
    regularization: bool
    sha256: str
    subset: Subset
    folder: str  # the name under which its tags are counted
    mask_orientation: int = 1  # EXIF orientation that aligns the mask's file with the image
    mask_is_black: bool = False
    references: tuple[ReferenceImage, ...] = ()  # of an edit model, in order


@dataclass(frozen=True, slots=True)
class ReadReport:
    """The findings of reading a dataset, besides its examples."""

    unreadable: tuple[tuple[Path, str], ...] = ()  # with the reason
    duplicates: tuple[tuple[Path, ...], ...] = ()  # groups of images with the same pixels
    uncaptioned: tuple[Path, ...] = ()
    ignored: tuple[Path, ...] = ()  # folders and files that look as if they belonged to the dataset
    unsupported_formats: tuple[Path, ...] = ()
    orphan_captions: tuple[Path, ...] = ()  # caption files without an image
    ambiguous_masks: tuple[Path, ...] = ()  # EXIF rotates the image, and the mask's size fits either way
    first_frames: tuple[Path, ...] = ()  # animations and files of several pages, of which the first frame is used
    shared_captions: tuple[tuple[Path, tuple[Path, ...]], ...] = ()  # caption files of several images, with these
    same_captions: tuple[tuple[Path, ...], ...] = ()  # groups of images with the same captions, each written for itself
    encodings: tuple[tuple[Path, str], ...] = ()  # of caption files that are not UTF-8
    other_files: tuple[Path, ...] = ()  # neither images nor captions
    decoded: int = 0  # files that were not known from an earlier check
    notes: tuple[str, ...] = ()  # on the list of folders that was read, and the cache of checks


@dataclass(frozen=True, slots=True)
class Dataset:
    examples: tuple[Example, ...]
    report: ReadReport
