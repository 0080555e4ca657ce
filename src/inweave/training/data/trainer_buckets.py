"""Buckets as kohya's scripts and musubi-tuner choose them, for runs that train what those would.

    r(x)        the largest multiple of the step up to x, rounded to a whole number; ratio a = width / height
    predefined  the smallest difference |bucket - a| of ratios; kohya's have at most the area of the resolution and
                sides in minimum .. maximum, which are rounded outward to multiples of the step; musubi's start at half
                the square root of the area
    kohya, no upscaling (the limits do not count)
                above the area: of (r(w), r(w) / a) with w = sqrt(area a) and (r(h) a, r(h)) with h = area / w, the one
                whose ratio in steps is closer to a; then the sides are cut to multiples of the step
                otherwise: the image's own sides, cut to multiples of the step
    musubi, no upscaling
                up to the area: the image's own sides, cut to multiples of the step; otherwise predefined

Without buckets every image covers the resolution itself. Numbers are floats in the order of those programs, so that
ties and halves fall as they do there. sd-scripts 0.10 (2026-02), library/train_util.py; musubi-tuner (2026-06),
dataset/bucket.py.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt, sqrt

Size = tuple[int, int]


@lru_cache(maxsize=64)
def predefined(size: Size, step: int, minimum: int, maximum: int) -> tuple[Size, ...]:
    """Return kohya's buckets, narrow ones first; none if the limits exclude the resolution."""
    low, high, area = minimum - minimum % step, -(-maximum // step) * step, size[0] * size[1]
    if low > min(size) or high < max(size):
        return ()
    square = isqrt(area) // step * step
    sizes = {(square, square)} if square else set()
    for side in range(max(low, step), high + 1, step):
        other = min(high, area // side // step * step)
        if other >= max(low, step):
            sizes |= {(side, other), (other, side)}
    return tuple(sorted(sizes))


@lru_cache(maxsize=64)
def predefined_by_musubi(size: Size, step: int) -> tuple[Size, ...]:
    """Return musubi-tuner's buckets, narrow ones first."""
    area = size[0] * size[1]
    root = isqrt(area)
    first = max(root // 2 // step * step, step)
    sides = [(side, area // side // step * step) for side in range(first, root + step, step)]
    return tuple(sorted({each for side in sides for each in (side, side[::-1]) if min(each)}))


def closest(size: Size, buckets: tuple[Size, ...]) -> Size:
    """Return the bucket with the closest ratio of width to height, the first of equal ones."""
    ratio = size[0] / size[1]
    return min(buckets, key=lambda bucket: abs(bucket[0] / bucket[1] - ratio))


def covering(size: Size, bucket: Size) -> Size:
    """Return the size that an image is scaled to so that it covers a bucket."""
    (width, height), ratio = size, size[0] / size[1]
    scale = bucket[1] / height if ratio > bucket[0] / bucket[1] else bucket[0] / width
    return int(width * scale + 0.5), int(height * scale + 0.5)


def shrunk(size: Size, area: int, step: int) -> Size:
    """Return kohya's size of an image that may not be enlarged; a side may be 0 for very long images."""
    if size[0] * size[1] <= area:
        return size

    def rounded(side: float) -> int:
        return int(side + 0.5) // step * step

    ratio = size[0] / size[1]
    width = sqrt(area * ratio)
    by_width, by_height = rounded(width), rounded(area / width)
    height_of_width, width_of_height = rounded(by_width / ratio), rounded(by_height * ratio)
    if not (height_of_width and by_height):
        return 0, 0  # kohya divides by zero
    if abs(by_width / height_of_width - ratio) < abs(width_of_height / by_height - ratio):
        return by_width, int(by_width / ratio + 0.5)
    return int(by_height * ratio + 0.5), by_height


def own_sides(size: Size, step: int) -> Size:
    """Return the sides of an image, cut to multiples of a step."""
    return size[0] // step * step, size[1] // step * step
