"""Aspect-ratio buckets, and the order in which a run sees its examples.

    buckets   width x height <= area of the resolution; sides are multiples of `step` in minimum..maximum;
              for every width the tallest that fits, its transpose, and the square
    assign    the bucket that keeps most of the picture (its aspect ratio is the closest), the picture scaled to
              cover it, the rest cut off evenly on both sides
    upscale   where it is off and the picture would have to grow, it gets a bucket of its own: its sides, scaled
              down to the area where needed, cut to multiples of `step`

    batches   each from one bucket; within a bucket regularisation pictures are spread evenly among the others, so
              every batch has both in the ratio of their repeats, to within one picture
    m         = step * accumulation * world + j, the number of a micro-batch in the whole run; it is batch
              m % n of epoch m // n, where n is the number of batches of an epoch; rank r takes m % world == r

An epoch's order is a function of (seed, epoch) and the list of examples, nothing else. It is the order of raw PCG64
words, whose stream numpy guarantees, so it is the same on every platform and for every number of processes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import isqrt, sqrt

import numpy as np

from inweave.errors import ConfigError

Size = tuple[int, int]


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


@dataclass(frozen=True, slots=True)
class Rules:
    """How pictures are put into buckets; the limits are half and twice the resolution unless given."""

    resolution: int | Size
    step: int = 64
    minimum: int | None = None
    maximum: int | None = None
    upscale: bool = True
    enabled: bool = True  # off: everything is cut to the resolution itself

    def __post_init__(self) -> None:
        wrong = []
        width, height = self.frame
        if self.step < 1:
            wrong.append(f"bucket step: {self.step} is not a length, expected 1 pixel or more; 64 suits every model")
        elif min(width, height) < self.step:
            wrong.append(f"resolution {width}x{height}: smaller than one bucket step of {self.step} pixels")
        low, high = self.limits
        if low > high:
            wrong.append(f"bucket minimum {low} is larger than the maximum {high}: swap them")
        if not wrong and self.enabled and not buckets_for(self.frame, self.step, low, high):
            wrong.append(
                f"no bucket has {width * height} pixels at most and sides from {low} to {high} in steps of {self.step}: "
                "lower the bucket minimum, raise the maximum or make the step smaller"
            )
        if wrong:
            raise ConfigError(wrong)

    @property
    def frame(self) -> Size:
        return (self.resolution, self.resolution) if isinstance(self.resolution, int) else self.resolution

    @property
    def area(self) -> int:
        return self.frame[0] * self.frame[1]

    @property
    def limits(self) -> Size:
        side = isqrt(max(self.area, 0))
        low = side // 2 if self.minimum is None else self.minimum
        return low, 2 * side if self.maximum is None else self.maximum


@dataclass(frozen=True, slots=True)
class Placement:
    """Scale the picture to ``resized``, then cut ``crop`` (x, y, width, height) out of it: the bucket."""

    bucket: Bucket
    resized: Size
    crop: tuple[int, int, int, int]
    scale: float
    own: bool = False  # the bucket was made for this picture, because nothing is enlarged

    @property
    def lost(self) -> float:
        """The share of the picture's area that is cut off."""
        return 1.0 - self.bucket.width * self.bucket.height / (self.resized[0] * self.resized[1])


