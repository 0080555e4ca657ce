"""Sets on disk, in every layout: what is read, what is refused, and what is reported about the rest."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from inweave.checked import for_message
from inweave.errors import ConfigError, FormatError
from inweave.training.config.dataset_toml import Subset
from inweave.training.data.reader import read_dataset
from inweave.training.data.types import Dataset, fingerprint_fields, with_defaults


def write_image(
    path: Path, size: tuple[int, int] = (12, 8), color: Any = None, mode: str = "RGB", **options: Any
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    shade = sum(path.name.encode("utf-8", "surrogateescape")) % 251
    Image.new(mode, size, color if color is not None else (shade, size[0] % 256, 7)).save(path, **options)
    return path


def captioned(path: Path, text: str = "a cat", **options: Any) -> Path:
    write_image(path, **options)
    path.with_suffix(".txt").write_text(text)
    return path


def names(dataset: Dataset) -> list[str]:
    return [example.path.name for example in dataset.examples]


def toml(folder: Path, text: str) -> Path:
    file = folder / "set.toml"
    file.write_text(text)
    return file


def alpha_masked(folder: Path) -> Path:
    """A dataset file that takes masks from the alpha channel of the images next to it."""
    return toml(folder, "[[datasets]]\n[[datasets.subsets]]\nimage_dir = '.'\nalpha_mask = true\n")


def test_a_folder_of_images(tmp_path: Path) -> None:
    captioned(tmp_path / "b.PNG", "one\ntwo\n", size=(20, 10))
    captioned(tmp_path / "a.jpg")
    write_image(tmp_path / "c.webp").with_suffix(".caption").write_text("by .caption")
    write_image(tmp_path / "d.bmp")
    (tmp_path / "notes.md").write_text("not an image")
    dataset = read_dataset(tmp_path)
    assert names(dataset) == ["a.jpg", "b.PNG", "c.webp", "d.bmp"]
    assert [example.captions for example in dataset.examples] == [("a cat",), ("one", "two"), ("by .caption",), ()]
    assert dataset.examples[1].size == (20, 10)
    assert all(e.repeats == 1 and not e.regularization and e.mask is None for e in dataset.examples)
    assert [path.name for path in dataset.report.uncaptioned] == ["d.bmp"]
    assert dataset.examples[0].folder == tmp_path.name


def test_a_caption_for_all_fills_only_what_is_missing(tmp_path: Path) -> None:
    captioned(tmp_path / "a.png", "own")
    write_image(tmp_path / "b.png")
    write_image(tmp_path / "reg" / "c.png")
    result = read_dataset(tmp_path, caption="default")
    assert [example.captions for example in result.examples] == [("own",), ("default",), ()]
    empty = read_dataset(tmp_path, caption="")
    assert ("",) in [each.captions for each in empty.examples], "one that is empty was asked for"


def test_numbered_folders_repeat_and_name_their_class(tmp_path: Path) -> None:
    write_image(tmp_path / "10_sks dog" / "a.png")
    captioned(tmp_path / "10_sks dog" / "b.png", "from the file")
    write_image(tmp_path / "3_cat" / "c.png")
    write_image(tmp_path / "0_never" / "d.png")
    write_image(tmp_path / "other" / "e.png")
    (tmp_path / "logs").mkdir()
    dataset = read_dataset(tmp_path)
    assert [(e.path.name, e.repeats, e.captions, e.folder) for e in dataset.examples] == [
        ("a.png", 10, ("sks dog",), "10_sks dog"),
        ("b.png", 10, ("from the file",), "10_sks dog"),
        ("c.png", 3, ("cat",), "3_cat"),
    ]
    assert [path.name for path in dataset.report.ignored] == ["0_never", "other"]


def test_regularization_images_lie_in_reg(tmp_path: Path) -> None:
    captioned(tmp_path / "a.png")
    write_image(tmp_path / "reg" / "2_dog" / "r.png")
    captioned(tmp_path / "reg" / "s.png", "any dog")
    write_image(tmp_path / "reg" / "reg" / "t.png")
    dataset = read_dataset(tmp_path)
    assert [(e.path.name, e.regularization, e.repeats, e.captions) for e in dataset.examples] == [
        ("a.png", False, 1, ("a cat",)),
        ("s.png", True, 1, ("any dog",)),
        ("r.png", True, 2, ("dog",)),
    ]
    assert [path.name for path in dataset.report.ignored] == ["reg"]
    with pytest.raises(ConfigError, match="only regularization images"):
        (tmp_path / "a.png").unlink()
        read_dataset(tmp_path)


def test_metadata_lists_what_belongs_to_the_dataset(tmp_path: Path) -> None:
    write_image(tmp_path / "images" / "a.png")
    captioned(tmp_path / "b.png", "next to it, not listed")
    write_image(tmp_path / "c.png")
    rows = ['{"file_name": "images/a.png", "text": "A"}', '{"file_name": "b.png", "caption": ["B", "B2"]}']
    (tmp_path / "metadata.jsonl").write_text("\n".join(rows))
    dataset = read_dataset(tmp_path)
    assert [(e.path.name, e.captions) for e in dataset.examples] == [("a.png", ("A",)), ("b.png", ("B", "B2"))]
    assert [path.name for path in dataset.report.ignored] == ["c.png"]
    with (tmp_path / "metadata.jsonl").open("a") as file:
        file.write('\n{"file_name": "missing.png", "text": "x"}\nnonsense')
    with pytest.raises(FormatError) as caught:
        read_dataset(tmp_path)
    assert "missing.png" in str(caught.value) and "line 4: not valid JSON" in str(caught.value)
    skipped = read_dataset(tmp_path, skip_unreadable=True)
    assert len(skipped.examples) == 2 and len(skipped.report.unreadable) == 2


def test_a_dataset_file_inherits_downwards(tmp_path: Path) -> None:
    write_image(tmp_path / "x" / "a.png").with_suffix(".cap").write_text("from cap")
    write_image(tmp_path / "x" / "b.png")
    write_image(tmp_path / "y" / "c.png")
    write_image(tmp_path / "y" / "d.png", mode="RGBA", color=(1, 2, 3, 4))
    file = toml(
        tmp_path,
        """
        [general]
        shuffle_caption = true
        keep_tokens = 1
        caption_extension = "cap"
        resolution = 512
        flip_aug = true
        [[datasets]]
        resolution = [640, 512]
        batch_size = 4
        keep_tokens = 2
        enable_bucket = true
        min_bucket_reso = 128
        max_bucket_reso = 1024
        bucket_reso_steps = 32
        bucket_no_upscale = true
          [[datasets.subsets]]
          image_dir = "x"
          num_repeats = 5
          class_tokens = "sks cat"
          keep_tokens = 3
          caption_prefix = "p"
          caption_suffix = "s"
          caption_dropout_rate = 0.1
          [[datasets.subsets]]
          image_dir = "y"
          is_reg = true
          class_tokens = "cat"
          flip_aug = false
          random_crop = true
          alpha_mask = true
        [[datasets]]
          [[datasets.subsets]]
          image_dir = "x"
        """,
    )
    dataset = read_dataset(file)
    a, b, c, d, again, bare = dataset.examples
    assert (a.captions, b.captions, c.captions) == (("from cap",), ("sks cat",), ("cat",))
    assert (a.repeats, c.repeats, again.repeats) == (5, 1, 1)
    assert (a.regularization, c.regularization) == (False, True)
    assert (c.mask, d.mask) == (None, "alpha")
    first = a.subset
    assert (first.shuffle_tags, first.keep_tokens, first.prefix, first.suffix) == (True, 3, "p", "s")
    assert (first.caption_dropout, first.tag_dropout, first.flip) == (0.1, None, True)
    assert (first.resolution, first.batch_size, first.buckets, first.upscale) == ((640, 512), 4, True, False)
    assert (first.min_bucket, first.max_bucket, first.bucket_step) == (128, 1024, 32)
    assert (c.subset.keep_tokens, c.subset.flip, c.subset.random_crop, c.subset.prefix) == (2, False, True, "")
    assert (again.subset.keep_tokens, again.subset.resolution, again.subset.batch_size) == (1, (512, 512), None)
    assert again.path == a.path and bare.captions == ()
    assert dataset.report.duplicates == ()  # one file in two resolutions is not a duplicate


def test_all_problems_of_a_dataset_file_come_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty" / "10_cat").mkdir(parents=True)
    file = toml(
        tmp_path,
        """
        [generl]
        [general]
        keep_token = 1
        is_reg = true
        [[datasets]]
        batch_size = 0
        shuffle_caption = 1
          [[datasets.subsets]]
          image_dir = "nowhere"
          resolution = 512
          [[datasets.subsets]]
          num_repeats = "ten"
          caption_dropout_rate = 1.5
          [[datasets.subsets]]
          image_dir = "empty"
          zzz = 1
        [[datasets]]
        """,
    )
    with pytest.raises(ConfigError) as caught:
        read_dataset(file)
    problems = str(caught.value)
    for part in (
        "generl: there is no such table",
        "general.keep_token: there is no such setting; did you mean 'keep_tokens'?",
        "general.is_reg: belongs in [[datasets.subsets]]",
        "datasets[0].batch_size: expected a whole number of 1 or more, got 0",
        "datasets[0].shuffle_caption: expected true or false, got 1",
        "datasets[0].subsets[0].image_dir: expected the path of a folder, got 'nowhere'",
        "datasets[0].subsets[0].resolution: belongs in [general] or [[datasets]]",
        "datasets[0].subsets[1].num_repeats: expected a whole number of 1 or more, got 'ten'",
        "datasets[0].subsets[1].caption_dropout_rate: expected a number from 0 to 1, got 1.5",
        "datasets[0].subsets[1].image_dir: expected the path of a folder, got None",
        "datasets[0].subsets[2].zzz: there is no such setting; known are num_repeats",
        "has subfolders (10_cat)",
        "datasets[1].subsets: expected [[datasets.subsets]] tables, got None",
    ):
        assert part in problems, problems
    assert len(caught.value.problems) == 13
    assert all(str(problem).startswith(str(file)) for problem in caught.value.problems)


@pytest.mark.parametrize("text", ["[general", "general = 3", "datasets = 3", ""])
def test_files_that_are_no_dataset_file(tmp_path: Path, text: str) -> None:
    with pytest.raises((ConfigError, FormatError), match=r"set\.toml"):
        read_dataset(toml(tmp_path, text))


def test_masks_from_sidecar_files_or_the_alpha_channel(tmp_path: Path) -> None:
    captioned(tmp_path / "a.jpg")
    write_image(tmp_path / "a-masklabel.png", mode="L", color=9)
    captioned(tmp_path / "b.png", mode="RGBA", color=(1, 2, 3, 4))
    captioned(tmp_path / "c.png", mode="RGB")
    write_image(tmp_path / "gone-masklabel.png", mode="L", color=8)
    dataset = read_dataset(tmp_path)
    assert [example.mask for example in dataset.examples] == [tmp_path / "a-masklabel.png", None, None]
    assert [path.name for path in dataset.report.ignored] == ["gone-masklabel.png"]
    with_alpha = read_dataset(alpha_masked(tmp_path))
    assert [example.mask for example in with_alpha.examples] == [tmp_path / "a-masklabel.png", "alpha", None]
    (tmp_path / "a-masklabel.png").write_bytes(b"broken")
    with pytest.raises(FormatError, match=r"a-masklabel\.png"):
        read_dataset(tmp_path)
    assert names(read_dataset(tmp_path, skip_unreadable=True)) == ["b.png", "c.png"]


def turned(path: Path, size: tuple[int, int], orientation: int, mode: str = "RGB", color: Any = None) -> Path:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return write_image(path, size, color, mode, exif=exif)


@pytest.mark.parametrize(
    ("mask", "image_size", "fits"),
    [
        ((6, 4), (12, 8), True),
        ((240, 160), (12, 8), True),
        ((333, 250), (1000, 750), True),  # 333.3
        ((333, 249), (1000, 750), True),
        ((1000, 757), (1000, 750), True),
        ((1000, 758), (1000, 750), False),
        ((100, 11), (1000, 100), False),
        ((8, 12), (12, 8), False),
        ((64, 64), (128, 96), False),
    ],
)
def test_a_mask_has_the_shape_of_its_image(
    mask: tuple[int, int], image_size: tuple[int, int], fits: bool, tmp_path: Path
) -> None:
    captioned(tmp_path / "a.png", size=image_size)
    captioned(tmp_path / "b.png")
    write_image(tmp_path / "a-masklabel.png", mask, 255, "L")
    if fits:
        (a, _) = read_dataset(tmp_path).examples
        assert (a.mask, a.mask_orientation, a.mask_is_black) == (tmp_path / "a-masklabel.png", 1, False)
        return
    message = f"its mask a-masklabel.png is {mask[0]}x{mask[1]} and the image {image_size[0]}x{image_size[1]}"
    with pytest.raises(FormatError, match=rf"1 file cannot be used.*\n.*a\.png: {message}"):
        read_dataset(tmp_path)
    skipped = read_dataset(tmp_path, skip_unreadable=True)
    assert names(skipped) == ["b.png"]
    ((path, why),) = skipped.report.unreadable
    assert path.name == "a.png" and message in why


def test_masks_of_images_that_exif_rotates(tmp_path: Path) -> None:
    for name, orientation in (("a", 6), ("b", 8), ("c", 6), ("d", 3), ("e", 1)):
        turned(tmp_path / f"{name}.jpg", (12, 8), orientation)
    for name, size in (("a", (12, 8)), ("b", (8, 12)), ("d", (12, 8))):
        write_image(tmp_path / f"{name}-masklabel.png", size, 255, "L")
    turned(tmp_path / "c-masklabel.png", (12, 8), 8, "L", 255)
    turned(tmp_path / "e-masklabel.png", (8, 12), 6, "L", 255)
    result = read_dataset(tmp_path, caption="x")
    # as stored; upright already; rotated by its own EXIF; ambiguous size; rotated although the image is not
    assert [example.mask_orientation for example in result.examples] == [6, 1, 8, 1, 6]
    assert [path.name for path in result.report.ambiguous_masks] == ["d-masklabel.png"]
    write_image(tmp_path / "a-masklabel.png", (6, 4), 255, "L")
    with pytest.raises(FormatError, match=r"is 6x4 and the image 8x12 once upright \(12x8 in its file\)"):
        read_dataset(tmp_path, caption="x")


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_invalid_orientations_rotate_nothing(orientation: int, tmp_path: Path) -> None:
    turned(tmp_path / "a.jpg", (12, 8), orientation)
    write_image(tmp_path / "a-masklabel.png", (12, 8), 255, "L")
    result = read_dataset(tmp_path, caption="x")
    assert (result.examples[0].size, result.examples[0].mask_orientation) == (
        (12, 8),
        1,
    ) and not result.report.ambiguous_masks


def test_black_masks_are_known(tmp_path: Path) -> None:
    for name in "abc":
        captioned(tmp_path / f"{name}.png")
    captioned(tmp_path / "d.png", mode="RGBA", color=(9, 9, 9, 0))
    captioned(tmp_path / "e.png", mode="RGBA", color=(9, 9, 9, 1))
    write_image(tmp_path / "a-masklabel.png", color=0, mode="L")
    write_image(tmp_path / "b-masklabel.png", color=255, mode="I;16")  # of 65535: nothing in 8 bits
    write_image(tmp_path / "c-masklabel.png", color=1, mode="L")
    result = read_dataset(alpha_masked(tmp_path))
    assert [example.mask_is_black for example in result.examples] == [True, True, False, True, False]
    assert not any(example.mask_is_black for example in read_dataset(tmp_path).examples[3:]), (
        "alpha is not used as a mask"
    )


def test_what_looks_like_part_of_the_set_and_is_not(tmp_path: Path) -> None:
    captioned(tmp_path / "10_cat" / "a.png")
    captioned(tmp_path / "b.JPG")
    (tmp_path / "b.JPG.txt").write_text("also a caption")
    for name in ("c.PSD", "c.txt", "10_cat/d.jxl", "d.svg", "lost.txt", "10_cat/old.caption", "x-masklabel.PNG"):
        (tmp_path / name).write_bytes(b"")
    write_image(tmp_path / "10_cat" / "more" / "e.png")
    write_image(tmp_path / "10_cat" / "more" / "again" / "e.png")
    write_image(tmp_path / "raw" / "one" / "f.png")
    (tmp_path / "raw" / "two" / "three").mkdir(parents=True)
    (tmp_path / "raw" / "two" / "three" / "g.psd").write_bytes(b"")
    (tmp_path / "raw" / "notes").mkdir()
    write_image(tmp_path / "raw" / ".thumbs" / "f.png")

    def below(paths: tuple[Path, ...]) -> set[str]:
        return {path.relative_to(tmp_path).as_posix() for path in paths}

    report = read_dataset(tmp_path).report
    assert below(report.unsupported_formats) == {"c.PSD", "d.svg", "10_cat/d.jxl"}
    assert below(report.orphan_captions) == {"lost.txt", "10_cat/old.caption"}  # c.txt goes with its image
    assert below(report.ignored) == {"x-masklabel.PNG", "10_cat/more", "raw/one", "raw/two/three"}
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "b.JPG", "text": "B"}')
    report = read_dataset(tmp_path).report
    assert (below(report.unsupported_formats), report.orphan_captions) == ({"c.PSD", "d.svg"}, ())


def test_folders_with_tables_of_their_own_are_part_of_the_set(tmp_path: Path) -> None:
    captioned(tmp_path / "x" / "a.png")
    captioned(tmp_path / "x" / "y" / "b.png")
    captioned(tmp_path / "x" / "y" / "z" / "c.png")
    file = toml(
        tmp_path, '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "x"\n[[datasets.subsets]]\nimage_dir = "x/y"\n'
    )
    report = read_dataset(file).report
    assert report.ignored == (tmp_path / "x" / "y" / "z",)


def test_a_subset_overrides_the_run_or_leaves_it_open(tmp_path: Path) -> None:
    captioned(tmp_path / "x" / "a.png")
    tables = "[general]\nflip_aug = false\n[[datasets]]\nkeep_tokens = 0\n[[datasets.subsets]]\nimage_dir = 'x'\n"
    more = 'caption_dropout_rate = 0.0\nshuffle_caption = false\ncaption_separator = ","\n'
    ((example,), (plain,)) = (read_dataset(path).examples for path in (toml(tmp_path, tables + more), tmp_path / "x"))
    run: dict[str, Any] = {
        "shuffle_tags": True, "keep_tokens": 3, "tag_separator": ";", "caption_dropout": 0.5, "tag_dropout": 0.25,
        "flip": True, "random_crop": True,
    }  # fmt: skip
    own = {"shuffle_tags": False, "keep_tokens": 0, "tag_separator": ",", "caption_dropout": 0.0, "flip": False}
    overridden, left_open = with_defaults(example.subset, run), with_defaults(plain.subset, run)
    assert {name: getattr(overridden, name) for name in run} == run | own
    assert {name: getattr(left_open, name) for name in run} == run


def test_a_fingerprint_holds_the_settings_that_count() -> None:
    run: dict[str, Any] = {"keep_tokens": 3, "tag_separator": ";", "flip": True}
    open_fields, same = fingerprint_fields(Subset(), run), fingerprint_fields(Subset(keep_tokens=3, flip=True), run)
    assert {name: open_fields[name] for name in run} == run
    assert same == open_fields, "the same value, set there or in the run, trains the same"
    assert fingerprint_fields(Subset(keep_tokens=2), run) == open_fields | {"keep_tokens": 2}


def test_sizes_and_hashes_are_those_of_the_upright_image(tmp_path: Path) -> None:
    image = Image.new("RGB", (4, 2))
    image.putdata([(n, 0, 0) for n in range(8)])
    turned = image.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 270 degrees
    turned.save(tmp_path / "a.png", exif=exif)
    image.save(tmp_path / "b.bmp")
    image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / "c.png")
    dataset = read_dataset(tmp_path, caption="x")
    assert [example.size for example in dataset.examples] == [(4, 2), (4, 2), (4, 2)]
    a, b, c = (example.sha256 for example in dataset.examples)
    assert a == b != c
    assert [[path.name for path in group] for group in dataset.report.duplicates] == [["a.png", "b.bmp"]]


def test_16_bit_images_and_palettes_are_read(tmp_path: Path) -> None:
    Image.new("I;16", (3, 3), 256).save(tmp_path / "a.png")
    Image.new("I;16", (3, 3), 511).save(tmp_path / "b.png")
    Image.new("P", (3, 3)).save(tmp_path / "c.png", transparency=0)
    Image.new("CMYK", (3, 3)).save(tmp_path / "d.jpg")
    dataset = read_dataset(alpha_masked(tmp_path), caption="x")
    assert len({example.sha256 for example in dataset.examples}) == 4
    assert [example.mask for example in dataset.examples] == [None, None, "alpha", None]


def test_unreadable_files_are_all_named_or_skipped(tmp_path: Path) -> None:
    whole = captioned(tmp_path / "good.png", size=(64, 64))
    cut = captioned(tmp_path / "cut.jpg", size=(64, 64))
    cut.write_bytes(cut.read_bytes()[:-200])
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "text.webp").write_text("not an image")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    write_image(tmp_path / "latin.png").with_suffix(".txt").write_bytes(b"caf\xe9\x01")
    bad = {"cut.jpg", "empty.png", "text.webp", "gone.png", "loop.png", "latin.png"}
    with pytest.raises(FormatError) as caught:
        read_dataset(tmp_path)
    assert all(name in str(caught.value) for name in bad) and "6 files" in str(caught.value)
    assert "good.png" not in str(caught.value)
    dataset = read_dataset(tmp_path, skip_unreadable=True)
    assert [example.path for example in dataset.examples] == [whole]
    assert {path.name for path, _ in dataset.report.unreadable} == bad
    assert all(why for _, why in dataset.report.unreadable)
    whole.write_bytes(b"")
    with pytest.raises(ConfigError, match="none that can be read"):
        read_dataset(tmp_path, skip_unreadable=True)


def test_many_unreadable_files_are_counted(tmp_path: Path) -> None:
    for number in range(25):
        (tmp_path / f"{number:02}.png").write_bytes(b"")
    with pytest.raises(FormatError, match="25 files") as caught:
        read_dataset(tmp_path)
    assert "19.png" in str(caught.value) and "20.png" not in str(caught.value) and "and 5 more" in str(caught.value)


def test_hidden_files_loops_and_odd_names(tmp_path: Path) -> None:
    captioned(tmp_path / "ok.png")
    (tmp_path / ".DS_Store").write_bytes(b"x")
    (tmp_path / "._ok.png").write_bytes(b"x")
    write_image(tmp_path / ".cache" / "x.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "5_loop").symlink_to(tmp_path / "5_loop")
    (tmp_path / "reg").symlink_to(tmp_path)
    (tmp_path / "99999999999_x").mkdir()
    captioned(tmp_path / "a b'\n{}ü.png")
    dataset = read_dataset(tmp_path)
    assert sorted(names(dataset)[:2]) == ["a b'\n{}ü.png", "ok.png"]
    assert [example.regularization for example in dataset.examples] == [False, False, True, True]


@pytest.mark.skipif(sys.platform != "linux", reason="names of any bytes")
def test_names_that_are_no_text_can_be_read_and_printed(tmp_path: Path) -> None:
    name = os.fsdecode(b"bad\xff.png")
    captioned(tmp_path / name)
    assert len(read_dataset(tmp_path).examples) == 1
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(FormatError) as caught:
        read_dataset(tmp_path)
    assert "bad\\udcff.png" in str(caught.value).encode().decode()


def test_an_empty_dataset_reports_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a folder of images or a dataset \.toml"):
        read_dataset(tmp_path / "nowhere")
    (tmp_path / "a.psd").write_bytes(b"")
    write_image(tmp_path / "0_deep" / "a.png")
    with pytest.raises(ConfigError, match=r"no images.*\.webp.*'10_name'.*metadata\.jsonl; not read: .*deep"):
        read_dataset(tmp_path)
    write_image(tmp_path / "a.png").with_suffix(".caption").write_text("x")
    with pytest.raises(ConfigError, match=r"none of 1 image has a caption; looked for \.txt, \.md files"):
        read_dataset(tmp_path, caption_extensions=("txt", ".md"))
    assert read_dataset(tmp_path, caption_extensions=("caption",)).examples[0].captions == ("x",)
    assert read_dataset(tmp_path, caption="y", caption_extensions=()).examples[0].captions == ("y",)


def test_torch_is_not_needed() -> None:
    program = (
        "import sys, inweave.training.data.report, inweave.training.data.reader; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# names in files of strangers


@pytest.mark.parametrize(
    "name", ["../secret.png", "{outside}", "sub/../../secret.png", "link.png", "linked/secret.png"]
)
def test_names_in_a_metadata_file_stay_inside_its_folder(name: str, tmp_path: Path) -> None:
    folder, secret = tmp_path / "set", write_image(tmp_path / "secret.png")
    write_image(folder / "a.png")
    (folder / "sub").mkdir()
    (folder / "link.png").symlink_to(secret)
    (folder / "linked").symlink_to(tmp_path)
    name = name.format(outside=secret)
    rows = [{"file_name": "sub/../a.png", "text": "A"}, {"file_name": name, "text": "B"}]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(FormatError, match=re.escape(f"line 2: {for_message(name)} is outside of the folder")):
        read_dataset(folder)
    assert names(read_dataset(folder, skip_unreadable=True)) == ["a.png"]


def test_images_that_the_hub_keeps_elsewhere_are_read(tmp_path: Path) -> None:
    blob, folder = write_image(tmp_path / "blobs" / "1.png"), tmp_path / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "a.png").symlink_to(blob)
    (folder / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "A"}')
    assert names(read_dataset(folder)) == ["a.png"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"file_name": "a.png", "text": "\\ud800"}', "surrogate"),
        ('{"file_name": "a.png", "text": ' + "[" * 100_000, "not valid JSON"),
        ('{"file_name": "a.png", "text": 1' + "0" * 5000 + "}", "not valid JSON"),
        ('{"file_name": "a.png", "text": "' + "a" * 2**20 + '"}', "characters"),
        ('{"file_name": "a.png", "text": [' + '"a",' * 5000 + '"a"]}', "5001 captions"),
        ('{"file_name": "a.png", "text": [[' + "[]," * 1000 + "[]]]}", "is a list, expected text"),
        ('{"file_name": "' + "a" * 5000 + '.png", "text": "x"}', "cannot be used"),
        ('{"file_name": "~nosuch/a.png", "text": "x"}', "cannot be used"),
    ],
)
def test_hostile_lines_of_a_metadata_file_are_named(line: str, problem: str, tmp_path: Path) -> None:
    write_image(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text(line)
    with pytest.raises(FormatError, match=problem) as raised:
        read_dataset(tmp_path)
    assert len(str(raised.value)) < 20_000


@pytest.mark.parametrize(
    "text",
    [
        "datasets" + ".a" * 20_000 + " = 1",
        "datasets" + ".a" * 500 + " = 1",
        "datasets = " + "[" * 50_000,
        "datasets = 0x" + "f" * 5000,
        "datasets = 1" + "0" * 5000,
        "[[datasets]]\nresolution = 0x" + "f" * 30,
        "[[datasets]]\n[[datasets.subsets]]\nimage_dir = '~nosuch/'",
        "[[datasets]]\n[[datasets.subsets]]\nimage_dir = '" + "a" * 5000 + "'",
        '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "\\u0000"',
        "[[datasets]]\n[[datasets.subsets]]\nimage_dir = '.'\nnum_repeats = " + "{a = " * 40 + "1" + "}" * 40,
        "[[datasets]]\n" + "a" * 100_000 + " = 1",
    ],
)
def test_hostile_dataset_files_end_in_an_error_of_ours(text: str, tmp_path: Path) -> None:
    captioned(tmp_path / "a.png")
    with pytest.raises((ConfigError, FormatError)) as raised:
        read_dataset(toml(tmp_path, text))
    assert len(str(raised.value)) < 2000


def test_a_caption_file_without_end_is_refused(tmp_path: Path) -> None:
    captioned(tmp_path / "a.png", "a\n" * 2000)
    with pytest.raises(FormatError, match="has 2000 captions"):
        read_dataset(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"a" * (2**20 + 1))
    with pytest.raises(FormatError, match=r"captions must be readable.*bytes"):
        read_dataset(tmp_path)
    (tmp_path / "a.txt").unlink()
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(FormatError, match="captions must be readable"):
        read_dataset(tmp_path)


FRAMES = [Image.effect_noise((96, 64), 20 + 9 * number).convert("RGB") for number in range(3)]


@pytest.mark.parametrize("name", ["a.gif", "a.tiff", "a.TIF", "a.webp", "a.avif", "a.apng", "a.jfif", "a.jpe"])
@pytest.mark.parametrize("count", [1, 3])
def test_formats_and_their_first_frames(name: str, count: int, tmp_path: Path) -> None:
    kind = {"apng": "PNG", "tif": "TIFF", "jfif": "JPEG", "jpe": "JPEG"}.get(name[2:].lower(), name[2:].upper())
    several = count > 1 and kind != "JPEG"
    options = {"save_all": True, "append_images": FRAMES[1:]} if several else {}
    FRAMES[0].save(tmp_path / name, format=kind, **options)
    (tmp_path / "a.txt").write_text("x")
    result = read_dataset(tmp_path)
    (only,) = result.examples
    assert (only.size, only.captions) == ((96, 64), ("x",))
    assert result.report.first_frames == ((tmp_path / name,) if several else ())
    with Image.open(tmp_path / name) as image:
        assert only.sha256 == probe_pixels(image)


def probe_pixels(image: Image.Image) -> str:
    """The hash of an image's pixels, as an example has it."""
    pixels = image.convert("RGBA")
    return hashlib.sha256(f"RGBA {image.width}x{image.height} ".encode() + pixels.tobytes()).hexdigest()


