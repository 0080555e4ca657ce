"""Reference images of datasets: by name in folders, or listed; whatever does not fit is named before work starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from PIL import Image

from inweave.errors import ConfigError, FormatError, InweaveError
from inweave.training.data.batches import arrange
from inweave.training.data.buckets import BucketRules
from inweave.training.data.reader import read_dataset
from inweave.training.data.report import check_dataset


def image(path: Path, size: tuple[int, int] = (64, 64), color: int = 90) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (color, 20, 200)).save(path)
    return path


def pairs(folder: Path, *folders: str, names: tuple[str, ...] = ("a", "b")) -> Path:
    for number, name in enumerate(names):
        image(folder / f"{name}.png", color=number)
        (folder / f"{name}.txt").write_text(f"caption {name}")
        for other, each in enumerate(folders):
            image(
                folder / each / f"{name}.{'jpg' if other else 'png'}", (32 + 16 * other, 48), 100 + number + 10 * other
            )
    return folder


def names(dataset_or_folder: Path, **options: object) -> dict[str, list[str]]:
    examples = read_dataset(dataset_or_folder, **options).examples  # type: ignore[arg-type]
    return {
        each.path.name: [f"{other.path.parent.name}/{other.path.name}" for other in each.references]
        for each in examples
    }


def test_folders_are_matched_by_name_in_their_order(tmp_path: Path) -> None:
    pairs(tmp_path, "before", "mask")
    expected = {"a.png": ["before/a.png", "mask/a.jpg"], "b.png": ["before/b.png", "mask/b.jpg"]}
    assert names(tmp_path, control=["before/", "mask/"]) == expected
    assert names(tmp_path, control=["mask", "before"])["a.png"] == ["mask/a.jpg", "before/a.png"]
    report = read_dataset(tmp_path, control=["before", "mask"]).report
    assert not report.ignored and not report.other_files
    assert [path.name for path in read_dataset(tmp_path).report.ignored] == ["before", "mask"]


def test_a_table_names_its_own_folders(tmp_path: Path) -> None:
    pairs(tmp_path / "set", "before")
    pairs(tmp_path / "plain", names=("c",))
    file = tmp_path / "set.toml"
    file.write_text(
        '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "set"\ncontrol = "before"\n'
        '[[datasets.subsets]]\nimage_dir = "plain"\n'
    )
    assert names(file) == {"a.png": ["before/a.png"], "b.png": ["before/b.png"], "c.png": []}
    assert read_dataset(file).examples[0].references[0].size == (32, 48)
    file.write_text('[[datasets]]\n[[datasets.subsets]]\nimage_dir = "set"\ncontrol = ["nowhere"]\n')
    with pytest.raises(ConfigError, match="control: no folder 'nowhere'"):
        read_dataset(file)
    file.write_text('[[datasets]]\n[[datasets.subsets]]\nimage_dir = "set"\ncontrol = [3]\n')
    with pytest.raises(ConfigError, match="a folder or a list of folders"):
        read_dataset(file)


def test_several_of_one_folder_by_their_numbers(tmp_path: Path) -> None:
    pairs(tmp_path, names=("a",))
    for number in (0, 1, 2):
        image(tmp_path / "c" / f"a_{number}.png", color=number)
    assert names(tmp_path, control=["c"]) == {"a.png": ["c/a_0.png", "c/a_1.png", "c/a_2.png"]}
    (tmp_path / "c" / "a_1.png").unlink()
    with pytest.raises(FormatError, match="a number is missing"):
        read_dataset(tmp_path, control=["c"])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda folder: (folder / "before" / "b.png").unlink(), r"b\.png: no reference image b\.\* in .*before"),
        (lambda folder: image(folder / "before" / "b.webp"), r"b\.png: .*more than once \(b\.png, b\.webp\)"),
        (lambda folder: image(folder / "before" / "b_0.png"), r"more than once \(b\.png, b_0\.png\)"),
        (lambda folder: (folder / "before" / "b.png").write_bytes(b"no image"), r"before/b\.png"),
    ],
)
def test_a_missing_doubled_or_broken_partner_is_named(tmp_path: Path, change: object, text: str) -> None:
    change(pairs(tmp_path, "before"))  # type: ignore[operator]
    with pytest.raises(FormatError, match=text):
        read_dataset(tmp_path, control=["before"])
    dataset = read_dataset(tmp_path, control=["before"], skip_unreadable=True)
    assert [each.path.name for each in dataset.examples] == ["a.png"]
    assert len(dataset.report.unreadable) == 1


def test_a_metadata_file_lists_them(tmp_path: Path) -> None:
    pairs(tmp_path, "x", "y", names=("a", "b", "c"))
    rows = [
        {"file_name": "a.png", "text": "A", "control": ["y/a.jpg", "x/a.png"]},
        {"file_name": "b.png", "text": "B", "control_path_1": "y/b.jpg", "control_path_0": "x/b.png"},
        {"file_name": "c.png", "text": "C"},
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert names(tmp_path) == {"a.png": ["y/a.jpg", "x/a.png"], "b.png": ["x/b.png", "y/b.jpg"], "c.png": []}
    (tmp_path / "metadata.jsonl").unlink()
    (tmp_path / "metadata.csv").write_text("file_name,text,control\na.png,A,x/a.png\n")
    assert names(tmp_path) == {"a.png": ["x/a.png"]}


@pytest.mark.parametrize("value", ["../secret.png", "/etc/passwd", 3, ["x/a.png", None], "x/missing.png"])
def test_a_metadata_file_names_nothing_outside_or_missing(tmp_path: Path, value: object) -> None:
    image(tmp_path / "secret.png")
    folder = pairs(tmp_path / "set", "x", names=("a",))
    (folder / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": "A", "control": value}))
    with pytest.raises(InweaveError):
        read_dataset(folder)


def test_a_batch_has_references_of_one_size(tmp_path: Path) -> None:
    pairs(tmp_path, "before", names=("a", "b", "c"))
    dataset = read_dataset(tmp_path, control=["before"])
    shapes = [((32, 48),), ((64, 64),), ((32, 48),)]
    _, order = arrange(dataset, BucketRules(64, 32), batch_size=3, shapes=shapes)
    assert sorted(map(sorted, order.batches(0))) == [[0, 2], [1]]
    report = check_dataset(dataset, BucketRules(64, 32), epochs=1, batch_size=3, shapes=shapes)
    assert report.references == {"1": 3} and report.batches_per_epoch == 2
    assert "3 with 1 of reference" in report.lines()[0]
