"""Render art sets to RGBA sprites: SVG with resvg at twice the size, then reduced with a Lanczos filter.

    <work>/sprites/<set>.npz    images: uint8 (n, size, size, 4), straight alpha
    <work>/sprites/<set>.json   the emoji of each image, in the same order

An emoji is found in a set by its code points, else by its name spelled as the set spells names.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tools.embedded.captions import Emoji, all_emoji
from tools.embedded.places import add_work, npm_folder, sprite_file

SIZE = 128
ICONIFY = {
    "noto": "@iconify-json/noto",
    "blob": "@iconify-json/noto-v1",
    "ink": "@iconify-json/fluent-emoji-high-contrast",
    "flat": "@iconify-json/fluent-emoji-flat",
    "fx": "@iconify-json/fxemoji",
    "twemoji": "@iconify-json/twemoji",
    "openmoji": "@iconify-json/openmoji",
    "emojione": "@iconify-json/emojione",
}
THREE_D = "@lobehub/fluent-emoji-3d"
#: neither trained on nor shipped: they are how the model is tested
HELD_OUT = ("openmoji", "emojione")
TRAINED = (*(name for name in ICONIFY if name not in HELD_OUT), "3d")
SETS = (*TRAINED, *HELD_OUT)
Find = Callable[[Emoji], str | None]
Draw = Callable[[str], Image.Image]


def _bare(code: str) -> str:
    """Return the code points without the variation selector, which some sets omit."""
    return code.replace("-fe0f", "")


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.replace("'", "")).strip("-")


def _unicode_name(emoji: Emoji) -> str:
    """Return the name in Unicode without spaces, by which one set calls its images: "articulatedlorry"."""
    letters = [chr(int(point, 16)) for point in _bare(emoji.code).split("-")]
    name = unicodedata.name(letters[0], "") if len(letters) == 1 else emoji.name
    return re.sub(r"[^a-z0-9]", "", name.lower())


def vector_set(work: Path, name: str) -> tuple[Find, Draw]:
    """Read a set of SVG bodies in Iconify's JSON."""
    import resvg_py  # type: ignore[import-not-found, unused-ignore]

    folder = npm_folder(work, ICONIFY[name])
    document = json.loads((folder / "icons.json").read_text())
    icons, aliases = document["icons"], document.get("aliases", {})
    characters = json.loads((folder / "chars.json").read_text()) if (folder / "chars.json").exists() else {}
    characters |= {_bare(code): icon for code, icon in characters.items()}

    def find(emoji: Emoji) -> str | None:
        icon = characters.get(emoji.code) or characters.get(_bare(emoji.code)) or _slug(emoji.name)
        spelled = (icon, _unicode_name(emoji), re.sub(r"[^a-z0-9]", "", emoji.name))
        answers = (aliases[each]["parent"] if each in aliases else each for each in spelled)
        return next((each for each in answers if each in icons), None)

    def draw(icon: str) -> Image.Image:
        row = icons[icon]
        width, height = (row.get(side, document.get(side, 16)) for side in ("width", "height"))
        svg = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" color="black" '
            f'width="{width}" height="{height}" viewBox="{row.get("left", 0)} {row.get("top", 0)} {width} {height}">'
            f"{row['body']}</svg>"
        )
        png = resvg_py.svg_to_bytes(svg_string=svg, width=2 * SIZE, height=2 * SIZE, skip_system_fonts=True)
        return Image.open(io.BytesIO(bytes(png)))

    return find, draw


def bitmap_set(work: Path) -> tuple[Find, Draw]:
    """Read the 3D set: one webp per emoji, named by its code points."""
    folder = npm_folder(work, THREE_D) / "assets"
    files = {path.stem: str(path) for path in sorted(folder.glob("*.webp"))}
    files |= {_bare(stem): path for stem, path in files.items()}
    return lambda emoji: files.get(emoji.code) or files.get(_bare(emoji.code)), Image.open


def render(work: Path, name: str, limit: int = 0) -> tuple[NDArray[np.uint8], list[Emoji]]:
    """Render all emoji of a set, each image once; skin tones only in the set that the model is trained on."""
    find, draw = bitmap_set(work) if name == "3d" else vector_set(work, name)
    images: list[NDArray[np.uint8]] = []
    emojis: list[Emoji] = []
    seen: set[str] = set()
    for emoji in all_emoji(work, tones=name == "noto"):
        key = find(emoji)
        if key is None or key in seen:
            continue
        seen.add(key)
        image = np.asarray(draw(key).convert("RGBA").resize((SIZE, SIZE), Image.Resampling.LANCZOS))
        if image[..., 3].max() < 32:  # nothing to see
            continue
        images.append(image)
        emojis.append(emoji)
        if limit and len(emojis) == limit:
            break
    return np.stack(images), emojis


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--limit", type=int, default=0, help="only the first emoji of each set (0: all)")
    options = parser.parse_args()
    for name in options.sets:
        images, emojis = render(options.work, name, options.limit)
        path = sprite_file(options.work, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, images=images)
        path.with_suffix(".json").write_text(json.dumps([emoji.as_dict() for emoji in emojis]))
        print(f"{name}: {len(emojis)} images, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
