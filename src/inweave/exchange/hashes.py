"""The hashes that model sites and image metadata use for an adapter file.

    SHA-256   of the whole file
    AutoV1    first 8 hex digits of SHA-256 over 0x10000 bytes from offset 0x100000; none if the file ends before that
    AutoV2    first 10 hex digits of the file's SHA-256
    AutoV3    first 12 hex digits of SHA-256 over everything after the safetensors header (addnet hash)
    BLAKE3    of the whole file, where the blake3 package is installed

AutoV3 survives edits of the metadata; `sshs_model_hash` in the metadata claims to be its 64 digits, and
some tools trust it unseen.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from dataclasses import dataclass
from typing import Any

from inweave.files.reading import open_regular
from inweave.formats.files import read_header

CHUNK = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Hashes:
    """The hashes of one file; ``claimed`` is the hash in its metadata, ``note`` says if that one is wrong.

    AutoV1 and AutoV2 are the short hashes of AUTOMATIC1111 and Civitai, AutoV3 is the one of the tensors without metadata.
    """

    path: str
    sha256: str
    autov1: str | None
    autov2: str
    autov3: str
    blake3: str | None
    claimed: str | None  # sshs_model_hash
    note: str | None

    def as_dict(self) -> dict[str, str | None]:
        """The documented JSON of `inweave hash`."""
        return {name: getattr(self, name) for name in self.__slots__}


def hash_file(path: str | os.PathLike[str]) -> Hashes:
    """The hashes that model sites identify a safetensors file by, in one pass over its bytes.

    BLAKE3 is None unless the package `blake3` is installed (`inweave[hash]`). Raises `FormatError` for a damaged file.
    """
    header = read_header(path)
    whole, body, window = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    blake = _blake3()
    position = 0
    with open_regular(path) as file:
        while chunk := file.read(CHUNK):
            whole.update(chunk)
            if blake is not None:
                blake.update(chunk)
            body.update(chunk[max(header.data_start - position, 0) :])
            first, last = 0x100000 - position, 0x110000 - position
            window.update(chunk[max(first, 0) : max(last, 0)])
            position += len(chunk)
    sha256, autov3 = whole.hexdigest(), body.hexdigest()
    claimed = header.metadata.get("sshs_model_hash")
    note = None
    if claimed and claimed.removeprefix("0x").lower() != autov3:
        note = f"sshs_model_hash in the metadata is {claimed[:12]}, the data hash to {autov3[:12]}: the metadata is wrong or stale"
    return Hashes(
        path=str(path),
        sha256=sha256,
        autov1=window.hexdigest()[:8] if position > 0x100000 else None,
        autov2=sha256[:10],
        autov3=autov3[:12],
        blake3=blake.hexdigest() if blake is not None else None,
        claimed=claimed,
        note=note,
    )


def autov1(path: str | os.PathLike[str]) -> str | None:
    """AutoV1 alone, without reading the rest of the file; None for a file that ends before the bytes it hashes."""
    with open_regular(path) as file:
        file.seek(0x100000)
        window = file.read(0x10000)
    return hashlib.sha256(window).hexdigest()[:8] if window else None


def _blake3() -> Any:
    """The optional package ships no type information of its own."""
    try:
        return importlib.import_module("blake3").blake3()
    except ImportError:
        return None
