"""What is checked of a training set: a setting in its file, a picture, and the set as a run will see it.

setting   a field of a dataclass carries its name in TOML, what fits it, and the tables it may stand in
picture   decoded to the last pixel and turned upright; the hash is that of 8-bit RGBA, so the same picture in
          two lossless files is one picture
mask      grey, of its picture's shape: sides within 1 % or a pixel of it; one of the exact size a picture that EXIF
          lays on its side has in its file is turned with it
set       every picture in its bucket, what the crops cost, and how many steps that makes:

          steps of an epoch = ceil(batches / accumulation)
          total             = ceil(epochs * batches / accumulation), or the number of steps that was asked for
"""

from __future__ import annotations

import difflib
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from PIL import Image, ImageOps

from inweave.errors import ConfigError
from inweave.training.data.buckets import Order, Placement, Rules, assign
from inweave.training.data.captions import dotted, shown

if TYPE_CHECKING:
    from inweave.training.data.reader import Dataset, Subset

T = TypeVar("T")
_ORIENTATION = 0x0112
_TABLES = {"g": "[general]", "d": "[[datasets]]", "s": "[[datasets.subsets]]"}


class Kind(NamedTuple):
    expected: str
    fits: Callable[[Any], bool]
    made: Callable[[Any], Any] = lambda value: value


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


def _frame(value: Any) -> bool:
    sides = value if isinstance(value, list) and len(value) == 2 else [value]
    return all(map(_whole(1), sides))


