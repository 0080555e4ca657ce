"""Make the reference sheet: 256 names and what they look like, to ask of a generated picture which one it is.

    reference.png    16 x 16 thumbnails of 32 x 32 pixels on white, row by row
    reference.json   their names in the same order

Every name the thumbnails are for is one the model was taught; pictures too alike at this size are left out, so that
the nearest thumbnail is a fair question.
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


def thumbnails(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(n, 32, 32, 3): means of 4x4 pixels of the pictures on white."""
    factor = pictures.shape[1] // SIDE
    thumbnails = [on_white(picture).reshape(SIDE, factor, SIDE, factor, 3).mean((1, 3)) for picture in pictures]
    return (np.stack(thumbnails) * 255).round().astype(np.uint8)


def choose(emojis: list[Emoji], small: NDArray[np.uint8]) -> list[int]:
    """COUNT pictures, evenly over the named groups, each apart from all chosen before it."""
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
    pictures, emojis = read_set(options.work, "noto")
    small = thumbnails(pictures)
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
