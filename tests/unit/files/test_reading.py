"""Reading untrusted files: only regular files, at once, bounded, and every refusal is a one-line InweaveError."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from inweave.errors import ConfigError, FormatError, RequestError
from inweave.files.documents import MAX_DEPTH, MAX_DIGITS, parse_json, read_json
from inweave.files.paths import as_path, expand_home, is_file, is_folder, printable, printable_path
from inweave.files.reading import open_regular, read_bytes, read_text
from tests.support import stopwatch


def special_file(folder: Path, which: str) -> Path:
    """Something with a name that is not a file."""
    path = folder / which
    if which == "pipe":
        os.mkfifo(path)
    elif which == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif which == "folder":
        path.mkdir()
    elif which == "link to a pipe":
        os.mkfifo(folder / "pipe")
        path.symlink_to("pipe")
    else:
        path = Path("/dev") / which
    return path


@pytest.mark.parametrize(
    ("which", "word"),
    [
        ("pipe", "a named pipe"), ("link to a pipe", "a named pipe"), ("socket", "a socket"), ("folder", "a directory"),
        ("zero", "a device"), ("null", "a device"), ("full", "a device"), ("tty", "a device"),
    ],
)  # fmt: skip
def test_only_regular_files_are_opened(which: str, word: str, tmp_path: Path) -> None:
    path = special_file(tmp_path, which)
    with pytest.raises(FormatError, match=word) as caught, stopwatch(time.monotonic) as cost, open_regular(path):
        pass
    assert cost.seconds < 1
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("missing", "no such file or directory"), ("file/below", "no such file or directory"),
        ("x" * 300, "File name too long"), ("y/" * 3000, "File name too long"), ("a\0b", "null character"),
        ("\ud800", "surrogate"), ("a\udcffb", "no such file"),
        ("dangling", "a symbolic link to nowhere, which does not exist"),
        ("loop", "leads back to itself"), ("", "a directory"),
    ],
)  # fmt: skip
def test_names_that_cannot_be_opened(name: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    path = tmp_path / name
    for read in (lambda: read_bytes(path, 10), lambda: read_text(path), lambda: read_json(path)):
        with pytest.raises(FormatError, match=word) as caught:
            read()
        message = str(caught.value)
        assert message.isprintable() and len(message) < 1000
        message.encode()  # no half of a surrogate pair is left
    assert not is_file(path)
    assert is_folder(path) == (name == "")
    with pytest.raises(RequestError):
        read_bytes(path, 10, error=RequestError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.touch(0)
    with pytest.raises(FormatError, match="Permission denied"):
        read_bytes(path, 10)


def test_the_size_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(FormatError, match="5 bytes, more than the 4 that are accepted"):
        read_bytes(path, 4)
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte of nothing is refused before it is read
    with pytest.raises(FormatError, match="more than"):
        read_text(path)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc")
def test_a_file_that_does_not_tell_its_size() -> None:
    with pytest.raises(FormatError, match="more than the 3 bytes"):
        read_bytes("/proc/self/status", 3)


def test_text_is_utf8(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\xef\xbb\xbfgr\xc3\xbcn\r\n")
    assert read_text(path) == "grün\n"
    assert read_text(path, newlines=False) == "grün\r\n"
    path.write_bytes(b"ab\xff")
    with pytest.raises(FormatError, match="byte 2 is not UTF-8"):
        read_text(path)


def test_what_is_no_path() -> None:
    for wrong in (1, None, b"x", 1.5, [], object()):
        with pytest.raises(ConfigError, match="expected a path"):
            as_path(wrong)


def test_homes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_home("~/a") == tmp_path / "a"
    assert expand_home("a~") == Path("a~")
    for name in ("~nosuch/a", "~nosuch", "~\ud800/x", "~x\0y/z"):
        with pytest.raises(ConfigError, match="not a user's home folder"):
            expand_home(name)


@pytest.mark.parametrize(
    "text",
    ["\x1b[2J", "a\u202eb", "\x9b31m", "\u2066", "\ufeff", "\ud800", "\0", "a\nb", "\u2028", "\U000e0001", "\xa0"],
)
def test_nothing_printed_controls_a_terminal(text: str) -> None:
    result = printable(text)
    assert result.isprintable() and result.isascii()
    assert "\\" in result
    assert printable("grün 日本 👍 a b") == "grün 日本 👍 a b"


def test_a_long_path_is_cut_in_the_middle() -> None:
    assert printable_path("a" * 5000 + "b") == "a" * 150 + "..." + "a" * 149 + "b"


# -- JSON


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[" * 100_000, "nested too deeply"), ('{"a":' * 100_000, "nested too deeply"),
        ("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2), "nested more than"), ("9" * 5000, "5,000 digits"),
        ("-" + "9" * MAX_DIGITS, "301 digits"), ("1e999", "too large"), ("-1e999", "too large"), ("NaN", "not JSON"),
        ("[Infinity]", "not JSON"), ("{", "not valid JSON"), ("", "not valid JSON"), ('{"a": 1,}', "not valid JSON"),
        ("[" + "{}," * 1_000_000 + "1]", "values"), ("'a'", "not valid JSON"),
    ],
)  # fmt: skip
def test_json_that_is_refused(text: str, word: str, tmp_path: Path) -> None:
    for content in (text, text.encode()):
        with pytest.raises(FormatError, match=f"here: .*{word}"):
            parse_json(content, "here")
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=word):
        read_json(path, error=ConfigError)


def test_json_that_is_read(tmp_path: Path) -> None:
    document = {"a": [1, 2.5, -3, None, True, "grün"], "b": {"c": int("9" * MAX_DIGITS)}}
    path = tmp_path / "x.json"
    path.write_text(json.dumps(document, ensure_ascii=False), "utf-8")
    assert read_json(path) == document
    path.write_text("[1]")
    with pytest.raises(FormatError, match="object was expected"):
        read_json(path)
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH, "")
    assert parse_json("[Infinity, 1e999]", "", finite=False) == [float("inf")] * 2
