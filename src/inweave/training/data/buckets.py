"""Aspect ratio buckets: their sizes, and how an image is resized and cropped into one.

buckets   width x height <= area of the resolution; sides are multiples of `step` in minimum..maximum;
          for every width the tallest that fits, its transpose, and the square
assign    the bucket with the closest aspect ratio, which keeps most of the image; the image is scaled to cover it and
          cropped evenly on both sides
upscale   if it is off and the image would have to be enlarged, it gets a bucket of its own: its sides, scaled down to
          the area if necessary, cut to multiples of `step`
rule      "inweave" is the one above; "kohya" and "musubi" are those of other trainers (`trainer_buckets`)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt, sqrt
from typing import Literal

from inweave.errors import ConfigError
from inweave.training.data import trainer_buckets

Size = tuple[int, int]
BucketRule = Literal["inweave", "kohya", "musubi"]


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


@dataclass(frozen=True, slots=True)
class BucketRules:
    """The settings of buckets; the limits default to half and twice the resolution."""

    resolution: int | Size
    step: int = 64
    minimum: int | None = None
    maximum: int | None = None
    upscale: bool = True
    enabled: bool = True  # off: everything is cropped to the resolution itself
    rule: BucketRule = "inweave"

    def __post_init__(self) -> None:
        problems = []
        width, height = self.size
        if self.step < 1:
            problems.append(f"bucket step: {self.step} is not a length, expected 1 pixel or more; 64 suits every model")
        elif min(width, height) < self.step:
            problems.append(f"resolution {width}x{height}: smaller than one bucket step of {self.step} pixels")
        low, high = self.limits
        if low > high and self.has_limits:
            problems.append(f"bucket minimum {low} is larger than the maximum {high}: swap them")
        if not problems and self.has_limits and not self.predefined:
            problems.append(
                f"no bucket has {width * height} pixels at most and sides from {low} to {high} in steps of {self.step};"
                " lower the bucket minimum, raise the maximum or make the step smaller"
            )
        if problems:
            raise ConfigError(problems)

    @property
    def size(self) -> Size:
        return (self.resolution, self.resolution) if isinstance(self.resolution, int) else self.resolution

    @property
    def area(self) -> int:
        return self.size[0] * self.size[1]

    @property
    def has_limits(self) -> bool:
        """Whether there are buckets whose sides have limits."""
        return self.enabled and not (self.rule == "kohya" and not self.upscale)

    @property
    def predefined(self) -> tuple[Size, ...]:
        """The buckets for images that may be enlarged, narrow ones first; none if the limits allow none."""
        if self.rule == "musubi":
            return trainer_buckets.predefined_by_musubi(self.size, self.step)
        if self.rule == "kohya":
            return trainer_buckets.predefined(self.size, self.step, *self.limits)
        return tuple((bucket.width, bucket.height) for bucket in buckets_for(self.size, self.step, *self.limits))

    @property
    def limits(self) -> Size:
        side = isqrt(max(self.area, 0))
        low = side // 2 if self.minimum is None else self.minimum
        return low, 2 * side if self.maximum is None else self.maximum


@dataclass(frozen=True, slots=True)
class BucketFit:
    """How an image is scaled to ``resized`` and cut to ``crop`` (x, y, width, height), which has the bucket's size."""

    bucket: Bucket
    resized: Size
    crop: tuple[int, int, int, int]
    scale: float
    own_bucket: bool = False  # made for this image, because nothing is enlarged

    @property
    def cropped_fraction(self) -> float:
        """The share of the image's area that is cropped away."""
        return 1.0 - self.bucket.width * self.bucket.height / (self.resized[0] * self.resized[1])


