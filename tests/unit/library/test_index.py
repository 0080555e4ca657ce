"""The index of LoRA files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inweave.cli.app import app
from inweave.errors import ConflictError, MissingError
from inweave.library import Library
from inweave.library.processes import process_mark
from inweave.library.walk import Sighting, walk
from inweave.models import embedded

PIXEL = embedded.loras()["pixel"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "loras"
    (root / "styles").mkdir(parents=True)
    shutil.copy(PIXEL, root / "styles" / "pixel.safetensors")
    return root


def opened(folder: Path) -> Library:
    library = Library(folder.parent / "library.sqlite3", [folder])
    library.scan()
    return library


def test_facts_come_from_the_header(folder: Path) -> None:
    entry = opened(folder).find("pixel")
    assert (entry.path, entry.facts.base, entry.facts.ranks) == ("styles/pixel.safetensors", "inweave/emoji", (8,))
    assert entry.facts.triggers and entry.contents is None and entry.health == []


def test_hashes_follow_and_find_the_file(folder: Path) -> None:
    library = opened(folder)
    assert library.examine() == 1 and library.examine() == 0
    contents = library.find("pixel").contents
    assert contents is not None and contents.autov3 is not None
    for reference in (
        contents.sha256,
        contents.autov2,
        contents.autov3,
        f"sha256:{contents.sha256}",
        contents.autov2.upper(),
    ):
        assert library.find(reference).name == "pixel"


@pytest.mark.parametrize(
    "reference", ["pixel", "pixel.safetensors", "styles/pixel", "styles/pixel.safetensors", "./styles/pixel"]
)
def test_names_and_paths(folder: Path, reference: str) -> None:
    assert opened(folder).find(reference).name == "pixel"


def test_a_path_of_this_machine_must_lie_in_the_library(folder: Path) -> None:
    library = opened(folder)
    assert library.find(str(folder / "styles" / "pixel.safetensors")).name == "pixel"
    for outside in (str(PIXEL), "../pixel", "/etc/passwd", str(folder / ".." / "pixel.safetensors")):
        with pytest.raises(MissingError):
            library.find(outside)


def test_a_second_scan_opens_nothing(folder: Path) -> None:
    library = opened(folder)
    before = library.find("pixel")
    report = library.scan()
    assert (report.files, report.new, report.changed, report.gone) == (1, 0, 0, 0)
    assert library.find("pixel") == before


def test_a_moved_file_keeps_its_identity(folder: Path) -> None:
    library = opened(folder)
    library.examine()
    entry = library.find("pixel")
    (folder / "styles" / "pixel.safetensors").rename(folder / "renamed.safetensors")
    assert library.scan().moved == 1
    moved = library.find("renamed")
    assert (moved.id, moved.contents) == (entry.id, entry.contents)
    with pytest.raises(MissingError):
        library.find("styles/pixel")


def test_a_copied_and_deleted_file_keeps_its_identity_by_hash(folder: Path) -> None:
    library = opened(folder)
    library.examine()
    entry = library.find("pixel")
    copy = folder / "copy.safetensors"
    shutil.copyfile(folder / "styles" / "pixel.safetensors", copy)
    (folder / "styles" / "pixel.safetensors").unlink()
    library.scan()
    library.examine()
    assert library.find("copy").id == entry.id


def test_sidecars_are_read_and_reread(folder: Path) -> None:
    library = opened(folder)
    sidecar = folder / "styles" / "pixel.json"
    sidecar.write_text(json.dumps({"activation text": "pixel art, 16 bit", "preferred weight": 0.7, "notes": "mine"}))
    (folder / "styles" / "pixel.preview.png").write_bytes(b"image")
    (folder / "styles" / "pixel.civitai.info").write_text(json.dumps({"trainedWords": ["pxl"], "baseModel": "Other"}))
    library.scan()
    facts = library.find("pixel").facts
    assert [source["words"] for source in facts.triggers[:2]] == [["pixel art", "16 bit"], ["pxl"]]
    assert (facts.preferred_strength, facts.notes, facts.preview) == (0.7, "mine", "pixel.preview.png")
    sidecar.write_text("{ broken")
    library.scan()
    assert library.find("pixel").facts.notes is None


def test_health_names_what_is_wrong(folder: Path) -> None:
    (folder / "junk.safetensors").write_bytes(b"not a file of tensors")
    library = opened(folder)
    assert library.find("junk").health


def test_duplicates_and_ambiguous_names(folder: Path) -> None:
    (folder / "other").mkdir()
    shutil.copy(embedded.loras()["ink"], folder / "other" / "pixel.safetensors")
    shutil.copy(PIXEL, folder / "twin.safetensors")
    library = opened(folder)
    library.examine()
    with pytest.raises(ConflictError, match=r"styles/pixel\.safetensors"):
        library.find("pixel")
    assert [[entry.name for entry in group] for group in library.duplicates()] == [["pixel", "twin"]]


def test_links_out_of_the_library_are_passed_over(folder: Path) -> None:
    (folder / "out.safetensors").symlink_to(PIXEL)
    (folder / "in.safetensors").symlink_to(folder / "styles" / "pixel.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    library = Library(folder.parent / "library.sqlite3", [folder])
    report = library.scan()
    assert {entry.name for entry in library.entries()} == {"pixel", "in"}
    assert len(report.passed_over) == 2


def interrupted_reading(library: Library, folder: Path, name: str, process: str) -> None:
    """Make the index look as if ``process`` had died while it read the file."""
    sighting = next(each for each in walk_of(folder) if each.path == name)
    row = (str(folder.resolve()), sighting.path, sighting.stamp, sighting.size, process)
    library._execute("INSERT INTO reading VALUES (?, ?, ?, ?, ?)", row)


def test_a_file_that_kills_its_reader_twice_is_not_opened_again(folder: Path) -> None:
    library = opened(folder)
    (folder / "bomb.safetensors").write_bytes(PIXEL.read_bytes())
    interrupted_reading(library, folder, "bomb.safetensors", "999999999:1")
    library._record_fatal()
    interrupted_reading(library, folder, "bomb.safetensors", "999999998:1")
    library.scan()
    assert "crashed the process" in library.find("bomb").health[0]
    (folder / "bomb.safetensors").write_bytes(embedded.loras()["ink"].read_bytes())
    library.scan()
    assert library.find("bomb").health == []


def test_a_file_that_another_process_reads_now_or_was_reading_once_is_healthy(folder: Path) -> None:
    """A scan during another scan, and a scanner that was stopped in the middle of a large file."""
    library = opened(folder)
    for process in (process_mark(), f"{os.getpid()}:0"):  # the first one runs; the second one had the same id earlier
        interrupted_reading(library, folder, "styles/pixel.safetensors", process)
        library.scan()
        assert library.find("pixel").health == []
    assert library.examine() == 1 and library.find("pixel").contents is not None
    interrupted_reading(library, folder, "styles/pixel.safetensors", "999999999:1")
    library.scan()
    assert library.find("pixel").health == [], "what happened before it was read well counts no more"


HOSTILE_SIDECARS = {
    "half a surrogate pair": rb'{"activation text": "a\ud800b", "notes": "\udfff"}',
    "deep": b'{"notes":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "huge numbers": b'{"preferred weight": 1'
    + b"0" * 400
    + b', "notes": 5, "activation text": {"a": 1}, "description": []}',
    "NaN": b'{"preferred weight": NaN, "trainedWords": [null, 1, "  ", ["x"]]}',
    "not Unicode": b'\xff\xfe{"notes": 1}',
    "a list": b"[1, 2]",
    "large": b'{"notes": "' + b"x" * 5_000_000 + b'"}',
    "markup": b'{"activation text": "<img src=x onerror=alert(1)>,\\u001b[31mred", "notes": "\\u202e"}',
}


@pytest.mark.parametrize("name", HOSTILE_SIDECARS)
def test_hostile_sidecars_are_read_or_named_and_never_break_an_answer(folder: Path, name: str) -> None:
    for ending in (".json", ".civitai.info"):
        (folder / "styles" / f"pixel{ending}").write_bytes(HOSTILE_SIDECARS[name])
    document = opened(folder).find("pixel").as_dict()
    json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    assert document["base"] == "inweave/emoji" and document["preferred_strength"] is None
    if name in ("deep", "not Unicode", "a list", "large"):
        assert [text.split(":")[0] for text in document["warnings"]] == ["pixel.json", "pixel.civitai.info"]


def test_a_name_that_is_not_unicode_is_passed_over_and_named(folder: Path) -> None:
    shutil.copy(os.fsencode(PIXEL), os.fsencode(folder) + b"/caf\xe9.safetensors")
    library = Library(folder.parent / "library.sqlite3", [folder])
    report = library.scan()
    assert report.files == 1 and "not Unicode" in report.passed_over[0]
    report.passed_over[0].encode()


def test_the_command_line_shows_a_library_to_people_and_programs(folder: Path) -> None:
    (folder / "styles" / "pixel.json").write_text('{"activation text": "pxl"}')
    shutil.copy(PIXEL, folder / "odd\x1b[35m.safetensors")
    (folder / "junk.safetensors").write_bytes(b"x")

    def run(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(
            app, ["library", *arguments, "--folder", str(folder), "--database", str(folder / "i.db")]
        )
        assert result.exit_code == code, result.output
        return result.stdout

    lines = run("list").splitlines()
    assert any("pixel" in line and "inweave/emoji" in line and "rank 8" in line and "pxl" in line for line in lines)
    assert "\x1b[35m" not in "".join(lines) and any("junk" in line and "unknown base" in line for line in lines)
    page = run("show", "styles/pixel")
    assert "confidence 100%" in page and "sha256" in page and "pxl  (pixel.json)" in page and "('" not in page
    assert json.loads(run("show", "styles/pixel", "--json"))["hashes"]["autov2"] == "8845bf35ff"
    assert run("find", "autov2:8845bf35ff").strip().endswith(".safetensors")
    assert {each["name"] for each in json.loads(run("list", "--json"))["loras"]} >= {"pixel", "junk", "ink"}
    assert json.loads(run("doctor", "--json", code=1))["unhealthy"][0]["path"] == "junk.safetensors"
    assert "same tensors" in run("doctor", code=1)
    run("show", "nosuch", code=2)


def walk_of(folder: Path) -> list[Sighting]:
    return list(walk(folder, []))


def test_a_peft_folder_is_one_entry(folder: Path, tmp_path: Path) -> None:
    from inweave import convert

    convert(PIXEL, folder / "peft-pixel", to="peft")
    library = opened(folder)
    assert library.find("peft-pixel").facts.base == "inweave/emoji"


def test_a_word_that_is_not_unicode_is_in_no_name(folder: Path) -> None:
    library = Library(folder.parent / "library.sqlite3", [folder])
    library.scan()
    assert library.entries("\udcff") == [] != library.entries("")
