"""Regularization images, repeated or left out until they are as many as the others, as kohya's scripts do it."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from inweave.training.config.dataset_toml import Subset
from inweave.training.data.balance import balanced
from inweave.training.data.reader import read_dataset
from inweave.training.data.types import Example
from tests.support import sized


def example(number: int, repeats: int, prior: bool) -> Example:
    return Example(Path(f"{number}.png"), (), repeats, (64, 64), None, prior, str(number), Subset(), "")


def as_kohya(train: int, repeats: list[int]) -> list[int]:
    """Return the repeats of regularization images by kohya's own loop: 0 for those that are never registered."""
    counts, done, first = [0] * len(repeats), 0, True
    while done < train and repeats:
        for index, own in enumerate(repeats):
            added = own if first else 1
            counts[index] += added
            done += added
            if done >= train:
                break
        first = False
    return counts


@settings(deadline=None, max_examples=sized(60, 200))
@given(st.lists(st.integers(1, 12), max_size=8), st.lists(st.integers(1, 12), max_size=8))
def test_repeats_are_those_of_kohyas_loop(subjects: list[int], prior: list[int]) -> None:
    rows = [example(n, repeats, False) for n, repeats in enumerate(subjects)]
    rows += [example(100 + n, repeats, True) for n, repeats in enumerate(prior)]
    result, out = balanced(rows)
    repeats_of = {each.path: each.repeats for each in result if each.regularization}
    expected = as_kohya(sum(subjects), prior)
    assert [repeats_of.get(Path(f"{100 + n}.png"), 0) for n in range(len(prior))] == expected
    assert [each for each in result if not each.regularization] == rows[: len(subjects)]
    assert sorted(map(str, out)) == sorted(
        str(row) for row in rows if row.regularization and row.path not in repeats_of
    )


def test_each_dataset_of_a_file_is_balanced_on_its_own(tmp_path: Path) -> None:
    """20 images of 10 repeats and 100 regularization images are 400 examples, as kohya counts them."""
    counted = [("cat", 20), ("reg", 100), ("few", 1), ("other", 3)]
    for folder, count in counted:
        (tmp_path / folder).mkdir()
        for number in range(count):
            Image.new("RGB", (8, 8), (number, count, 0)).save(tmp_path / folder / f"{number:03}.png")
    subsets = [{"image_dir": "cat", "num_repeats": 10, "class_tokens": "cat"}, {"image_dir": "reg", "is_reg": True}]
    rows = [{"image_dir": "few", "class_tokens": "cat"}, {"image_dir": "other", "is_reg": True}]
    tables = {"datasets": [{"subsets": subsets}, {"subsets": rows}]}
    for table in tables["datasets"]:
        for subset in table["subsets"]:
            subset["image_dir"] = str(tmp_path / str(subset["image_dir"]))
    plain = read_dataset(tables)
    assert sum(each.repeats for each in plain.examples) == 300 + 1 + 3
    dataset = read_dataset({"general": {"balance_regularization": True}, **tables})
    folders = [folder for folder, _ in counted]
    counts = [sum(e.repeats for e in dataset.examples if e.path.parent.name == folder) for folder in folders]
    assert counts == [200, 200, 1, 1]
    assert [path.name for path in dataset.report.ignored] == ["001.png", "002.png"]  # of "other"


def test_a_project_folder_of_kohya_is_a_dataset(tmp_path: Path) -> None:
    """img/ and reg/ with numbered folders, beside log/ and model/, as its GUI lays them out."""
    for folder, count in (("img/5_cat", 4), ("reg/1_animal", 3), ("log", 0), ("model", 0)):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8), (number, count, 0)).save(tmp_path / folder / f"{number}.png")
    examples = read_dataset(tmp_path).examples
    rows = [(e.captions, e.repeats, e.regularization) for e in examples]
    assert rows == [(("cat",), 5, False)] * 4 + [(("animal",), 7, True)] * 2 + [(("animal",), 6, True)]
