"""The report of a set: every number amount by hand, and the order it is amount from is that of the run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from inweave.errors import ConfigError
from inweave.training.config.dataset_toml import Subset
from inweave.training.data.batches import arrange
from inweave.training.data.buckets import Bucket, BucketRules
from inweave.training.data.reader import read_dataset
from inweave.training.data.report import check_dataset
from inweave.training.data.types import Dataset, Example, ReadReport

RULES = BucketRules(128, 32, 64, 256)


def example(
    name: str, size: tuple[int, int], repeats: int = 1, prior: bool = False, subset: Subset | None = None
) -> Example:
    return Example(Path(name), ("a cat",), repeats, size, None, prior, name, subset or Subset(), "f")


def dataset(*examples: Example) -> Dataset:
    return Dataset(examples, ReadReport())


def test_statistics_of_a_dataset_on_disk(tmp_path: Path) -> None:
    sizes = {"a": (128, 128), "b": (256, 256), "c": (400, 100), "d": (40, 40), "e": (160, 96), "f": (1000, 128)}
    (tmp_path / "2_cat").mkdir()
    for number, (name, size) in enumerate(sizes.items()):
        Image.new("RGB", size, (number, 0, 0)).save(tmp_path / "2_cat" / f"{name}.png")
    (tmp_path / "2_cat" / "a.txt").write_text("one\ntwo")
    Image.new("L", (128, 128), 3).save(tmp_path / "2_cat" / "a-masklabel.png")
    Image.new("RGB", (128, 128), (0, 0, 0)).save(tmp_path / "2_cat" / "copy.bmp")
    (tmp_path / "reg").mkdir()
    Image.new("RGB", (128, 128), (99, 0, 0)).save(tmp_path / "reg" / "r.png")
    (tmp_path / "2_cat" / "z.png").write_bytes(b"broken")
    result = read_dataset(tmp_path, skip_unreadable=True)
    report = check_dataset(result, RULES, batch_size=2, accumulation=2, epochs=3)
    assert (report.images, report.regularization, report.repeated, report.masks) == (8, 1, 15, 1)
    assert (report.captions, report.several_captions) == (8, 1)
    assert report.buckets == {"128x128": 5, "160x96": 1, "256x64": 2}
    assert report.upscaled == 1  # d
    # c: 400x100 is as wide as its bucket; f: 1000x128 keeps 512 of 1000
    assert (report.cropped_10, report.cropped_25) == (1, 1)
    # 128x128: 4 of 2 repeats and one of 1 -> 5 batches; 160x96: 1; 256x64: 2
    assert (report.batches_per_epoch, report.steps_per_epoch, report.total_steps) == (8, 4, 12)
    assert [Path(name).name for name in report.uncaptioned] == ["r.png"]
    assert [[Path(name).name for name in group] for group in report.duplicates] == [["a.png", "copy.bmp"]]
    assert [Path(name).name for name in report.unreadable] == ["z.png"]
    assert json.loads(json.dumps(report.as_dict()))["buckets"] == report.buckets
    lines = "\n".join(report.lines())
    for part in (
        "8 images, 15 per epoch with repeats; 1 of them for regularization; 1 with masks",
        "128x128 (5), 160x96 (1), 256x64 (2)",
        "4 per epoch of 8 batches, 12 in total",
        "more than 10 % of the area of 1 image,",
        "enlarged to fill their bucket: 1",
        "a.png = ",
        "z.png (",
        "without a caption: 1: ",
    ):
        assert part in lines, lines


def test_steps_round_up_over_the_whole_run_and_not_in_every_epoch() -> None:
    five = dataset(*(example(f"{n}", (128, 128)) for n in range(5)))
    report = check_dataset(five, RULES, accumulation=2, epochs=4)
    assert (report.steps_per_epoch, report.total_steps) == (3, 10)
    assert check_dataset(five, RULES, accumulation=2, steps=7).total_steps == 7


def test_small_images_without_upscaling() -> None:
    some = dataset(example("tiny", (20, 200)), example("small", (70, 70)), example("fine", (300, 300)))
    report = check_dataset(some, BucketRules(128, 32, 64, 256, upscale=False), epochs=1)
    assert (report.too_small, report.own_bucket, report.upscaled) == (["tiny"], ["small"], 0)
    assert report.buckets == {"64x64": 1, "128x128": 1}
    assert (report.images, report.repeated, report.batches_per_epoch) == (3, 2, 2)
    lines = "\n".join(report.lines())
    assert "too small for any bucket, left out: 1: tiny" in lines and "in one of their own: 1: small" in lines


def test_crops_are_counted_above_each_mark() -> None:
    # 128x128 without buckets: an image of width w loses 1 - 128 / w
    widths = (128, 140, 145, 165, 175)
    some = dataset(*(example(f"{width}", (width, 128)) for width in widths))
    report = check_dataset(some, BucketRules(128, 32, enabled=False), epochs=1)
    assert (report.cropped_10, report.cropped_25) == (3, 1)


def test_a_subset_setting_overrides_the_run_setting() -> None:
    own = Subset(resolution=(64, 64), batch_size=3, bucket_step=16, buckets=False)
    some = dataset(
        *(example(f"{n}", (300, 200), subset=own) for n in range(4)), *(example(f"x{n}", (300, 300)) for n in range(2))
    )
    placements, order = arrange(some, RULES, batch_size=2, seed=1)
    assert [placement and placement.bucket for placement in placements] == [Bucket(64, 64)] * 4 + [Bucket(128, 128)] * 2
    assert sorted(map(len, order.batches(0))) == [1, 2, 3]
    # the run's minimum of 64 would leave a resolution of 64 nothing but the square
    wide = dataset(example("w", (200, 100), subset=Subset(resolution=(64, 64), bucket_step=16)))
    placements, _ = arrange(wide, RULES)
    assert placements[0] is not None and placements[0].bucket == Bucket(80, 48)


def test_the_run_sees_what_was_counted() -> None:
    some = dataset(
        example("a", (128, 128), 3), example("b", (128, 128), 2, prior=True), example("tiny", (9, 9), 4),
        example("c", (256, 64), 1),
    )  # fmt: skip
    placements, order = arrange(some, BucketRules(128, 32, 64, 256, upscale=False), batch_size=2, seed=5)
    assert placements[2] is None
    assert Counter(index for batch in order.batches(3) for index in batch) == {0: 3, 1: 2, 3: 1}
    assert order.regularization == (False, True, False, False)


def test_what_is_left_out_is_a_line_for_each_kind(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b", "c", "d")):
        Image.new("RGB", (128, 128), (number, 0, 0)).save(tmp_path / f"{name}.png")
    for name in ("a", "b", "c", "lost"):
        (tmp_path / f"{name}.txt").write_text("x")
    Image.new("RGB", (128, 128), (0, 0, 0)).save(tmp_path / "b.png")
    Image.new("RGB", (9, 200)).save(tmp_path / "thin.png")
    (tmp_path / "z.png").write_bytes(b"broken")
    (tmp_path / "layers.psd").write_bytes(b"")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(tmp_path / "deep" / "er" / "q.png")
    for name, level in (("a", 0), ("c", 9)):
        Image.new("L", (128, 128), level).save(tmp_path / f"{name}-masklabel.png")
    result, rules = read_dataset(tmp_path, skip_unreadable=True), BucketRules(128, 32, 64, 256, upscale=False)
    at = f"{tmp_path}/"
    other = [
        f"without a caption: 2: {at}d.png, {at}thin.png",
        f"too small for any bucket, left out: 1: {at}thin.png",
        f"the same pixels: 1: {at}a.png = {at}b.png",
        f"unreadable, left out: 1: {at}z.png (",
    ]
    report_of_check = check_dataset(result, rules, epochs=1).lines()
    assert f"the same caption, word for word: 1: {at}a.png = {at}b.png = {at}c.png" in report_of_check
    beyond = [
        f"not part of the dataset: 1: {at}deep/er",
        f"not part of the dataset, unsupported formats; save them as .png, .jpg or .webp: 1: {at}layers.psd",
        f"not part of the dataset, captions without an image: 1: {at}lost.txt",
    ]
    black = f"masks that are all black, so that nothing is trained on the image: 1: {at}a.png"
    unused = f"masks that are not used, since masked_loss is off: 2: {at}a.png, {at}c.png"
    for masked_loss, masks in ((True, black), (False, unused)):
        report = check_dataset(result, rules, epochs=1, masked_loss=masked_loss)
        lines = report.warnings()
        assert [line.startswith(part) for line, part in zip(lines, [*other, masks, *beyond], strict=True)] == [True] * 8
        assert set(lines) < set(report.lines())
    document = json.loads(json.dumps(report.as_dict()))
    assert (document["unsupported_formats"], document["orphan_captions"], len(document["unused_masks"])) == (
        [f"{at}layers.psd"],
        [f"{at}lost.txt"],
        2,
    )
    assert not any("not used" in line for line in check_dataset(result, rules, epochs=1).warnings())
    assert check_dataset(dataset(example("a", (128, 128))), RULES, epochs=1).warnings() == []


def test_masks_are_used_where_the_dataset_asks_for_alpha() -> None:
    masked = Subset(alpha_mask=True)
    examples = [
        replace(example(name, (128, 128), subset=subset), mask="alpha", mask_is_black=True)
        for name, subset in (("a", masked), ("b", Subset()))
    ]
    report = check_dataset(dataset(*examples), RULES, epochs=1, masked_loss=False)
    assert (report.black_masks, report.unused_masks) == (["a"], ["b"])


def test_long_lists_are_cut_for_people_only() -> None:
    some = dataset(*(example(f"small{n}", (40, 40)) for n in range(8)))
    report = check_dataset(some, BucketRules(128, 32, 64, 256, upscale=False), epochs=1)
    line = next(line for line in report.lines() if "in one of their own" in line)
    assert line.endswith(": 8: small0, small1, small2, small3, small4 and 3 more")
    assert len(report.as_dict()["own_bucket"]) == 8


@pytest.mark.parametrize(
    "options", [{}, {"epochs": 1, "steps": 1}, {"epochs": 0}, {"steps": -1}, {"epochs": 1, "accumulation": 0}]
)
def test_one_length_is_needed(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="either epochs or steps"):
        check_dataset(dataset(example("a", (9, 9))), RULES, **options)  # type: ignore[arg-type]


def test_a_batch_holds_something() -> None:
    with pytest.raises(ConfigError, match="batch size 0"):
        check_dataset(dataset(example("a", (9, 9))), RULES, batch_size=0, epochs=1)


def test_which_images_are_cropped_most() -> None:
    widths = (128, 140, 145, 165, 175)
    some = dataset(*(example(f"{width}", (width, 128)) for width in widths))
    report = check_dataset(some, BucketRules(128, 32, enabled=False), epochs=1)
    assert report.most_cropped == {"175": 0.2686, "165": 0.2242, "145": 0.1172}
    assert "cropped most: 3: 175 (27%), 165 (22%), 145 (12%)" in report.lines()
    twice = dataset(example("a", (145, 128)), example("a", (145, 128), subset=Subset(resolution=(96, 128))))
    assert check_dataset(twice, BucketRules(128, 32, enabled=False), epochs=1).most_cropped == {"a": 0.3379}


def test_files_passed_over_shared_captions_and_encodings(tmp_path: Path) -> None:
    for number, name in enumerate(("a.png", "a.jpg", "b.png", "c.png", "d.png")):
        Image.new("RGB", (128, 128), (number * 40, 0, 0)).save(tmp_path / name)
    (tmp_path / "a.txt").write_text("one for two")
    (tmp_path / "b.txt").write_bytes("a caf\u00e9".encode("utf-16"))
    (tmp_path / "c.txt").write_bytes("a caf\u00e9".encode("latin-1"))
    (tmp_path / "d.txt").write_text("a caf\u00e9", "utf-8-sig")
    for name in ("notes.docx", "a.npz", "c.json"):
        (tmp_path / name).write_bytes(b"x")
    result = read_dataset(tmp_path)
    assert [each.captions for each in result.examples[2:]] == [("a caf\u00e9",)] * 3
    report = check_dataset(result, RULES, epochs=1)
    at = f"{tmp_path}/"
    assert report.shared_captions == {f"{at}a.txt": [f"{at}a.jpg", f"{at}a.png"]}
    assert report.same_captions == [[f"{at}b.png", f"{at}c.png", f"{at}d.png"]]
    assert report.encodings == {f"{at}b.txt": "utf-16", f"{at}c.txt": "windows-1252"}
    assert report.other_files == [f"{at}a.npz", f"{at}c.json", f"{at}notes.docx"]
    lines = report.lines()
    for line in (
        f"one caption file for several images, such as a.txt for a.png and a.jpg: 1: {at}a.txt ({at}a.jpg, {at}a.png)",
        f"caption files that are not UTF-8: 2: {at}b.txt (read as utf-16), {at}c.txt (read as windows-1252)",
        f"not part of the dataset, neither images nor captions: 3: {at}a.npz, {at}c.json, {at}notes.docx",
        f"the same caption, word for word: 1: {at}b.png = {at}c.png = {at}d.png",
    ):
        assert line in lines, lines
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "b.png", "text": "B"}')
    assert f"{at}b.txt" in check_dataset(read_dataset(tmp_path), RULES, epochs=1).other_files
    one = check_dataset(read_dataset(tmp_path, caption="x"), RULES, epochs=1)
    assert one.same_captions == [] and one.shared_captions == {}
