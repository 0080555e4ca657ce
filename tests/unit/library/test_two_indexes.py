"""Two machines index the same files: ids are the same, and a file is recognized by its content."""

from __future__ import annotations

import shutil
from pathlib import Path

from inweave.library import Library
from tests.support import lora_pair, write


def test_ids_are_those_of_another_index(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("here", "there")]
    for folder in folders:
        folder.mkdir()
    for number in range(3):
        write(folders[0] / f"{number}.safetensors", lora_pair(f"lora_unet_{number}", 8, 8, seed=number))
    shutil.copy(folders[0] / "0.safetensors", folders[0] / "again.safetensors")
    for path in folders[0].iterdir():
        shutil.copy(path, folders[1] / path.name)  # other times and inodes
    indexes = [Library(tmp_path / f"{folder.name}.sqlite3", [folder]) for folder in folders]
    for each in indexes:
        each.scan()
    listed = [{entry.path: entry.id for entry in each.entries()} for each in indexes]
    assert listed[0] == listed[1] and len(set(listed[0].values())) == 4
    for each in indexes:
        each.close()


def test_a_file_of_another_machine_is_recognized_by_its_content_alone(tmp_path: Path) -> None:
    (tmp_path / "loras").mkdir()
    first = write(tmp_path / "loras" / "a.safetensors", lora_pair("lora_unet_a", 8, 8, seed=1))
    write(tmp_path / "loras" / "b.safetensors", lora_pair("lora_unet_a", 8, 8, seed=2))
    library = Library(tmp_path / "index.sqlite3", [tmp_path / "loras"])
    library.scan()
    identity = library.identity(library.find("a"))
    assert identity["sha256"] is None and library.recognize(**identity).path == "a.safetensors"
    library.examine()
    identity = library.identity(library.find("a"))
    assert library.recognize(**identity).path == "a.safetensors"
    assert library.recognize(**identity | {"sha256": "0" * 64}) is None
    assert library.recognize(**identity | {"sample": None}) is None
    first.unlink()
    assert library.recognize(**identity) is None
    library.close()
