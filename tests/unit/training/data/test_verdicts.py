"""A second check of the same images decodes none of them, whatever changed is decoded again, and memory is bounded."""

from __future__ import annotations

import io
import os
import time
import tracemalloc
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

from inweave.training.data.reader import read_dataset
from inweave.training.data.types import Dataset
from inweave.training.data.verdicts import NAME
from tests.unit.training.image_sets import color_image

COUNT = 1000


def image_bytes(seed: int, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    color_image(seed, 16, 16).save(buffer, form)
    return buffer.getvalue()


def many(folder: Path, count: int = COUNT) -> Path:
    """Images with captions of their own; hard links of a few files, which are other images to a dataset."""
    folder.mkdir()
    for number in range(count):
        path = folder / f"{number:05}.png"
        first = folder / f"{number % 10:05}.png"
        if number < 10:
            path.write_bytes(image_bytes(number))
        else:
            path.hardlink_to(first)
        path.with_suffix(".txt").write_text(f"image {number}, tag{number % 7}")
    return folder


def same(one: Dataset, other: Dataset) -> bool:
    return one.examples == other.examples and one.report.duplicates == other.report.duplicates


def test_a_second_check_decodes_nothing_and_takes_bounded_memory(tmp_path: Path) -> None:
    data, cache, progress = many(tmp_path / "set"), tmp_path / "cache", list[tuple[int, int]]()
    first = read_dataset(data, cache=cache, on_file=lambda *each: progress.append(each))
    assert first.report.decoded == COUNT and progress[-1] == (COUNT, COUNT) and progress == sorted(progress)
    tracemalloc.start()
    second = read_dataset(data, cache=cache, on_file=lambda *each: progress.append((0, 0)))
    final, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert second.report.decoded == 0 and (0, 0) not in progress
    assert same(first, second) and same(second, read_dataset(data))
    assert len({example.captions for example in second.examples}) == COUNT
    assert final / COUNT < 2000 and peak / COUNT < 6000, "bytes per image"


def test_what_changed_is_decoded_again(tmp_path: Path) -> None:
    """Also in place, with its size and time kept."""
    data, cache = tmp_path / "set", tmp_path / "cache"
    data.mkdir()
    for number in range(3):
        (data / f"{number}.bmp").write_bytes(image_bytes(number, "BMP"))
        (data / f"{number}.txt").write_text("x")
    before = read_dataset(data, cache=cache)
    assert read_dataset(data, cache=cache).report.decoded == 0
    path = data / "1.bmp"
    status = path.stat()
    with path.open("r+b") as file:
        file.write(image_bytes(7, "BMP"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    after = read_dataset(data, cache=cache)
    assert after.report.decoded == 1 and after.examples[1].sha256 != before.examples[1].sha256
    data.rename(tmp_path / "moved")
    moved = read_dataset(tmp_path / "moved", cache=cache)
    assert moved.report.decoded == 3, "a verdict is that of a path"
    assert read_dataset(data.with_name("moved"), cache=cache).report.decoded == 0


def test_writes_within_one_tick_of_the_clock_are_seen(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.bmp", tmp_path / "cache"
    (tmp_path / "a.txt").write_text("x")
    seen = set()
    for number in range(5):
        path.write_bytes(image_bytes(number, "BMP"))
        seen.add(read_dataset(tmp_path, cache=cache).examples[0].sha256)
    assert len(seen) == 5


def test_a_time_in_the_future_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock was set back: a later write may have an earlier time."""
    many(tmp_path / "set", 2)
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() - 10**12)
    for _ in range(2):
        assert read_dataset(tmp_path / "set", cache=tmp_path / "cache").report.decoded == 2


def test_an_image_and_the_same_file_as_a_mask_have_two_verdicts(tmp_path: Path) -> None:
    data = many(tmp_path / "set", 2)
    (data / "00000-masklabel.png").hardlink_to(data / "00000.png")
    for count in (3, 0):
        dataset = read_dataset(data, cache=tmp_path / "cache")
        assert dataset.report.decoded == count and dataset.examples[0].mask is not None
    assert dataset == read_dataset(data, cache=tmp_path / "cache")


def test_unreadable_files_are_looked_at_again(tmp_path: Path) -> None:
    data = many(tmp_path / "set", 2)
    (data / "00001.png").unlink()
    (data / "00001.png").write_bytes(image_bytes(1)[:60])
    for count in (2, 1):
        dataset = read_dataset(data, cache=tmp_path / "cache", skip_unreadable=True)
        assert dataset.report.decoded == count and len(dataset.report.unreadable) == 1


@pytest.mark.parametrize("contents", [b"no database at all" * 100, b"", b"SQLite format 3\0" + b"\xff" * 4000])
def test_a_damaged_cache_is_started_again(contents: bytes, tmp_path: Path) -> None:
    data, cache = many(tmp_path / "set", 2), tmp_path / "cache"
    first = read_dataset(data, cache=cache)
    (cache / NAME).write_bytes(contents)
    again = read_dataset(data, cache=cache)
    assert same(first, again) and again.report.decoded == 2
    assert not contents or "damaged" in again.report.notes[0]
    third = read_dataset(data, cache=cache)
    assert third.report.decoded == 0 and third.report.notes == ()


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    data = many(tmp_path / "set", 2)
    (tmp_path / "cache").write_text("a file")
    dataset = read_dataset(data, cache=tmp_path / "cache")
    assert dataset.report.decoded == 2 and "cannot be used" in dataset.report.notes[0]