KINDS = {
    "flag": Kind("true or false", lambda value: isinstance(value, bool)),
    "not": Kind("true or false", lambda value: isinstance(value, bool), lambda value: not value),
    "count": Kind("a whole number of 1 or more", _whole(1)),
    "natural": Kind("a whole number of 0 or more", _whole(0)),
    "share": Kind("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1),
    "text": Kind("text", lambda value: isinstance(value, str)),
    "mark": Kind("text of one character or more", lambda value: isinstance(value, str) and value != ""),
    "ending": Kind('".txt" or the like', lambda value: isinstance(value, str), lambda value: (dotted(value),)),
    "frame": Kind("a side or [width, height] in pixels", _frame, lambda v: (v, v) if isinstance(v, int) else tuple(v)),
}


def setting(name: str, default: Any, kind: str, tables: str = "gds") -> Any:
    """A field that a table of a dataset file may set."""
    return field(default=default, metadata={"name": name, "kind": KINDS[kind], "tables": tables})


def taken(table: Any, level: str, where: str, above: T, wrong: list[str], also: tuple[str, ...] = ()) -> T:
    """``above`` with what a table says; what does not fit is added to ``wrong``."""
    if not isinstance(table, dict):
        wrong.append(f"{where}: expected a table of settings, got {table!r}")
        return above
    known = {each.metadata["name"]: each for each in fields(above)}  # type: ignore[arg-type]
    here = [name for name, each in known.items() if level in each.metadata["tables"]] + list(also)
    said = {}
    for name, value in table.items():
        if name in also:
            continue
        if name not in known:
            near = difflib.get_close_matches(name, here, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(here)}"
            wrong.append(f"{where}.{name}: there is no such setting; {hint}")
            continue
        kind, tables = known[name].metadata["kind"], known[name].metadata["tables"]
        if level not in tables:
            wrong.append(f"{where}.{name}: belongs into {' or '.join(_TABLES[each] for each in tables)}")
        elif not kind.fits(value):
            wrong.append(f"{where}.{name}: expected {kind.expected}, got {value!r}")
        else:
            said[known[name].name] = kind.made(value)
    return replace(above, **said)  # type: ignore[type-var]


def tables(data: dict[str, Any], name: str, above: str, wrong: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, table) of every table of a list."""
    said = data.get(name)
    if not isinstance(said, list) or not said or not all(isinstance(each, dict) for each in said):
        wrong.append(f"{above}{name}: expected [[{'datasets.' if above else ''}{name}]] tables, got {said!r}")
        return
    yield from ((f"{above}{name}[{number}]", each) for number, each in enumerate(said))


class Look(NamedTuple):
    """What was seen of a picture or a mask."""

    size: tuple[int, int]  # upright
    sha256: str  # of all pixels
    alpha: bool  # whether it has such a channel
    black: bool  # the mask it is, or has in its alpha channel, is open nowhere
    stored: tuple[int, int]  # before it was turned upright
    turn: int  # EXIF's number for how that is done; 1: not at all


def look(path: Path, mask: bool = False) -> Look | str:
    """A file decoded to the last pixel, or why it cannot be read."""
    try:
        with Image.open(path) as image:
            said = image.getexif().get(_ORIENTATION)
            upright = ImageOps.exif_transpose(image)
            deep = upright.mode.startswith(("I", "F"))  # more than 8 bits: converting would merge different pictures
            pixels = upright if deep else upright.convert("RGBA")
            digest = hashlib.sha256(f"{pixels.mode} {pixels.width}x{pixels.height} ".encode())
            digest.update(pixels.tobytes())
            alpha = upright.has_transparency_data
            levels = grey(upright) if mask else pixels.getchannel("A") if alpha and not deep else None
            black = levels is not None and levels.getextrema() == (0, 0)
            turn = said if isinstance(said, int) and 1 < said <= 8 else 1  # anything may stand there
            return Look(pixels.size, digest.hexdigest(), alpha, black, image.size, turn)
    except Exception as error:  # decoders raise whatever a broken file leads them to
        return f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()


def grey(image: Image.Image) -> Image.Image:
    """In 8 bits; of 16 the upper ones, since a plain conversion would cut everything above 255."""
    if not image.mode.startswith("I"):
        return image.convert("L")
    deep = np.asarray(image).astype(np.int64)
    return Image.fromarray((deep.clip(0, 65535) >> 8).astype(np.uint8))


def turn_of(mask: Look, picture: Look) -> int | None:
    """How a mask is turned to lie on its picture, in EXIF's numbers; None where its shape is another."""
    if mask.turn == 1 and mask.stored == picture.stored != picture.size:  # made from the file as it is stored
        return picture.turn
    (across, down), (width, height) = mask.size, picture.size
    ours, theirs = across * height, down * width
    rounding = abs(ours - theirs) < max(across, down, width, height)  # less than a pixel of one of the four sides
    return mask.turn if rounding or max(ours, theirs) <= 1.01 * min(ours, theirs) else None


def arrange(
    dataset: Dataset, rules: Rules, *, batch_size: int = 1, seed: int = 0, drop_last: bool = False
) -> tuple[list[Placement | None], Order]:
    """Where every example goes, None where it has no place, and the order of the run; the check counts the same."""
    if batch_size < 1:
        raise ConfigError(f"batch size {batch_size}: expected 1 or more")
    mine = {subset: _rules_of(subset, rules) for subset in {example.subset for example in dataset.examples}}
    placements: list[Placement | None] = []
    slots: list[Hashable] = []
    sizes: dict[Hashable, int] = {}
    for example in dataset.examples:
        here = mine[example.subset]
        small = not here.upscale and min(example.size) < here.step
        placement = None if small else assign(example.size, here)
        size = example.subset.batch_size or batch_size
        placements.append(placement)
        slots.append((placement and placement.bucket, size))
        sizes[slots[-1]] = size
    repeats = [example.repeats if place else 0 for example, place in zip(dataset.examples, placements, strict=True)]
    prior = tuple(example.regularisation for example in dataset.examples)
    return placements, Order(tuple(slots), tuple(repeats), sizes, seed, prior, drop_last)


def _rules_of(subset: Subset, rules: Rules) -> Rules:
    """The run's rules, with what a subset says otherwise."""
    theirs: dict[str, Any] = {"resolution": subset.resolution, "step": subset.bucket_step, "upscale": subset.upscale}
    theirs |= {"minimum": subset.bucket_minimum, "maximum": subset.bucket_maximum, "enabled": subset.bucketed}
    if subset.resolution and subset.resolution != rules.frame:  # the run's limits were meant for the run's resolution
        rules = replace(rules, minimum=None, maximum=None)
    return replace(rules, **{name: value for name, value in theirs.items() if value is not None})


@dataclass(frozen=True, slots=True)
class DatasetReport:
    """Numbers of pictures unless said otherwise; lists hold their paths."""

    pictures: int
    regularisation: int
    repeated: int  # in an epoch, repeats counted
    masks: int
    captions: int  # texts
    several_captions: int
    buckets: dict[str, int]  # by size
    enlarged: int
    cropped_10: int  # lose more than 10 % of their area
    cropped_25: int
    batches_per_epoch: int
    steps_per_epoch: int
    total_steps: int
    uncaptioned: list[str]
    own_bucket: list[str]  # smaller than their bucket, and nothing is enlarged
    too_small: list[str]
    dropped: list[str]  # in a bucket that never fills a batch, where short batches are dropped
    duplicates: list[list[str]]
    unreadable: dict[str, str]  # and why; where it is a mask, or one of another shape, its picture is left out
    ignored: list[str]  # folders that are not gone into, pictures a list does not name, masks without a picture
    formats: list[str]  # pictures of a kind that is not read
    orphans: list[str]  # captions without a picture
    black_masks: list[str]  # nothing is learnt from these pictures
    unused_masks: list[str]  # pictures with one, where the loss is not masked
    upright_masks: list[str]  # EXIF turns the picture, and the mask's size does not say whether it is turned already

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people: numbers first, then what is worth a look."""
        told = [f"{self.pictures} pictures, {self.repeated} in an epoch with repeats"]
        told[0] += f"; {self.regularisation} of them for regularisation" if self.regularisation else ""
        told[0] += f"; {self.masks} with masks" if self.masks else ""
        told.append(f"{self.captions} captions; pictures with several: {self.several_captions}")
        told.append("buckets: " + ", ".join(f"{size} ({count})" for size, count in self.buckets.items()))
        told.append(
            f"steps: {self.steps_per_epoch} an epoch of {self.batches_per_epoch} batches, {self.total_steps} in all"
        )
        told.append(f"crops: {self.cropped_10} lose more than 10 % of their area, {self.cropped_25} more than 25 %")
        told += [f"enlarged to fill their bucket: {self.enlarged}"] if self.enlarged else []
        told += _named("smaller than their bucket, in one of their own", self.own_bucket)
        told += _named("masks taken as upright though EXIF turns the picture, fitting either way", self.upright_masks)
        return told + self.left_out()

    def left_out(self) -> list[str]:
        """What is there and is not learnt from, or not as it may have been meant: a line for each kind that occurs."""
        bad = [f"{name} ({why})" for name, why in self.unreadable.items()]
        kinds = (
            ("without a caption", self.uncaptioned if self.captions else []),
            ("too small for any bucket, left out", self.too_small),
            ("in a bucket that never fills a batch, left out", self.dropped),
            ("the same pixels", [" = ".join(group) for group in self.duplicates]),
            ("unreadable, left out", bad),
            ("masks that are all black, so that nothing is learnt from the picture", self.black_masks),
            ("masks that are not used, since masked_loss is off", self.unused_masks),
            ("not part of the set", self.ignored),
            ("not part of the set, of a kind that is not read; save them as .png, .jpg or .webp", self.formats),
            ("not part of the set, captions without a picture", self.orphans),
        )
        return [line for what, names in kinds for line in _named(what, names)]


def _named(what: str, names: list[str]) -> list[str]:
    """One line, or none."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return [f"{what}: {len(names)}: {', '.join(names[:5])}{more}"] if names else []


def check_dataset(
    dataset: Dataset,
    rules: Rules,
    *,
    batch_size: int = 1,
    accumulation: int = 1,
    epochs: int | None = None,
    steps: int | None = None,
    drop_last: bool = False,
    masked_loss: bool | None = None,
    held_out: Callable[[list[Placement | None]], Collection[int]] = lambda places: (),
) -> DatasetReport:
    """The set as a run with these settings sees it; ``accumulation`` counts the batches of all processes.

    Without ``masked_loss`` nothing is said of masks that are not used.
    """
    if accumulation < 1 or (epochs is None) == (steps is None) or (epochs or steps or 0) < 1:
        told = "expected accumulation of 1 or more, and either epochs or steps, of 1 or more"
        raise ConfigError(f"accumulation {accumulation}, epochs {epochs}, steps {steps}: {told}")
    examples = dataset.examples
    placements, order = arrange(dataset, rules, batch_size=batch_size, drop_last=drop_last)
    out = set(held_out(placements))
    order = replace(order, repeats=tuple(0 if n in out else count for n, count in enumerate(order.repeats)), _epochs={})
    placed = [(example, place) for example, place in zip(examples, placements, strict=True) if place]
    per_slot: Counter[Hashable] = Counter()
    for slot, count in zip(order.buckets, order.repeats, strict=True):
        per_slot[slot] += count
    short = {slot for slot, count in per_slot.items() if drop_last and 0 < count < order.size_of(slot)}
    lost = [place.lost for _, place in placed]
    report = dataset.report
    masked = [each for each in examples if each.mask is not None]
    used = [masked_loss is not False or each.subset.alpha_mask for each in masked]
    return DatasetReport(
        pictures=len(examples),
        regularisation=sum(example.regularisation for example in examples),
        repeated=sum(order.repeats),
        masks=len(masked),
        captions=sum(len(example.captions) for example in examples),
        several_captions=sum(len(example.captions) > 1 for example in examples),
        buckets={str(bucket): count for bucket, count in sorted(Counter(place.bucket for _, place in placed).items())},
        enlarged=sum(place.scale > 1 for _, place in placed),
        cropped_10=sum(share > 0.10 for share in lost),
        cropped_25=sum(share > 0.25 for share in lost),
        batches_per_epoch=len(order),
        steps_per_epoch=-(-len(order) // accumulation),
        total_steps=steps if steps is not None else -(-(epochs or 0) * len(order) // accumulation),
        uncaptioned=[shown(path) for path in report.uncaptioned],
        own_bucket=[shown(example.path) for example, place in placed if place.own],
        too_small=[shown(each.path) for each, place in zip(examples, placements, strict=True) if place is None],
        dropped=[shown(each.path) for each, slot in zip(examples, order.buckets, strict=True) if slot in short],
        duplicates=[[shown(path) for path in group] for group in report.duplicates],
        unreadable={shown(path): why for path, why in report.unreadable},
        ignored=[shown(path) for path in report.ignored],
        formats=[shown(path) for path in report.formats],
        orphans=[shown(path) for path in report.orphans],
        black_masks=[shown(e.path) for e, counts in zip(masked, used, strict=True) if e.mask_black and counts],
        unused_masks=[shown(e.path) for e, counts in zip(masked, used, strict=True) if not counts],
        upright_masks=[shown(path) for path in report.upright_masks],
    )
