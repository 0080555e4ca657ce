"""The hashes that model sites and image metadata use for an adapter file.

    SHA-256   of the whole file
    AutoV1    first 8 hex digits of SHA-256 over 0x10000 bytes from offset 0x100000; none if the file ends before that
    AutoV2    first 10 hex digits of the file's SHA-256
    AutoV3    first 12 hex digits of SHA-256 over everything after the safetensors header (addnet hash)
    BLAKE3    of the whole file, where the blake3 package is installed

AutoV3 survives edits of the metadata. `sshs_model_hash` in the metadata claims to be its 64 digits, and some tools
trust it unchecked.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inweave.errors import FormatError
from inweave.files.paths import as_path
from inweave.files.reading import ensure_regular, open_regular
from inweave.formats.files import read_header
from inweave.formats.gate import Header

CHUNK = 4 * 1024 * 1024
#: number of hex digits -> field of `Hashes`; 64 digits may also be BLAKE3
KINDS = {8: "autov1", 10: "autov2", 12: "autov3", 64: "sha256"}


@dataclass(frozen=True, slots=True)
class Hashes:
    """The hashes of one file; ``claimed`` is the hash in its metadata, ``note`` says if that one is wrong.

    AutoV1 and AutoV2 are the short hashes of AUTOMATIC1111 and Civitai; AutoV3 hashes the tensors without metadata.
    """

    path: str
    sha256: str
    autov1: str | None
    autov2: str
    autov3: str | None  # None for a file that is not a safetensors file
    blake3: str | None
    claimed: str | None  # sshs_model_hash
    note: str | None

    def as_dict(self) -> dict[str, str | None]:
        """Return the documented JSON of `inweave hash`."""
        return {name: getattr(self, name) for name in self.__slots__}


def hash_file(path: str | os.PathLike[str], *, progress: Callable[[int, int], object] | None = None) -> Hashes:
    """Compute the hashes that model sites identify a file by, in one pass over its bytes.

    Args:
        path: any file; only safetensors files have an AutoV3.
        progress: called with (bytes done, total bytes).

    Returns:
        The hashes; BLAKE3 is None unless the package `blake3` is installed (`inweave[hash]`).

    Raises:
        FormatError: the file cannot be read, or is a damaged .safetensors file.
    """
    header = _header(path)
    data_start = header.data_start if header is not None else None
    total = max(Path(path).stat().st_size, 1) if progress is not None else 1
    whole, body, window = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    blake = _blake3()
    position = 0
    with open_regular(path) as file:
        while chunk := file.read(CHUNK):
            whole.update(chunk)
            if blake is not None:
                blake.update(chunk)
            if data_start is not None:
                body.update(chunk[max(data_start - position, 0) :])
            first, last = 0x100000 - position, 0x110000 - position
            window.update(chunk[max(first, 0) : max(last, 0)])
            position += len(chunk)
            if progress is not None:
                progress(position, total)
    sha256, autov3 = whole.hexdigest(), body.hexdigest()
    claimed = header.metadata.get("sshs_model_hash") if header is not None else None
    note = None
    if claimed and claimed.removeprefix("0x").lower() != autov3:
        note = (
            f"sshs_model_hash in the metadata is {claimed[:12]}, the data hash to {autov3[:12]}: "
            "the metadata is wrong or stale"
        )
    return Hashes(
        path=str(path),
        sha256=sha256,
        autov1=window.hexdigest()[:8] if position > 0x100000 else None,
        autov2=sha256[:10],
        autov3=autov3[:12] if header is not None else None,
        blake3=blake.hexdigest() if blake is not None else None,
        claimed=claimed,
        note=note,
    )


def hash_digits(text: str) -> str | None:
    """Return the digits of a hash of any kind in lower case, without 0x; None for other texts."""
    digits = text.lower().removeprefix("0x")
    return digits if len(digits) in KINDS and set(digits) <= set("0123456789abcdef") else None


def _header(path: str | os.PathLike[str]) -> Header | None:
    """Return the header of a safetensors file; None for a file with another ending that is not one."""
    try:
        return read_header(path)
    except FormatError:
        ensure_regular(as_path(path))
        if as_path(path).suffix.lower() == ".safetensors":
            raise
        return None


def autov1(path: str | os.PathLike[str]) -> str | None:
    """Return AutoV1 without reading the rest of the file; None if the file ends before the bytes it hashes."""
    with open_regular(path) as file:
        file.seek(0x100000)
        window = file.read(0x10000)
    return hashlib.sha256(window).hexdigest()[:8] if window else None


def _blake3() -> Any:
    """Return a BLAKE3 hasher, or None without the optional package, which has no type information."""
    try:
        return importlib.import_module("blake3").blake3()
    except ImportError:
        return None
