"""The report on a dataset: buckets, crops, steps, and everything worth checking before training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, amount
from inweave.files.paths import printable_path
from inweave.training.data.batches import arrange, epoch_length, total_steps
from inweave.training.data.buckets import BucketFit, BucketRules
from inweave.training.data.types import Dataset, Example

#: findings of reading a dataset that are lists of paths
_PATHS = ("uncaptioned", "ignored", "unsupported_formats", "orphan_captions", "ambiguous_masks", "first_frames",
          "other_files")  # fmt: skip


@dataclass(frozen=True, slots=True)
class DatasetReport:
    """Numbers count images unless the comment says otherwise; lists hold paths."""

    images: int
    regularization: int
    repeated: int  # per epoch, with repeats
    masks: int
    references: dict[str, int]  # images by the number of their reference images; nothing without any
    captions: int  # texts
    several_captions: int
    buckets: dict[str, int]  # by size
    upscaled: int
    cropped_10: int  # lose more than 10 % of their area
    cropped_25: int
    batches_per_epoch: int
    steps_per_epoch: int
    total_steps: int
    uncaptioned: list[str]
    own_bucket: list[str]  # smaller than their bucket, and nothing is enlarged
    too_small: list[str]
    duplicates: list[list[str]]
    unreadable: dict[str, str]  # with the reason; an image whose mask is unreadable or of another shape is left out
    ignored: list[str]  # folders that are not read, images a metadata file does not list, masks without an image
    unsupported_formats: list[str]
    orphan_captions: list[str]  # caption files without an image
    black_masks: list[str]  # these images contribute nothing to training
    unused_masks: list[str]  # images with a mask whose loss is not masked
    ambiguous_masks: list[str]  # EXIF rotates the image, and the mask's size fits either way
    most_cropped: dict[str, float]  # those that lose more than 10 % of their area, with the fraction; the most first
    first_frames: list[str]  # animations and files of several pages, of which the first frame is used
    shared_captions: dict[str, list[str]]  # caption files of several images, with these
    same_captions: list[list[str]]  # images whose captions are the same, word for word
    encodings: dict[str, str]  # of caption files that are not UTF-8
    other_files: list[str]  # neither images nor captions

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report as lines of text: numbers first, then warnings."""
        first = f"{amount(self.images, 'image')}, {self.repeated} per epoch with repeats"
        first += f"; {self.regularization} of them for regularization" if self.regularization else ""
        first += f"; {self.masks} with masks" if self.masks else ""
        first += "".join(f"; {count} with {number} of reference" for number, count in self.references.items())
        return [
            first,
            f"{amount(self.captions, 'caption')}; images with several: {self.several_captions}",
            "buckets: " + ", ".join(f"{size} ({count})" for size, count in self.buckets.items()),
            f"steps: {self.steps_per_epoch} per epoch of {amount(self.batches_per_epoch, 'batch')}, "
            f"{self.total_steps} in total",
            f"crops: more than 10 % of the area of {amount(self.cropped_10, 'image')}, "
            f"more than 25 % of {self.cropped_25}",
            *_path_line("cropped most", [f"{name} ({part:.0%})" for name, part in self.most_cropped.items()], 10),
            *([f"enlarged to fill their bucket: {self.upscaled}"] if self.upscaled else []),
            *_path_line("smaller than their bucket, in one of their own", self.own_bucket),
            *_path_line(
                "masks taken as upright, although EXIF rotates the image and they fit either way", self.ambiguous_masks
            ),
            *_path_line("the same caption, word for word", [_short_group(group) for group in self.same_captions]),
            *_path_line("not part of the dataset, neither images nor captions", self.other_files, 10),
            *self.warnings(),
        ]  # fmt: skip

    def warnings(self) -> list[str]:
        """Return a line for each kind of file that is not trained on, or not as intended."""
        reasons = [f"{name} ({why})" for name, why in self.unreadable.items()]
        shared = [f"{file} ({', '.join(images)})" for file, images in self.shared_captions.items()]
        kinds = (
            ("without a caption", self.uncaptioned if self.captions else []),
            ("too small for any bucket, left out", self.too_small),
            ("one caption file for several images, such as a.txt for a.png and a.jpg", shared),
            ("caption files that are not UTF-8", [f"{name} (read as {each})" for name, each in self.encodings.items()]),
            ("animated or of several pages, the first frame is used", self.first_frames),
            ("the same pixels", [" = ".join(group) for group in self.duplicates]),
            ("unreadable, left out", reasons),
            ("masks that are all black, so that nothing is trained on the image", self.black_masks),
            ("masks that are not used, since masked_loss is off", self.unused_masks),
            ("not part of the dataset", self.ignored),
            (
                "not part of the dataset, unsupported formats; save them as .png, .jpg or .webp",
                self.unsupported_formats,
            ),
            ("not part of the dataset, captions without an image", self.orphan_captions),
        )
        return [line for what, names in kinds for line in _path_line(what, names)]


