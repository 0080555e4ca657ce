"""Realistic folders: disks that come and go, the same names twice, letters of every kind, thousands of sidecars."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import time
import unicodedata
from pathlib import Path

import pytest

from inweave.errors import ConfigError, ConflictError, MissingError
from inweave.library import Library
from inweave.library.walk import walk
from inweave.serve.sandbox.library_scan import scan_library
from tests.support import lora_pair, sized, stopwatch, write


def lora(path: Path, seed: int = 0, metadata: dict[str, str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(path, lora_pair("lora_unet_x", 8, 8, seed=seed), metadata)


def test_a_folder_that_is_not_mounted_for_a_while_loses_nothing(tmp_path: Path) -> None:
    """An empty mount point, a missing mount point, and a disk with another copy meanwhile."""
    disk, other = tmp_path / "disk", tmp_path / "other"
    lora(disk / "a.safetensors", 1)
    lora(disk / "sub" / "b.safetensors", 2)
    lora(other / "c.safetensors", 3)
    library = Library(tmp_path / "library.sqlite3", [disk, other])
    library.scan()
    library.examine()
    before = library.entries()
    disk.rename(tmp_path / "away")
    asyncio.run(scan_library(library, tmp_path / "library.sqlite3", examine=True))
    assert [entry.name for entry in library.entries()] == ["c"] and library.count() == 1
    with pytest.raises(MissingError):
        library.get(before[0].id)
    shutil.copyfile(tmp_path / "away" / "a.safetensors", other / "copy.safetensors")
    report = library.scan()
    library.examine()
    assert any("No such file" in line for line in report.passed_over)
    assert library.find("copy").id != before[0].id, "the file on the disk keeps its own"
    (other / "copy.safetensors").unlink()
    disk.mkdir()
    library.scan()
    assert library.count() == 1
    disk.rmdir()
    (tmp_path / "away").rename(disk)
    report = library.scan()
    assert (report.new, report.changed, report.moved) == (0, 0, 0), "nothing is read again"
    assert library.entries() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable for root")
def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    lora(tmp_path / "loras" / "closed" / "a.safetensors")
    lora(tmp_path / "loras" / "b.safetensors", 2)
    (tmp_path / "loras" / "closed").chmod(0)
    try:
        passed_over: list[str] = []
        assert [each.path for each in walk(tmp_path / "loras", passed_over)] == ["b.safetensors"]
        assert passed_over == ["closed/: Permission denied; the files in it are left out"]
    finally:
        (tmp_path / "loras" / "closed").chmod(0o700)


def test_the_same_names_in_two_folders(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    last = tmp_path / "last"
    lora(one / "style.safetensors", 1)
    lora(two / "style.safetensors", 2)
    lora(last / "other.safetensors", 3)
    library = Library(tmp_path / "library.sqlite3", [one, two, last])
    library.scan()
    library.examine()
    with pytest.raises(
        ConflictError, match=r"style\.safetensors \(lora-\w+\), style\.safetensors \(lora-\w+\); name one by its id"
    ):
        library.find("style")
    for folder in (one, two):
        for reference in (str(folder / "style.safetensors"), str(folder / "style")):
            assert library.find(reference).root == str(folder)
    ids = {entry.id for entry in library.entries("style")}
    assert len(ids) == 2 and {library.find(each).id for each in ids} == ids


def test_letters_are_the_same_however_they_are_stored(tmp_path: Path) -> None:
    """macOS stores accents separately, prompts have composed letters; case distinguishes."""
    root = tmp_path / "loras"
    apart, joined = unicodedata.normalize("NFD", "Café Ångström"), unicodedata.normalize("NFC", "Café Ångström")
    lora(root / f"{apart}.safetensors", 1)
    lora(root / "Pixel.safetensors", 2)
    lora(root / "pixel.safetensors", 3)
    library = Library(tmp_path / "library.sqlite3", [root])
    library.scan()
    for reference in (apart, joined, f"{joined}.safetensors", f"./{joined}"):
        assert library.find(reference).name == apart
    assert (library.find("Pixel").name, library.find("pixel").name) == ("Pixel", "pixel")
    with pytest.raises(MissingError, match=r"did you mean '[Pp]ixel'"):
        library.find("PIXEL")
    lora(root / f"{joined}.safetensors", 4)
    library.scan()
    assert (library.find(apart).name, library.find(joined).name) == (apart, joined), "each by its own name"


def test_names_as_long_as_they_can_be(tmp_path: Path) -> None:
    root = tmp_path / "loras"
    longest = "ü" * 121  # 242 bytes, and 12 of the ending
    deep = "/".join(["d" * 100] * 12)
    for path in (f"{longest}.safetensors", f"{deep}/{longest}.safetensors"):
        lora(root / path, len(path))
    library = Library(tmp_path / "library.sqlite3", [root])
    assert library.scan().files == 2
    assert library.examine() == 2
    assert library.find(f"{deep}/{longest}").name == longest
    for reference in ("x" * 100_000, "/" * 5000, "a\x00b", "\udcff"):
        with pytest.raises(MissingError):
            library.find(reference)


@pytest.mark.parametrize("info", [
    b"", b"{", b"null", b"[]", b'"text"', b"\xff\xfe", b'{"trainedWords": "a, b"}',
    b'{"trainedWords": [1, null, {}, ["x"], "", "ok"]}',
    b'{"trainedWords": {"a": 1}, "baseModel": 7, "description": ["x"]}', b'\xef\xbb\xbf{"trainedWords": ["bom"]}',
    b'{"model": null, "files": [], "images": "x", "trainedWords": ["\\ud800"]}', b"[" * 50_000,
])  # fmt: skip
def test_a_malformed_page_of_civitai_leaves_the_rest_intact(tmp_path: Path, info: bytes) -> None:
    root = tmp_path / "loras"
    lora(root / "a.safetensors", metadata={"modelspec.trigger_phrase": "mine"})
    (root / "a.civitai.info").write_bytes(info)
    (root / "a.json").write_text('{"notes": "kept"}')
    library = Library(tmp_path / "library.sqlite3", [root])
    library.scan()
    facts = library.find("a").facts
    assert facts.notes == "kept" and facts.triggers[-1]["words"] == ["mine"] and facts.error is None
    readable = info.lstrip(b"\xef\xbb\xbf").startswith(b"{") and len(info) > 1
    assert bool(facts.warnings) is not readable
    json.dumps(library.find("a").as_dict(), ensure_ascii=False).encode()


def test_thousands_of_sidecars(tmp_path: Path) -> None:
    """Sidecars of files that exist and of files that do not: a second scan opens none of them."""
    root, count = tmp_path / "loras", sized(300, 5000)
    lora(root / "a0.safetensors")
    for number in range(count):
        (root / f"a{number}.json").write_text('{"activation text": "word"}')
        (root / f"a{number}.preview.png").write_bytes(b"")
    library = Library(tmp_path / "library.sqlite3", [root])
    library.scan()
    assert [(entry.facts.preview, entry.facts.sidecars) for entry in library.entries()] == [
        ("a0.preview.png", ("a0.json", "a0.preview.png"))
    ]
    with stopwatch(time.process_time) as cost:
        report = library.scan()
    assert (report.files, report.changed) == (1, 0) and cost.seconds < 1
    with stopwatch(time.process_time) as cost:
        library.find("a0")
    assert cost.seconds < 0.1, "finding a file does not list its folder"


def test_an_index_of_the_version_before_keeps_its_ids(tmp_path: Path) -> None:
    root, database = tmp_path / "loras", tmp_path / "library.sqlite3"
    lora(root / "a.safetensors")
    library = Library(database, [root])
    library.scan()
    library.examine()
    before = library.find("a")
    library.close()
    with sqlite3.connect(database) as connection:
        connection.execute("ALTER TABLE files DROP COLUMN sample")
        connection.execute("DROP TABLE former")
        connection.execute("PRAGMA user_version = 2")
    library = Library(database, [root])
    assert library.scan().changed == 0 and library.find("a") == before


def test_an_index_that_cannot_be_opened_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "loras").mkdir()
    with pytest.raises(ConfigError, match="the index cannot be"):
        Library(tmp_path / "loras", [tmp_path / "loras"])
