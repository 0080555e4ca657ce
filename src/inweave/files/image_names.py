"""The formats that images are written in, by the ending of their name."""

from __future__ import annotations

import os

from inweave.errors import ConfigError
from inweave.files.paths import as_path, printable_path

#: ending -> Pillow's name of the format
WRITTEN = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}


def format_of(path: str | os.PathLike[str]) -> str:
    """Return the format that a file name has by its extension; raise `ConfigError` if it has none."""
    suffix = as_path(path).suffix.lower()
    if suffix not in WRITTEN:
        raise ConfigError(
            f"{printable_path(path)}: images are written as PNG, JPEG or WebP; end the name in .png, .jpg or .webp, "
            "or in / for a folder"
        )
    return WRITTEN[suffix]