def _path_line(what: str, names: list[str], limit: int = 5) -> list[str]:
    """Return a line with the first names; nothing without names."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return [f"{what}: {len(names)}: {', '.join(names[:limit])}{more}"] if names else []


def _short_group(names: list[str]) -> str:
    return " = ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _most_cropped(pairs: list[tuple[Example, BucketFit]]) -> dict[str, float]:
    """Map images to the cropped share of their area; of several resolutions the largest share counts."""
    cropped: dict[str, float] = {}
    for example, place in sorted(pairs, key=lambda pair: -pair[1].cropped_fraction):
        if place.cropped_fraction > 0.10:
            cropped.setdefault(printable_path(example.path), round(place.cropped_fraction, 4))
    return cropped


def check_dataset(
    dataset: Dataset,
    rules: BucketRules,
    *,
    batch_size: int = 1,
    accumulation: int = 1,
    epochs: int | None = None,
    steps: int | None = None,
    epoch_steps: str = "exact",
    masked_loss: bool | None = None,
    lengths: Sequence[int] = (),
    whole: bool = False,
    shapes: Sequence[Hashable] = (),
    held_out: Callable[[list[BucketFit | None]], Collection[int]] = lambda places: (),
) -> DatasetReport:
    """Return the report on a dataset in a run of these settings; ``accumulation``: micro-batches of all processes.

    Without ``masked_loss`` unused masks are not reported; ``lengths``, ``whole`` and ``shapes``: see `arrange`.
    """
    if accumulation < 1 or (epochs is None) == (steps is None) or (epochs or steps or 0) < 1:
        raise ConfigError(
            f"accumulation {accumulation}, epochs {epochs}, steps {steps}: expected accumulation of 1 or more, and "
            "either epochs or steps, of 1 or more"
        )
    examples = dataset.examples
    placements, order = arrange(dataset, rules, batch_size=batch_size, lengths=lengths, whole=whole, shapes=shapes)
    order = order.without(held_out(placements))
    pairs = [(example, place) for example, place in zip(examples, placements, strict=True) if place]
    cropped = [place.cropped_fraction for _, place in pairs]
    report = dataset.report
    masked = [each for each in examples if each.mask is not None]
    used = [masked_loss is not False or each.subset.alpha_mask for each in masked]
    return DatasetReport(
        images=len(examples),
        regularization=sum(example.regularization for example in examples),
        repeated=sum(order.repeats),
        masks=len(masked),
        references=_reference_counts(examples),
        captions=sum(len(example.captions) for example in examples),
        several_captions=sum(len(example.captions) > 1 for example in examples),
        buckets={str(bucket): count for bucket, count in sorted(Counter(place.bucket for _, place in pairs).items())},
        upscaled=sum(place.scale > 1 for _, place in pairs),
        cropped_10=sum(fraction > 0.10 for fraction in cropped),
        cropped_25=sum(fraction > 0.25 for fraction in cropped),
        batches_per_epoch=len(order),
        steps_per_epoch=-(-len(order) // accumulation),
        total_steps=total_steps(
            epoch_length(len(order), accumulation, epoch_steps), accumulation, steps=steps, epochs=epochs
        ),
        own_bucket=_names(example.path for example, place in pairs if place.own_bucket),
        too_small=_names(each.path for each, place in zip(examples, placements, strict=True) if place is None),
        duplicates=[*map(_names, report.duplicates)],
        unreadable={printable_path(path): why for path, why in report.unreadable},
        black_masks=_names(e.path for e, counts in zip(masked, used, strict=True) if e.mask_is_black and counts),
        unused_masks=_names(e.path for e, counts in zip(masked, used, strict=True) if not counts),
        most_cropped=_most_cropped(pairs),
        shared_captions={printable_path(file): _names(users) for file, users in report.shared_captions},
        same_captions=[*map(_names, report.same_captions)],
        encodings={printable_path(file): name for file, name in report.encodings},
        **{name: _names(getattr(report, name)) for name in _PATHS},
    )


def _reference_counts(examples: Iterable[Example]) -> dict[str, int]:
    counts = Counter(len(example.references) for example in examples)
    return {str(number): count for number, count in sorted(counts.items())} if counts.keys() - {0} else {}


def _names(paths: Iterable[Path]) -> list[str]:
    return [printable_path(path) for path in paths]
