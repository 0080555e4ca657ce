"""Make the reference sheet: 256 names with thumbnails, to find which one a generated image is nearest to.

    reference.png    16 x 16 thumbnails of 32 x 32 pixels on white, row by row
    reference.json   their names in the same order

The model was trained on every one of these names; images too alike at this size are left out, so that the nearest
thumbnail is meaningful.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tools.embedded.captions import Emoji
from tools.embedded.places import SHIPPED, add_work
from tools.embedded.sprites import read_set
from tools.embedded.styles import on_white

COUNT, COLUMNS, SIDE = 256, 16, 32
GROUPS = ("face", "animal", "food", "travel", "activity", "object")
APART = 0.06  # root mean square difference of two thumbnails, in [0, 1]


def thumbnails(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return (n, 32, 32, 3): means of 4x4 pixels of the images on white."""
    factor = images.shape[1] // SIDE
    thumbnails = [on_white(image).reshape(SIDE, factor, SIDE, factor, 3).mean((1, 3)) for image in images]
    return (np.stack(thumbnails) * 255).round().astype(np.uint8)


def choose(emojis: list[Emoji], small: NDArray[np.uint8]) -> list[int]:
    """Choose COUNT images, evenly over the named groups, each unlike all chosen before it."""
    able = [i for i, emoji in enumerate(emojis) if emoji.group in GROUPS and emoji.weight >= 1 and not emoji.tone]
    values = small.reshape(len(small), -1) / 255
    distinct: list[int] = []
    for i in able:
        if not distinct or np.sqrt(((values[distinct] - values[i]) ** 2).mean(1)).min() > APART:
            distinct.append(i)
    return [distinct[int(i)] for i in np.linspace(0, len(distinct) - 1, COUNT)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--out", type=Path, default=SHIPPED)
    options = parser.parse_args()
    images, emojis = read_set(options.work, "noto")
    small = thumbnails(images)
    chosen = choose(emojis, small)
    rows = small[chosen].reshape(-1, COLUMNS, SIDE, SIDE, 3).swapaxes(1, 2)
    image = Image.fromarray(rows.reshape(-1, COLUMNS * SIDE, 3))
    image.save(options.out / "reference.png", optimize=True)
    names = [emojis[i].name for i in chosen]
    document = {"side": SIDE, "columns": COLUMNS, "captions": names}
    (options.out / "reference.json").write_text(json.dumps(document, indent=1) + "\n")
    print(f"{len(names)} thumbnails, {(options.out / 'reference.png').stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
