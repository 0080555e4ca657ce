"""Datasets as other trainers lay them out on disk: lists of images in several formats, folders of folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from inweave.errors import ConfigError, FormatError
from inweave.training.data.reader import read_dataset
from inweave.training.data.types import Dataset


def image(path: Path, caption: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 16), (len(path.parts), sum(str(path).encode()) % 251, 7)).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, "utf-8")
    return path


def captions(dataset: Dataset) -> dict[str, tuple[str, ...]]:
    return {example.path.name: example.captions for example in dataset.examples}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metadata.jsonl", '{"file_name": "a.png", "text": "A, b"}\n{"file_name": "in/c.png", "caption": "C"}\n'),
        ("metadata.csv", 'file_name,text\na.png,"A, b"\nin/c.png,C\n'),
        ("list.jsonl", '{"image_path": "a.png", "caption": "A, b"}\n{"image_path": "/other/in/c.png", "caption": "C"}'),
        ("meta.json", '{"a": {"caption": "A", "tags": "b"}, "in/c": {"caption": "C", "train_resolution": [8, 8]}}'),
        ("meta.json", '{"C:\\\\data\\\\a.png": {"tags": "A, b"}, "in/c.png": {"caption": "C", "tags": ""}}'),
    ],
)
def test_a_file_that_lists_images_is_a_dataset(name: str, text: str, tmp_path: Path) -> None:
    """By its path, as the metadata_file of a subset, and, under its usual name, in its folder."""
    for each in ("a.png", "b.png", "in/c.png"):
        image(tmp_path / each)
    if "/other/" in text:
        image(tmp_path / "c.png")
    (tmp_path / name).write_text(text, "utf-8")
    tables = {"datasets": [{"subsets": [{"image_dir": str(tmp_path), "metadata_file": str(tmp_path / name)}]}]}
    sources: list[Any] = [tmp_path / name, tables, *([tmp_path] if name.startswith("metadata.") else [])]
    for source in sources:
        assert captions(read_dataset(source)) == {"a.png": ("A, b",), "c.png": ("C",)}


@pytest.mark.parametrize("header", ["id,score", "original_file_name,width", "file_name,width", "not_file_name,text"])
def test_a_csv_about_something_else_lists_no_images(header: str, tmp_path: Path) -> None:
    image(tmp_path / "train" / "a.png", "a cat")
    for folder in (tmp_path, tmp_path / "train"):
        (folder / "metadata.csv").write_text(f"{header}\na.png,2\n", "utf-8")
    assert captions(read_dataset(tmp_path)) == {"a.png": ("a cat",)}
    (tmp_path / "train" / "metadata.csv").write_text('"text", "file_name"\n"A, b",a.png\n', "utf-8")
    assert captions(read_dataset(tmp_path)) == {"a.png": ("A, b",)}


def test_lists_that_cannot_be_read_are_refused_in_words(tmp_path: Path) -> None:
    image(tmp_path / "a.png", "a cat")
    for name, text, message in (
        ("metadata.parquet", "PAR1", r"Parquet files are not read; write a metadata\.jsonl"),
        ("m.json", '{"a": 1}', r"expected \{\"a\.png\""),
        ("m.json", "[1, 2]", "expected concepts of OneTrainer or data backends of SimpleTuner"),
        ("m.json", '{"../../etc/x.png": {"caption": "x"}}', "outside of the folder"),
        ("m.csv", "file_name,text\n,x\n", "line 2 names no image"),
    ):
        (tmp_path / name).write_text(text, "utf-8")
        with pytest.raises((ConfigError, FormatError), match=message):
            read_dataset(tmp_path / name)


def test_folders_in_a_folder_without_images_are_read(tmp_path: Path) -> None:
    image(tmp_path / "cats" / "a.png", "a cat")
    image(tmp_path / "dogs" / "old" / "b.png", "a dog")
    image(tmp_path / ".cache" / "c.png", "hidden")
    assert captions(read_dataset(tmp_path)) == {"a.png": ("a cat",), "b.png": ("a dog",)}
    assert {example.folder for example in read_dataset(tmp_path).examples} == {"cats", "old"}
    image(tmp_path / "d.png", "outer")
    dataset = read_dataset(tmp_path)
    assert list(captions(dataset)) == ["d.png"] and len(dataset.report.ignored) == 2


def test_subfolders_of_a_subset_are_read_on_request(tmp_path: Path) -> None:
    image(tmp_path / "a.png", "outer")
    image(tmp_path / "in" / "b.png", "inner")
    subset = {"image_dir": str(tmp_path)}
    for extra, names in (({}, ["a.png"]), ({"include_subfolders": True}, ["a.png", "b.png"])):
        assert list(captions(read_dataset({"datasets": [{"subsets": [subset | extra]}]}))) == names


def test_each_table_reads_its_own_subfolders(tmp_path: Path) -> None:
    """The same folder at two resolutions, and a folder inside of another, in either order."""
    image(tmp_path / "a.png", "outer")
    image(tmp_path / "in" / "b.png", "inner")
    image(tmp_path / "in" / "deep" / "c.png", "innermost")
    outer, inner = (
        {"subsets": [{"image_dir": str(folder), "include_subfolders": True}]} for folder in (tmp_path, tmp_path / "in")
    )
    everything, below = ["a.png", "b.png", "c.png"], ["b.png", "c.png"]
    for tables, names in (
        ([outer | {"resolution": side} for side in (512, 768)], [*everything, *everything]),
        ([outer, inner], [*everything, *below]),
        ([inner, outer], [*below, *everything]),
    ):
        assert [each.path.name for each in read_dataset({"datasets": tables}).examples] == names


def test_subfolders_on_request_are_all_of_them(tmp_path: Path) -> None:
    """Numbered ones too; a folder that links lead to is read once."""
    for place in ("12_x/a.png", "2023_summer/in/b.png", "masks/c.png"):
        image(tmp_path / place, place)
    (tmp_path / "2023_summer" / "loop").symlink_to(tmp_path)
    (tmp_path / "0_link").symlink_to(tmp_path / "2023_summer" / "in")
    (tmp_path / "again").symlink_to(tmp_path / "masks")
    subset = {"image_dir": str(tmp_path), "include_subfolders": True}
    dataset = read_dataset({"datasets": [{"subsets": [subset]}]})
    assert sorted(each.path.name for each in dataset.examples) == ["a.png", "b.png", "c.png"]
    assert {each.repeats for each in dataset.examples} == {1} and not dataset.report.ignored


def test_folders_of_another_use_are_ignored(tmp_path: Path) -> None:
    image(tmp_path / "cats" / "a.png", "a cat")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "same").symlink_to(tmp_path / "cats")
    others = ["Masks", "cats/masks", "log", "model", "models", "output", "reg/dogs", "samples"]
    for name in others:
        image(tmp_path / name / "b.png", "none of them")
    dataset = read_dataset(tmp_path)
    assert [each.path for each in dataset.examples] == [tmp_path / "cats" / "a.png"]
    assert set(dataset.report.ignored) == {tmp_path / name for name in others}


@pytest.mark.parametrize("place", ["img/10_cat", "0_cat", "10_cat"])
def test_numbered_folders_without_images_make_no_plain_ones_of_the_others(place: str, tmp_path: Path) -> None:
    (tmp_path / place).mkdir(parents=True)
    image(tmp_path / "backup" / "a.png", "not asked for")
    with pytest.raises(ConfigError, match="no images to train on"):
        read_dataset(tmp_path)


def test_lists_of_folders_of_onetrainer_and_simpletuner_are_datasets(tmp_path: Path) -> None:
    image(tmp_path / "photos" / "a.png", "a cat")
    image(tmp_path / "photos" / "in" / "b.png", "a dog")
    concepts = [{"path": "photos", "balancing": 3, "include_subdirectories": True}, {"path": "no", "enabled": False}]
    (tmp_path / "concepts.json").write_text(json.dumps(concepts), "utf-8")
    dataset = read_dataset(tmp_path / "concepts.json")
    assert captions(dataset) == {"a.png": ("a cat",), "b.png": ("a dog",)}
    assert [example.repeats for example in dataset.examples] == [3, 3]
    backends = [
        {"id": "a", "type": "local", "instance_data_dir": "photos", "caption_strategy": "textfile", "repeats": 1},
        {"id": "t", "dataset_type": "text_embeds", "cache_dir": "c"},
    ]
    (tmp_path / "multidatabackend.json").write_text(json.dumps(backends), "utf-8")
    dataset = read_dataset(tmp_path / "multidatabackend.json")
    assert captions(dataset) == {"a.png": ("a cat",)} and dataset.examples[0].repeats == 2
    (tmp_path / "concepts.json").write_text('[{"path": "photos", "type": "PRIOR_PREDICTION"}]', "utf-8")
    with pytest.raises(ConfigError, match=r"concepts\.json: sets prior_prediction of the run"):
        read_dataset(tmp_path / "concepts.json")


def read_list(folder: Path, entries: list[Any]) -> Dataset:
    (folder / "list.json").write_text(json.dumps(entries), "utf-8")
    return read_dataset(folder / "list.json")


def test_folders_of_a_list_have_a_resolution_only_of_their_own(tmp_path: Path) -> None:
    """OneTrainer writes a resolution into every concept, and a switch that says whether it counts."""
    names = ["off", "none", "on"]
    for name in names:
        image(tmp_path / name / "a.png", name)
    override = {"enable_resolution_override": False, "resolution_override": "512"}
    concepts: list[dict[str, Any]] = [{"path": name, "image": override, "text_variations": 1} for name in names]
    concepts[1] = {"path": "none"}
    concepts[2]["image"] = {"enable_resolution_override": True, "resolution_override": "640"}
    assert [each.subset.resolution for each in read_list(tmp_path, concepts).examples] == [None, None, (640, 640)]
    backends: list[dict[str, Any]] = [
        {"instance_data_dir": name, "caption_strategy": "textfile", "dataset_type": "image"} for name in names
    ]
    backends[2] |= {"resolution": 640, "resolution_type": "pixel_area"}
    dataset = read_list(tmp_path, backends)
    assert [each.subset.resolution for each in dataset.examples] == [None, None, (640, 640)]
    assert any("SimpleTuner chooses backends at random" in note for note in dataset.report.notes)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"path": "photos", "text_variations": 3}, r"sets caption_variants of the run to 3.*train --import"),
        ({"path": ""}, r"concepts\.1\.path: expected a folder"),
        ({"path": 5}, r"concepts\.1\.path: expected a folder"),
        ({"path": "photos", "text_variations": "x"}, "expected a number"),
        ({"instance_data_dir": "photos", "resolution": "x"}, "expected a number"),
        ({"name": "x"}, r"concepts\.1\.path: expected a folder"),
        (5, "entry 1 is not a table"),
        (
            {"instance_data_dir": "photos", "caption_strategy": "instanceprompt", "instance_prompt": "a cat"},
            r"sets caption of the run to 'a cat'.*train --import",
        ),
        (
            {"instance_data_dir": "photos", "prepend_instance_prompt": True, "instance_prompt": "a cat"},
            r"sets trigger of the run to 'a cat'.*train --import",
        ),
        ({"type": "huggingface", "dataset_name": "a/b", "dataset_type": "image"}, r"\.1\.instance_data_dir: expected"),
    ],
)
def test_a_list_of_folders_loses_nothing(entry: Any, message: str, tmp_path: Path) -> None:
    image(tmp_path / "photos" / "a.png", "a cat")
    tuner = isinstance(entry, dict) and entry.keys() & {"instance_data_dir", "dataset_type"}
    first = {"instance_data_dir": "photos", "caption_strategy": "textfile"} if tuner else {"path": "photos"}
    if tuner:
        entry = {"caption_strategy": "textfile", **entry}
    with pytest.raises(ConfigError, match=message):
        read_list(tmp_path, [first, entry])


def test_folders_for_validation_are_noted(tmp_path: Path) -> None:
    image(tmp_path / "photos" / "a.png", "a cat")
    dataset = read_list(tmp_path, [{"path": "photos"}, {"path": "other", "type": "VALIDATION"}])
    assert len(dataset.examples) == 1 and any("is for validation" in note for note in dataset.report.notes)