@lru_cache(maxsize=64)
def buckets_for(resolution: int | Size, step: int, minimum: int, maximum: int) -> tuple[Bucket, ...]:
    """All buckets, narrow ones first; none where the limits allow none."""
    width, height = (resolution, resolution) if isinstance(resolution, int) else resolution
    area = width * height
    lowest, highest = max(-(-minimum // step), 1) * step, maximum // step * step
    found = set()
    square = isqrt(area) // step * step
    if lowest <= square <= highest:
        found.add(Bucket(square, square))
    for side in range(lowest, highest + 1, step):
        other = min(highest, area // side // step * step)
        if other >= lowest:
            found |= {Bucket(side, other), Bucket(other, side)}
    return tuple(sorted(found))


def assign(size: Size, rules: Rules) -> Placement:
    """Where a picture of ``size`` goes; one that is narrower than a step has no place where nothing is enlarged."""
    width, height = size
    if width < 1 or height < 1:
        raise ConfigError(f"a picture of {width}x{height} pixels has no bucket: its sides must be 1 or more")
    if rules.enabled:
        choice = buckets_for(rules.frame, rules.step, *rules.limits)

        def distance(bucket: Bucket) -> tuple[float, int]:
            across, down = width * bucket.height, height * bucket.width
            return max(across, down) / min(across, down), -bucket.width * bucket.height

        bucket = min(choice, key=distance)
    else:
        bucket = Bucket(*(side // rules.step * rules.step for side in rules.frame))
    if rules.upscale or (bucket.width <= width and bucket.height <= height):
        return _covering(size, bucket, own=False)
    return _covering(size, _own_bucket(size, rules), own=True)


def _own_bucket(size: Size, rules: Rules) -> Bucket:
    step, highest = rules.step, max(rules.limits[1] // rules.step, 1) * rules.step
    if min(size) < step:
        told = f"a picture of {size[0]}x{size[1]} pixels is smaller than one bucket step of {step} and may not grow"
        raise ConfigError(f"{told}: leave it out, make the step smaller or allow upscaling")
    scale = min(1.0, sqrt(rules.area / (size[0] * size[1])))
    width, height = (min(max(int(side * scale) // step * step, step), highest) for side in size)
    # a very long picture whose short side was raised to one step is too large again
    width = min(width, rules.area // height // step * step) if width > height else width
    height = min(height, rules.area // width // step * step)
    return Bucket(width, height)


def _covering(size: Size, bucket: Bucket, own: bool) -> Placement:
    (width, height), (across, down) = size, (bucket.width, bucket.height)
    if across * height >= down * width:  # the width decides; whole numbers, so that no rounding leaves a gap
        resized, scale = (across, (2 * height * across + width) // (2 * width)), across / width
    else:
        resized, scale = ((2 * width * down + height) // (2 * height), down), down / height
    left, top = (resized[0] - across) // 2, (resized[1] - down) // 2
    return Placement(bucket, resized, (left, top, across, down), scale, own)


def batches(
    buckets: Sequence[Hashable],
    repeats: Sequence[int],
    batch_size: int | Mapping[Hashable, int],
    seed: int,
    epoch: int,
    *,
    regularisation: Sequence[bool] = (),
    drop_last: bool = False,
) -> list[tuple[int, ...]]:
    """An epoch: example i, of bucket ``buckets[i]``, stands ``repeats[i]`` times in these batches of indices."""
    sizes = [batch_size] if isinstance(batch_size, int) else batch_size.values()
    if seed < 0 or epoch < 0 or min(sizes, default=1) < 1:
        raise ConfigError(f"seed {seed}, epoch {epoch}, batch size {batch_size}: expected 0, 0 and 1 or more")
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    members: dict[Hashable, tuple[list[int], list[int]]] = {}
    for index, (bucket, count) in enumerate(zip(buckets, repeats, strict=True)):
        kind = bool(regularisation) and regularisation[index]
        members.setdefault(bucket, ([], []))[kind].extend([index] * count)
    made: list[tuple[int, ...]] = []
    for bucket, kinds in members.items():
        subject, prior = ([kind[place] for place in _shuffle(len(kind), bits)] for kind in kinds)
        line = _spread(subject, prior)
        size = batch_size if isinstance(batch_size, int) else batch_size[bucket]
        end = len(line) // size * size if drop_last else len(line)
        made += [tuple(line[start : start + size]) for start in range(0, end, size)]
    return [made[place] for place in _shuffle(len(made), bits)]


def _shuffle(count: int, bits: np.random.PCG64) -> list[int]:
    words = np.asarray(bits.random_raw(count), dtype=np.uint64)
    return [int(place) for place in np.argsort(words, kind="stable")]


def _spread(some: list[int], others: list[int]) -> list[int]:
    """Both lists in one: the i-th of n stands at (2 i + 1) / 2 n of the way."""
    n, m = len(some), len(others)
    keyed = [((2 * i + 1) * m, 0, each) for i, each in enumerate(some)] if m else [(0, 0, each) for each in some]
    keyed += [((2 * j + 1) * n, 1, each) for j, each in enumerate(others)]
    return [each for *_, each in sorted(keyed, key=lambda entry: entry[:2])]


def position(step: int, micro: int, *, accumulation: int, world: int, batches_per_epoch: int) -> tuple[int, int]:
    """(epoch, index) of the ``micro``-th micro-batch of an optimiser step, over all processes together."""
    if batches_per_epoch < 1:
        raise ConfigError("an epoch has no batch: there are no examples, or every batch is short and dropped")
    return divmod(step * accumulation * world + micro, batches_per_epoch)


@dataclass(frozen=True)
class Order:
    """The whole run's sequence of batches: any step of it, for any number of processes."""

    buckets: tuple[Hashable, ...]
    repeats: tuple[int, ...]
    batch_size: int | Mapping[Hashable, int]
    seed: int = 0
    regularisation: tuple[bool, ...] = ()
    drop_last: bool = False
    _epochs: dict[int, list[tuple[int, ...]]] = field(default_factory=dict, compare=False, repr=False)

    def batches(self, epoch: int) -> list[tuple[int, ...]]:
        if epoch not in self._epochs:
            while len(self._epochs) > 1:  # a step may reach into the next epoch, never further back than one
                self._epochs.pop(next(iter(self._epochs)))
            self._epochs[epoch] = batches(
                self.buckets, self.repeats, self.batch_size, self.seed, epoch,
                regularisation=self.regularisation, drop_last=self.drop_last,
            )  # fmt: skip
        return self._epochs[epoch]

    def size_of(self, bucket: Hashable) -> int:
        return self.batch_size if isinstance(self.batch_size, int) else self.batch_size[bucket]

    def __len__(self) -> int:
        """Batches of an epoch, the same in every epoch."""
        return len(self.batches(next(iter(self._epochs), 0)))

    def step(self, step: int, *, accumulation: int = 1, world: int = 1, rank: int = 0) -> list[tuple[int, ...]]:
        """The batches rank ``rank`` of ``world`` works on in an optimiser step."""
        if not 0 <= rank < world or accumulation < 1 or step < 0:
            raise ConfigError(f"step {step}, accumulation {accumulation}, rank {rank} of {world}: not part of any run")
        found = []
        for micro in range(rank, accumulation * world, world):
            epoch, index = position(step, micro, accumulation=accumulation, world=world, batches_per_epoch=len(self))
            found.append(self.batches(epoch)[index])
        return found
