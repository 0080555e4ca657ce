"""Images of strangers: a few formats, bounded before they are decoded, and nothing else starts."""

from __future__ import annotations

import io
import os
import struct
import tracemalloc
import warnings
import zlib
from pathlib import Path

import pytest

Image = pytest.importorskip("PIL.Image")

from PIL import PngImagePlugin  # noqa: E402

from inweave.errors import FormatError, RequestError  # noqa: E402
from inweave.files.images import DATASET_FORMATS, FORMATS, MAX_PNG_TEXT, open_image, read_image, write_png  # noqa: E402

EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 9 9
%%EndComments
(touched) (w) file closefile
showpage
"""


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG that claims a size, with chunks before its pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    rows = (
        len(data).to_bytes(4) + kind + data + zlib.crc32(data, zlib.crc32(kind)).to_bytes(4) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(rows)


@pytest.mark.parametrize("name", list(FORMATS))
def test_the_formats_that_are_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "image.anything"
    Image.new("RGB", (6, 4), "red").save(path, format=name)
    with open_image(path) as image:
        assert image.size == (6, 4) and image.format == name
    assert read_image(path).image.size == (6, 4)


def others() -> dict[str, bytes]:
    """Files of formats that Pillow would open, by name."""
    files = {"EPS": EPS}
    for name in ("GIF", "PPM", "TGA", "PCX", "ICO", "SGI", "JPEG2000", "IM", "MSP", "PALM", "PDF", "XBM"):
        buffer = io.BytesIO()
        try:
            Image.new("1" if name in ("MSP", "XBM", "PALM") else "RGB", (16, 16)).save(buffer, format=name)
        except (OSError, KeyError, ValueError):
            continue
        files[name] = buffer.getvalue()
    return files


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.eps", "a"])
def test_other_formats_are_refused_whatever_their_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No interpreter of PostScript starts: a folder of programs that would leave a trace is the whole path."""
    programs, trace = tmp_path / "bin", tmp_path / "trace"
    programs.mkdir()
    for program in ("gs", "gswin64c", "gswin32c"):
        (programs / program).write_text(f"#!/bin/sh\ntouch {trace}\n")
        (programs / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    files = others()
    assert len(files) > 5
    for content in files.values():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FormatError, match=r"not an image that can be read: not PNG, JPEG"):
            read_image(tmp_path / name)
    assert not trace.exists()


def test_pixels_are_counted_before_they_are_decoded(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(png(13_000, 13_000))
    with pytest.raises(FormatError, match="13000x13000 is larger than 134,217,728 pixels"):
        read_image(path)
    path.write_bytes(png(2_000_000_000, 2_000_000_000))
    with pytest.raises(RequestError, match=r"is larger than 134,217,728 pixels; shrink it first, .* to 4096x4096"):
        read_image(path, error=RequestError)
    path.write_bytes(png(10, 10))
    with pytest.raises(FormatError, match="10x10 is larger than 99 pixels"), open_image(path, pixels=99):
        pass


def test_a_size_that_is_allowed_gives_no_warning(tmp_path: Path) -> None:
    """Pillow warns above 89 million pixels, with a path of its own package."""
    path = tmp_path / "x.png"
    path.write_bytes(png(12_000, 8_000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_image(path) as image:
            assert image.size == (12_000, 8_000)


@pytest.mark.parametrize("formats", [FORMATS, DATASET_FORMATS, ("HEIF", "AVIF", "NONE")])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"<!DOCTYPE html>\n<title>404</title>", "it is a web page"),
        (b"\xef\xbb\xbf\n<HTML lang='en'>", "it is a web page"),
        (b"\x89PNG\r\n\x1a\n", "not .* or "),
        (b"junk" * 100, "not .* or "),
    ],
)
def test_a_file_that_is_no_image_is_refused_by_what_it_is(
    content: bytes, reason: str, formats: tuple[str, ...], tmp_path: Path
) -> None:
    """Also where a format is asked for whose plugin is not installed."""
    for name in ("a.jpg", "a.png", "a.heic"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FormatError, match=f"{name}: not an image that can be read: {reason}") as caught:
            read_image(tmp_path / name, formats=formats)
        assert "Error" not in str(caught.value)


def bombs() -> list[list[tuple[bytes, bytes]]]:
    text = zlib.compress(b"\xf0\x9f\x91\x8d" + b"a" * 1_000_000, 9)
    return [
        [(b"iTXt", b"key%d\0\1\0\0\0" % number + text) for number in range(60)],
        [(b"zTXt", b"key%d\0\0" % number + text) for number in range(60)],
        [(b"iCCP", b"profile\0\0" + text)] * 60,
        [(b"tEXt", b"key\0" + b"a" * 1_000_000)] * 5,
        [(b"iTXt", b"key\0\0\0\0\0" + b"a" * 1_000_000)] * 5,
        [(b"zTXt", b"key\0\0" + zlib.compress(bytes(50_000_000), 9))],
    ]


@pytest.mark.parametrize("chunks", bombs(), ids=["iTXt", "zTXt", "iCCP", "tEXt", "plain iTXt", "one zTXt"])
def test_texts_of_a_png_are_bounded_before_they_are_kept(chunks: list[tuple[bytes, bytes]], tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(png(10, 10, *chunks))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=f"texts are larger than {MAX_PNG_TEXT:,} bytes"), open_image(path):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * path.stat().st_size + 16 * 2**20


def test_texts_within_the_bound_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    info = PngImagePlugin.PngInfo()
    info.add_itxt("inweave", "grün " * 20_000, zip=True)
    info.add_text("parameters", "a" * 500_000)
    write_png(path, Image.new("RGB", (10, 10)), info)
    with open_image(path) as image:
        assert image.info["inweave"] == "grün " * 20_000
        assert len(image.info["parameters"]) == 500_000


def test_images_are_written_whole_and_through_no_link(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "x.png"
    victim.write_text("precious")
    path.symlink_to(victim)
    write_png(path, Image.new("RGB", (3, 2), "red"))
    assert victim.read_text() == "precious"
    assert read_image(path).image.size == (3, 2)
    with pytest.raises(RequestError, match="a device"):
        write_png("/dev/full", Image.new("RGB", (3, 2)), error=RequestError)


@pytest.mark.parametrize("which", ["pipe", "missing", "/dev/zero", ".", "x" * 300, "a\0b"])
def test_what_is_no_file_is_no_image(which: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RequestError):
        read_image(tmp_path / which, error=RequestError)


def test_a_broken_image_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    whole = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(whole, format="PNG")
    for content in (
        b"",
        b"\x89PNG\r\n\x1a\n",
        whole.getvalue()[:-500],
        b"\xff\xd8\xff\xe0" + b"x" * 50,
        b"BM" + b"\xff" * 60,
    ):
        path.write_bytes(content)
        with pytest.raises(FormatError, match="not an image that can be read"):
            read_image(path)


def test_an_image_is_turned_upright(tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (6, 4)).save(path, exif=exif)
    assert read_image(path)[1:] == ((6, 4), 6)
    assert read_image(path).image.size == (4, 6)


@pytest.mark.parametrize("kind", [b"eXIf", b"tEXt", b"zTXt", b"iTXt", b"iCCP"])
def test_a_length_that_a_chunk_only_claims_reserves_no_memory(kind: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    content = png(10, 10)
    path.write_bytes(content[:33] + (2**31 - 1).to_bytes(4) + kind + content[33:])
    tracemalloc.start()
    with pytest.raises(FormatError, match="its texts are larger"):
        read_image(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 1024 * 1024
