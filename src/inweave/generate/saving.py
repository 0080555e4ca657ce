"""Images as files, with the settings that made them in each format.

    .png            texts `parameters` (for other front ends) and `inweave` (JSON, complete)
    .jpg  .webp     the same two in EXIF: UserComment, as front ends write it there, and MakerNote

A JPEG holds at most 64 KB of EXIF: if both do not fit, the JSON is left out, and if `parameters` alone does not,
the image is refused before it is made (`ensure_fits`).
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from inweave.errors import ConfigError
from inweave.files.image_names import format_of
from inweave.files.paths import as_path
from inweave.files.writing import make_folder, write_atomic
from inweave.generate.infotext import infotext
from inweave.generate.record import EXIF_IFD, MAKER_NOTE, MAKER_PREFIX, USER_COMMENT, png_text

QUALITY = 95
_MAX_EXIF = 65_000  # bytes of a JPEG's segment, less its own header


def encode_image(image: Image.Image, record: Mapping[str, Any], kind: str = "PNG") -> bytes:
    """Return the bytes of an image file; ``record``: its settings."""
    content = io.BytesIO()
    if kind == "PNG":
        image.save(content, format="PNG", pnginfo=png_text(record))
    else:
        image.convert("RGB").save(content, format=kind, quality=QUALITY, exif=_exif(record, kind))
    return content.getvalue()


def save_image(path: str | os.PathLike[str], image: Image.Image, record: Mapping[str, Any]) -> Path:
    """Write an image with its settings, in the format of its name; its folder is made where it is missing."""
    target = as_path(path)
    kind = format_of(target)
    make_folder(target.parent)
    return write_atomic(target, [encode_image(image, record, kind)])


def ensure_fits(record: Mapping[str, Any], kind: str) -> None:
    """Refuse settings that an image of this format cannot hold."""
    if kind == "JPEG":
        _exif(record, kind)


def _exif(record: Mapping[str, Any], kind: str) -> bytes:
    comment = b"UNICODE\0" + infotext(record).encode("utf-16-be", "surrogatepass")
    note = MAKER_PREFIX + json.dumps(record, ensure_ascii=False, sort_keys=True).encode("utf-8", "surrogatepass")
    for tags in ({USER_COMMENT: comment, MAKER_NOTE: note}, {USER_COMMENT: comment}):
        exif = Image.Exif()
        exif.get_ifd(EXIF_IFD).update(tags)
        content: bytes = exif.tobytes()
        if kind != "JPEG" or len(content) <= _MAX_EXIF:
            return content
    raise ConfigError(f"a JPEG holds 64 KB of settings, and these take {len(comment):,} bytes; write a .png or .webp")
