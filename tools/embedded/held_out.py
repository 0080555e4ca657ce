"""Write 24 captioned images of a set that nothing is trained on: what a style LoRA of the bars is trained with.

<work>/held_out/<set>/<name>.png, .txt      the names of `styles.NAMES`, on white

inweave bench embedded --bars style --held-out build/embedded/held_out/openmoji
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image
from tools.embedded.pack import packed_file, unpack
from tools.embedded.places import add_work
from tools.embedded.render import HELD_OUT
from tools.embedded.styles import NAMES


def write_held_out(work: Path, name: str) -> Path:
    """Write the images of a set; return their folder."""
    images, emojis = unpack(packed_file(work, name))
    by_name = {emoji.name: image for emoji, image in zip(emojis, images, strict=True)}
    folder = work / "held_out" / name
    folder.mkdir(parents=True, exist_ok=True)
    for caption in NAMES:
        image = Image.fromarray(by_name[caption])
        white = Image.new("RGBA", image.size, "white")
        path = folder / f"{caption.replace(' ', '-')}.png"
        Image.alpha_composite(white, image).convert("RGB").save(path)
        path.with_suffix(".txt").write_text(caption + "\n")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--sets", nargs="+", default=list(HELD_OUT), choices=HELD_OUT)
    options = parser.parse_args()
    for name in options.sets:
        print(write_held_out(options.work, name))


if __name__ == "__main__":
    main()
