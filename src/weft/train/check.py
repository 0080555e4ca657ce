"""What is checked of a training set: a setting in its file, a picture, and the set as a run will see it.

setting   a field of a dataclass carries its name in TOML, what fits it, and the tables it may stand in
picture   decoded to the last pixel and turned upright; the hash is that of 8-bit RGBA, so the same picture in
          two lossless files is one picture
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

from PIL import Image, ImageOps

from weft.errors import ConfigError
from weft.train.buckets import Order, Placement, Rules, assign
from weft.train.captions import dotted, shown

if TYPE_CHECKING:
    from weft.train.dataset import Dataset, Subset

T = TypeVar("T")
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


def look(path: Path) -> tuple[tuple[int, int], str, bool] | str:
    """(size, hash of all pixels, whether it has an alpha channel), or why it cannot be read."""
    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image)
            deep = upright.mode.startswith(("I", "F"))  # more than 8 bits: converting would merge different pictures
            pixels = upright if deep else upright.convert("RGBA")
            digest = hashlib.sha256(f"{pixels.mode} {pixels.width}x{pixels.height} ".encode())
            digest.update(pixels.tobytes())
            return pixels.size, digest.hexdigest(), upright.has_transparency_data
    except Exception as error:  # decoders raise whatever a broken file leads them to
        return f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()


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
    unreadable: dict[str, str]  # and why
    ignored: list[str]

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
        bad = [f"{name} ({why})" for name, why in self.unreadable.items()]
        for what, names in (
            ("without a caption", self.uncaptioned),
            ("smaller than their bucket, in one of their own", self.own_bucket),
            ("too small for any bucket, left out", self.too_small),
            ("in a bucket that never fills a batch, left out", self.dropped),
            ("the same pixels", [" = ".join(group) for group in self.duplicates]),
            ("unreadable, left out", bad),
            ("not part of the set", self.ignored),
        ):
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            told += [f"{what}: {len(names)}: {', '.join(names[:5])}{more}"] if names else []
        return told


def check_dataset(
    dataset: Dataset,
    rules: Rules,
    *,
    batch_size: int = 1,
    accumulation: int = 1,
    epochs: int | None = None,
    steps: int | None = None,
    drop_last: bool = False,
    held_out: Callable[[list[Placement | None]], Collection[int]] = lambda places: (),
) -> DatasetReport:
    """The set as a run with these settings sees it; ``accumulation`` counts the batches of all processes."""
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
    return DatasetReport(
        pictures=len(examples),
        regularisation=sum(example.regularisation for example in examples),
        repeated=sum(order.repeats),
        masks=sum(example.mask is not None for example in examples),
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
    )
