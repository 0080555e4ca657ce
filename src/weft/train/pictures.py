"""A folder of pictures with captions beside them: `name.png` and `name.txt`."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, UnidentifiedImageError

from weft.errors import ConfigError, FormatError


def captioned_pictures(folder: Path) -> tuple[list[str], list[Image.Image]]:
    """(captions, pictures) in the order of their names; every picture needs a caption."""
    paths = sorted(folder.glob("*.png"))
    if not paths:
        raise ConfigError(f"{folder}: no .png pictures in this folder")
    bare = [path.name for path in paths if not path.with_suffix(".txt").is_file()]
    if bare:
        raise ConfigError(
            f"{folder}: {len(bare)} pictures have no caption, {bare[0]} first; write it into {bare[0][:-4]}.txt"
        )
    captions = [path.with_suffix(".txt").read_text("utf-8").strip() for path in paths]
    pictures = []
    for path in paths:
        try:
            with Image.open(path) as image:
                pictures.append(image.convert("RGB"))
        except (OSError, UnidentifiedImageError) as error:
            raise FormatError(f"{path}: not a picture that can be read: {error}") from None
    return captions, pictures
