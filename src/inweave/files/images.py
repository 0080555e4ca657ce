"""Images of strangers: a few formats, bounded before a pixel is decoded.

with open_image(path) as image:     the header alone: size, mode, text
read_image(path)                    decoded to the last pixel and turned upright
open_image_bytes(content, label)    the same header of an image in memory, which errors call ``label``

formats    PNG, JPEG, WebP, BMP, TIFF, and AVIF where Pillow has it; of a dataset also GIF, and HEIC with the extra
           `heic` (pillow-heif). Pillow knows forty more, by content and whatever the name is; one starts Ghostscript
frames     of an animation or a file of several pages the first one is read
pixels     at most 128 Mi, counted here: Pillow's own count warns about files that are allowed
PNG text   at most 4 MiB, unpacked: a chunk of a kilobyte can unpack to a megabyte
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import BinaryIO, NamedTuple

from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from inweave.errors import FormatError, InweaveError, Problem
from inweave.files.paths import as_path, printable_path
from inweave.files.reading import open_regular
from inweave.files.writing import write_atomic

try:
    from PIL import AvifImagePlugin  # noqa: F401  # importing a plugin makes its format known
except ImportError:  # this Pillow was built without it
    _AVIF: tuple[str, ...] = ()
else:
    _AVIF = ("AVIF",)

ImageError = Callable[[str | Problem], InweaveError]
_PLUGINS = (PngImagePlugin, JpegImagePlugin, WebPImagePlugin, BmpImagePlugin, TiffImagePlugin, GifImagePlugin)
FORMATS = tuple(name for name in ("PNG", "JPEG", "WEBP", "BMP", "TIFF", *_AVIF) if name in Image.OPEN)
DATASET_FORMATS = (*FORMATS, "GIF", "HEIF")
MAX_PIXELS = 128 * 1024 * 1024
_AMPLE = 4096  # a side that is longer than any model reads
MAX_PNG_TEXT = 4 * 1024 * 1024
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_EXIF_ORIENTATION = 0x0112
_HEIC_BRANDS = frozenset(
    name.encode() for name in ["heic", "heix", "heim", "heis", "hevc", "hevx", "hevm", "hevs", "mif1", "msf1"]
)


class DecodedImage(NamedTuple):
    """An image in memory, upright."""

    image: Image.Image
    stored_size: tuple[int, int]  # in the file, before it is turned upright
    orientation: int  # EXIF; 1: upright already


@contextmanager
def open_image(
    path: str | os.PathLike[str],
    *,
    error: ImageError = FormatError,
    pixels: int = MAX_PIXELS,
    formats: tuple[str, ...] = FORMATS,
) -> Iterator[Image.Image]:
    """Open an image and read its header; ``pixels``: the most it may have; ``formats``: those accepted."""
    source = as_path(path)
    with (
        open_regular(source, error=error) as file,
        _opened(file, printable_path(source), error, pixels, formats) as image,
    ):
        yield image


@contextmanager
def open_image_bytes(
    content: bytes,
    label: str,
    *,
    error: ImageError = FormatError,
    pixels: int = MAX_PIXELS,
    formats: tuple[str, ...] = FORMATS,
) -> Iterator[Image.Image]:
    """Open an image in memory and read its header; ``formats``: those of `FORMATS` that it may have."""
    with _opened(io.BytesIO(content), label, error, pixels, formats) as image:
        yield image


@contextmanager
def _opened(
    file: BinaryIO, label: str, error: ImageError, pixels: int, formats: tuple[str, ...]
) -> Iterator[Image.Image]:
    try:
        _bound_png(file)
        file.seek(0)
        if "HEIF" in formats and _is_heic(file.read(64)):
            _register_heic()
        file.seek(0)
        image = _identified(file, formats)
    except Exception as problem:  # decoders raise whatever a broken file leads them to
        raise error(Problem(label, f"not an image that can be read: {_reason(problem, formats)}")) from None
    with image:
        if image.width * image.height > pixels:
            raise error(Problem(label, _too_large(image.size, pixels)))
        yield image


def _identified(file: BinaryIO, formats: tuple[str, ...]) -> Image.Image:
    """Return the image whose header a plugin accepts: `Image.open`, but formats without a plugin are skipped."""
    head = file.read(64)
    for name in formats:
        factory, accepts = Image.OPEN.get(name, (None, None))
        verdict = factory is not None and (accepts is None or accepts(head[:16]))
        if factory is None or not verdict or isinstance(verdict, str):  # a string: why the plugin cannot read it
            continue
        file.seek(0)
        try:
            if image := factory(file, ""):
                return image
        except (SyntaxError, IndexError, TypeError, struct.error):  # what a plugin raises for the format of another
            continue
    if not head:
        raise FormatError("the file is empty")
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype html", b"<html")):
        raise FormatError("it is a web page, probably of a download that failed")
    raise UnidentifiedImageError


def _too_large(size: tuple[int, int], pixels: int) -> str:
    width, height = size
    shrink = min((pixels / (width * height)) ** 0.5, _AMPLE / max(size))
    example = "x".join(str(max(int(side * shrink), 1)) for side in size)
    return f"{width}x{height} is larger than {pixels:,} pixels; shrink it first, for example to {example}"


def read_image(
    path: str | os.PathLike[str],
    *,
    error: ImageError = FormatError,
    pixels: int = MAX_PIXELS,
    upright: bool = True,
    formats: tuple[str, ...] = FORMATS,
) -> DecodedImage:
    """Return an image decoded to the last pixel, in memory; ``upright``: rotated by its EXIF orientation."""
    with open_image(path, error=error, pixels=pixels, formats=formats) as image:
        try:
            image.load()
            tag = image.getexif().get(_EXIF_ORIENTATION)
            result = ImageOps.exif_transpose(image) if upright else image.copy()
        except Exception as problem:
            raise error(f"{printable_path(path)}: not an image that can be read: {_reason(problem, formats)}") from None
        orientation = tag if isinstance(tag, int) and 1 < tag <= 8 else 1  # files may hold anything there
        return DecodedImage(result, image.size, orientation)


def has_more_frames(path: str | os.PathLike[str], formats: tuple[str, ...] = FORMATS) -> bool:
    """Return whether a file is an animation or has several pages; previews or depth maps of a JPEG do not count."""
    with open_image(path, formats=formats) as image:
        try:
            return image.format != "MPO" and bool(getattr(image, "is_animated", False))
        except Exception:  # what follows the first frame is damaged, and is not read
            return True


def _is_heic(head: bytes) -> bool:
    """Return whether a file is HEIC by the brands in its header; AVIF is made of the same boxes."""
    brands = {head[start : start + 4] for start in (8, *range(16, min(int.from_bytes(head[:4]), len(head)), 4))}
    return head[4:8] == b"ftyp" and not brands & {b"avif", b"avis"} and bool(brands & _HEIC_BRANDS)


def _register_heic() -> None:
    if "HEIF" in Image.OPEN:
        return
    try:
        pillow_heif = import_module("pillow_heif")
    except ImportError:
        raise FormatError("HEIC images need the package pillow-heif: pip install 'inweave[heic]'") from None
    pillow_heif.register_heif_opener(thumbnails=False)


def write_png(
    path: str | os.PathLike[str],
    image: Image.Image,
    text: PngImagePlugin.PngInfo | None = None,
    *,
    error: ImageError = FormatError,
) -> None:
    """Write a PNG in one step; ``text``: its text chunks."""
    write_atomic(path, [encode_png(image, text)], error=error)


def encode_png(image: Image.Image, text: PngImagePlugin.PngInfo | None = None) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", pnginfo=text)
    return buffer.getvalue()


def _reason(problem: Exception, formats: tuple[str, ...] = FORMATS) -> str:
    if isinstance(problem, InweaveError):
        return str(problem)
    if isinstance(problem, UnidentifiedImageError):
        return f"not {', '.join(formats[:-1])} or {formats[-1]}"
    return f"{type(problem).__name__}: {problem}"[:300].encode("utf-8", "backslashreplace").decode()


def _bound_png(file: BinaryIO) -> None:
    """Refuse a PNG whose texts and profiles would unpack to more than they may, without keeping them."""
    if file.read(8) != _SIGNATURE:
        return
    total = 0
    while len(head := file.read(8)) == 8:
        length, kind = int.from_bytes(head[:4]), head[4:]
        if kind in (b"tEXt", b"zTXt", b"iTXt", b"iCCP", b"eXIf"):
            # a reader reserves what it is asked for, and a length can claim 2 GB
            total += (
                length if length > MAX_PNG_TEXT else _unpacked_size(kind, file.read(length), MAX_PNG_TEXT + 1 - total)
            )
            if total > MAX_PNG_TEXT:
                raise FormatError(f"its texts are larger than {MAX_PNG_TEXT:,} bytes")
            file.seek(4, os.SEEK_CUR)
        else:
            file.seek(length + 4, os.SEEK_CUR)


def _unpacked_size(kind: bytes, data: bytes, limit: int) -> int:
    keyword, _, rest = data.partition(b"\0")
    if kind == b"iTXt":
        packed = rest[:1] != b"\0"
        rest = rest[2:].split(b"\0", 2)[-1]  # after the flags: language, translated keyword, text
    else:
        packed, rest = kind in (b"zTXt", b"iCCP"), rest[1:]
    if not packed:
        return len(data)
    try:
        return len(keyword) + len(zlib.decompressobj().decompress(rest, limit))
    except zlib.error:
        return len(data)  # Pillow says what is wrong with it, or ignores it