def test_heic_is_read_or_named_with_what_reads_it(tmp_path: Path) -> None:
    captioned(tmp_path / "a.png")
    photo = tmp_path / "b.jpg"  # named so by the program that copied it from a phone
    try:
        import pillow_heif  # type: ignore[import-not-found]
    except ImportError:
        photo.write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 100)
        with pytest.raises(FormatError, match=r"b\.jpg: .*pillow-heif: pip install 'inweave\[heic\]'"):
            read_dataset(tmp_path)
        report = read_dataset(tmp_path, skip_unreadable=True).report
        assert "inweave[heic]" in dict(report.unreadable)[photo]
        return
    pillow_heif.from_pillow(FRAMES[0]).save(photo)
    assert read_dataset(tmp_path).examples[1].size == (96, 64)


def test_images_of_floating_point_numbers_are_refused(tmp_path: Path) -> None:
    Image.new("F", (64, 64), 0.5).save(tmp_path / "a.tiff")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(FormatError, match=r"a\.tiff: its pixels are floating-point numbers"):
        read_dataset(tmp_path)


def test_the_root_of_an_imagefolder_is_its_train_folder(tmp_path: Path) -> None:
    """Unless it has images, a metadata file or numbered folders of its own."""
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (64, 64), (1, 2, len(name))).save(tmp_path / name / "a.png")
    (tmp_path / "train" / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "a boat"}', "utf-8")
    (example,) = read_dataset(tmp_path).examples
    assert example.path == tmp_path / "train" / "a.png" and example.captions == ("a boat",)
    Image.new("RGB", (64, 64), (9, 9, 9)).save(tmp_path / "own.png")
    (tmp_path / "own.txt").write_text("own", "utf-8")
    assert [each.path.name for each in read_dataset(tmp_path).examples] == ["own.png"]
