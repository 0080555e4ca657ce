"""Pack rendered sets into small files that travel to a GPU: one WebP of all images of a set, beside their names.

    <work>/packed/<set>.webp    tiles of 128 x 128 pixels, 64 columns, straight alpha
    <work>/tested/<set>...      the sets that nothing is trained on
    <work>/packed/<set>.json    {"side": 128, "columns": 64, "emojis": [...]}, row by row

Lossy colors and almost exact alpha: a tile differs from its drawing by less than what the VAE loses. Skin tones are
left out of every set but the first, where there are three.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tools.embedded.captions import Emoji, from_dict
from tools.embedded.places import add_work
from tools.embedded.render import HELD_OUT, SETS
from tools.embedded.sprites import read_set

SIDE, COLUMNS, QUALITY = 128, 64, 80


def packed_file(work: Path, name: str) -> Path:
    """Return the file of a set; those that nothing is trained on lie apart, and never travel."""
    return work / ("tested" if name in HELD_OUT else "packed") / f"{name}.webp"


def pack(images: NDArray[np.uint8], emojis: list[Emoji], path: Path) -> int:
    """Write the images of a set; return the size of the file."""
    rows = -(-len(images) // COLUMNS)
    sheet = np.zeros((rows * COLUMNS, SIDE, SIDE, 4), np.uint8)
    sheet[: len(images)] = images
    tiles = sheet.reshape(rows, COLUMNS, SIDE, SIDE, 4).swapaxes(1, 2).reshape(rows * SIDE, COLUMNS * SIDE, 4)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(tiles).save(path, quality=QUALITY, alpha_quality=90, method=4)
    document = {"side": SIDE, "columns": COLUMNS, "emojis": [emoji.as_dict() for emoji in emojis]}
    path.with_suffix(".json").write_text(json.dumps(document))
    return path.stat().st_size


def unpack(path: Path) -> tuple[NDArray[np.uint8], list[Emoji]]:
    """Read a set: uint8 (n, side, side, 4) with straight alpha, and the emoji of each image."""
    if not path.exists():
        raise SystemExit(f"{path}: not there; run python -m tools.embedded.pack first")
    document = json.loads(path.with_suffix(".json").read_text())
    side, columns = int(document["side"]), int(document["columns"])
    tiles = np.asarray(Image.open(path).convert("RGBA"))
    rows = tiles.shape[0] // side
    images = tiles.reshape(rows, side, columns, side, 4).swapaxes(1, 2).reshape(-1, side, side, 4)
    emojis = [from_dict(row) for row in document["emojis"]]
    return images[: len(emojis)], emojis


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    options = parser.parse_args()
    for name in options.sets:
        images, emojis = read_set(options.work, name)
        size = pack(images, emojis, packed_file(options.work, name))
        print(f"{name}: {len(emojis)} images, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