@lru_cache(maxsize=64)
def buckets_for(resolution: int | Size, step: int, minimum: int, maximum: int) -> tuple[Bucket, ...]:
    """Return all buckets, narrow ones first; none if the limits allow none."""
    width, height = (resolution, resolution) if isinstance(resolution, int) else resolution
    area = width * height
    lowest, highest = max(-(-minimum // step), 1) * step, maximum // step * step
    sizes = set()
    square = isqrt(area) // step * step
    if lowest <= square <= highest:
        sizes.add(Bucket(square, square))
    for side in range(lowest, highest + 1, step):
        other = min(highest, area // side // step * step)
        if other >= lowest:
            sizes |= {Bucket(side, other), Bucket(other, side)}
    return tuple(sorted(sizes))


def assign(size: Size, rules: BucketRules) -> BucketFit:
    """Return how an image of ``size`` fits into its bucket; raises ConfigError if it is too small and not upscaled."""
    width, height = size
    if width < 1 or height < 1:
        raise ConfigError(f"an image of {width}x{height} pixels has no bucket: its sides must be 1 or more")
    if rules.rule != "inweave":
        return _assign_as_trainer(size, rules)
    if rules.enabled:
        choice = buckets_for(rules.size, rules.step, *rules.limits)

        def distance(bucket: Bucket) -> tuple[float, int]:
            across, down = width * bucket.height, height * bucket.width
            return max(across, down) / min(across, down), -bucket.width * bucket.height

        bucket = min(choice, key=distance)
    else:
        bucket = Bucket(*(side // rules.step * rules.step for side in rules.size))
    if rules.upscale or (bucket.width <= width and bucket.height <= height):
        return _cover(size, bucket, own_bucket=False)
    return _cover(size, _own_bucket(size, rules), own_bucket=True)


def _assign_as_trainer(size: Size, rules: BucketRules) -> BucketFit:
    own_bucket = rules.enabled and not rules.upscale and size[0] * size[1] <= rules.area
    if not rules.enabled:
        bucket = rules.size
    elif rules.rule == "kohya" and not rules.upscale:
        resized = trainer_buckets.shrunk(size, rules.area, rules.step)
        bucket = trainer_buckets.own_sides(resized, rules.step)
    elif own_bucket:
        bucket = trainer_buckets.own_sides(size, rules.step)
    elif rules.rule == "kohya" and size in rules.predefined:
        bucket = size
    else:
        bucket = trainer_buckets.closest(size, rules.predefined)
    if not min(bucket):
        raise _too_small(size, rules)
    if rules.rule == "musubi" or rules.upscale or not rules.enabled:
        resized = trainer_buckets.covering(size, bucket)
    (width, height), (across, down) = resized, bucket
    crop = ((width - across) // 2, (height - down) // 2, across, down)
    return BucketFit(Bucket(*bucket), resized, crop, max(width / size[0], height / size[1]), own_bucket)


def _too_small(size: Size, rules: BucketRules) -> ConfigError:
    return ConfigError(
        f"an image of {size[0]}x{size[1]} pixels is smaller than one bucket step of {rules.step} and may not be "
        "enlarged; leave it out, make the step smaller or allow upscaling"
    )


def _own_bucket(size: Size, rules: BucketRules) -> Bucket:
    step, highest = rules.step, max(rules.limits[1] // rules.step, 1) * rules.step
    if min(size) < step:
        raise _too_small(size, rules)
    scale = min(1.0, sqrt(rules.area / (size[0] * size[1])))
    width, height = (min(max(int(side * scale) // step * step, step), highest) for side in size)
    # a very long image whose short side was raised to one step is too large again
    width = min(width, rules.area // height // step * step) if width > height else width
    height = min(height, rules.area // width // step * step)
    return Bucket(width, height)


def _cover(size: Size, bucket: Bucket, own_bucket: bool) -> BucketFit:
    (width, height), (across, down) = size, (bucket.width, bucket.height)
    if across * height >= down * width:  # the width decides; integers, so that no rounding leaves a gap
        resized, scale = (across, (2 * height * across + width) // (2 * width)), across / width
    else:
        resized, scale = ((2 * width * down + height) // (2 * height), down), down / height
    left, top = (resized[0] - across) // 2, (resized[1] - down) // 2
    return BucketFit(bucket, resized, (left, top, across, down), scale, own_bucket)
