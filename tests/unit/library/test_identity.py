"""A file of the library is the one that was indexed, or it is read again: swapping it gains nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from inweave.errors import FormatError, MissingError
from inweave.files.confinement import confined, open_beneath
from inweave.files.reading import read_bytes
from inweave.library import Library
from inweave.library.walk import walk
from inweave.models import embedded
from tests.opened_files import opened_files
from tests.support import lora_pair, write

PIXEL, INK = embedded.loras()["pixel"], embedded.loras()["ink"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "loras"
    (root / "styles").mkdir(parents=True)
    write(root / "styles" / "one.safetensors", lora_pair("lora_unet_x", 8, 8, seed=1))
    write(root / "styles" / "two.safetensors", lora_pair("lora_unet_x", 8, 8, seed=2))
    return root


def opened(folder: Path) -> Library:
    library = Library(folder.parent / "library.sqlite3", [folder])
    library.scan()
    library.examine()
    return library


def hash_of(library: Library, reference: str) -> str | None:
    contents = library.find(reference).contents
    return contents.sha256 if contents else None


def test_a_replaced_file_is_read_anew_when_it_is_used(folder: Path) -> None:
    """Also a file of the same size with the same time: its inode and its bytes differ."""
    library = opened(folder)
    one, two = library.find("one"), library.find("two")
    path = folder / "styles" / "one.safetensors"
    status = path.stat()
    write(folder / "new", lora_pair("lora_unet_y", 8, 8, seed=3))
    os.utime(folder / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (folder / "new").stat().st_size == status.st_size
    (folder / "new").replace(path)
    now = library.find("one")
    assert now.id != one.id and now.contents is None
    with pytest.raises(MissingError, match="replaced"):
        library.get(one.id)
    assert one.contents is not None
    with pytest.raises(MissingError):
        library.find(f"sha256:{one.contents.sha256}")
    library.examine()
    assert hash_of(library, "one") not in (None, one.contents.sha256)
    assert library.find("two") == two
    write(folder / "elsewhere.safetensors", lora_pair("lora_unet_x", 8, 8, seed=1))
    library.scan()
    library.examine()
    assert library.find("elsewhere").id == one.id, "the file itself keeps its identity"


def test_a_scan_sees_what_was_replaced_without_a_new_time(folder: Path) -> None:
    library = opened(folder)
    before = library.find("one")
    path = folder / "styles" / "one.safetensors"
    status = path.stat()
    write(folder / "new", lora_pair("lora_unet_y", 8, 8, seed=3))
    os.utime(folder / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
    (folder / "new").replace(path)
    assert library.scan().changed == 1
    assert library.entries("one")[0].id != before.id
    same = library.entries("one")[0]
    library._execute("UPDATE files SET inode = inode + 1", ())  # as after mounting some file systems again
    report = library.scan()
    assert (report.changed, report.new) == (0, 0) and library.find("one").id == same.id
    shutil.copy2(path, folder / "new")
    (folder / "new").replace(path)
    report = library.scan()
    assert (report.changed, report.new) == (1, 0) and library.find("one").id == same.id, "the same bytes"


def test_a_file_rewritten_in_place_is_read_as_a_whole_again(folder: Path) -> None:
    """Its size, time, inode and both ends stay the same; a new mode alone costs nothing but reading."""
    path = write(folder / "long.safetensors", lora_pair("lora_unet_x", 4096, 8, seed=1))
    library = opened(folder)
    before, status = library.find("long"), path.stat()
    with path.open("r+b") as file:
        file.seek(status.st_size // 2)
        file.write(b"\x00\x3c" * 8)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert hash_of(library, "long") is None and library.get(before.id).contents is None
    library.examine()
    now = library.get(before.id)
    assert before.contents and now.contents and now.contents.sha256 != before.contents.sha256
    path.chmod(0o600)
    assert library.get(before.id).id == before.id
    assert library.scan().changed == 0
    library.examine()
    assert library.get(before.id).contents == now.contents


def test_two_files_that_exchange_their_names_keep_their_identities(folder: Path) -> None:
    library = opened(folder)
    one, two = library.find("one"), library.find("two")
    styles = folder / "styles"
    (styles / "one.safetensors").rename(styles / "x")
    (styles / "two.safetensors").rename(styles / "one.safetensors")
    (styles / "x").rename(styles / "two.safetensors")
    assert library.find("one").contents in (None, two.contents), "before any scan"
    library.scan()
    library.examine()
    assert (library.find("one").id, library.find("two").id) == (two.id, one.id)
    assert (library.get(one.id).contents, library.get(two.id).contents) == (one.contents, two.contents)


def test_an_id_that_was_given_before_the_hash_was_known_stays_valid(folder: Path) -> None:
    """A job may have been submitted with this id."""
    library = opened(folder)
    one = library.find("one")
    shutil.copyfile(folder / "styles" / "one.safetensors", folder / "copy.safetensors")
    (folder / "styles" / "one.safetensors").unlink()
    library.scan()
    passing = library.find("copy").id
    library.examine()
    assert passing != one.id and library.get(passing).id == library.find(passing).id == one.id


def test_a_file_that_is_gone_or_a_link_that_leads_out_is_not_used(folder: Path, tmp_path: Path) -> None:
    library = opened(folder)
    ids = [library.find(name).id for name in ("one", "two")]
    (folder / "styles" / "one.safetensors").unlink()
    (folder / "styles" / "two.safetensors").unlink()
    (folder / "styles" / "two.safetensors").symlink_to(PIXEL)
    for reference in ("one", "two", *ids, "styles/two"):
        with pytest.raises(MissingError):
            library.find(reference)


def test_a_folder_that_became_a_link_is_not_looked_into(folder: Path, tmp_path: Path) -> None:
    library = opened(folder)
    outside = tmp_path / "outside"
    (folder / "styles").rename(outside)
    (folder / "styles").symlink_to(outside, target_is_directory=True)
    with opened_files() as paths:
        with pytest.raises(MissingError):
            library.find("one")
        passed_over: list[str] = []
        assert list(walk(folder, passed_over)) == [] and "leads out" in passed_over[0]
        library.scan()
        library.examine()
    assert not [path for path in paths if "outside" in os.path.realpath(path) and "library.sqlite3" not in path]


def test_confined_folders_are_never_left(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    (inside / "sub").mkdir(parents=True)
    outside.mkdir()
    (inside / "sub" / "a").write_bytes(b"inside")
    (outside / "a").write_bytes(b"outside")
    (inside / "leaves").symlink_to(outside / "a")
    (inside / "stays").symlink_to(inside / "sub" / "a")
    (inside / "linked").symlink_to(outside, target_is_directory=True)
    (inside / "near").symlink_to(inside / "sub", target_is_directory=True)
    assert read_bytes(inside / "leaves", 100) == b"outside", "without confinement"
    with confined(inside):
        for name in ("sub/a", "stays", "near/a", "sub/../sub/a"):
            assert read_bytes(inside / name, 100) == b"inside"
        for name in ("leaves", "linked/a", "near/../linked/a"):
            with pytest.raises(FormatError, match="leads out of the library"):
                read_bytes(inside / name, 100)
        assert read_bytes(outside / "a", 100) == b"outside", "others are opened as ever"
    for name in ("../out/a", "..", "sub/../../out/a", "/etc/passwd"):
        with pytest.raises(OSError, match="leads out"):
            open_beneath(inside, name)


def test_a_name_that_is_swapped_while_it_is_opened_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The swap happens between resolving a name and opening it."""
    inside, outside = tmp_path / "in", tmp_path / "out"
    (inside / "sub").mkdir(parents=True)
    outside.mkdir()
    for name in (inside / "sub" / "a", outside / "a"):
        name.write_bytes(b"")
    resolve = Path.resolve

    def swap(self: Path, strict: bool = False) -> Path:
        place = resolve(self, strict)
        if self.name == "a" and not (inside / "sub").is_symlink():
            (inside / "sub").rename(tmp_path / "before")
            (inside / "sub").symlink_to(outside, target_is_directory=True)
        return place

    monkeypatch.setattr(Path, "resolve", swap)
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        open_beneath(inside, "sub/a")
