"""Images of any size in, multiples of a patch inside, and untouched pixels out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from inweave.errors import RequestError
from inweave.generate.config import FEATHER, GenerateConfig
from inweave.generate.images import open_image, open_mask, paste, to_image, to_tensor, working_size
from inweave.generate.sheet import Sheet


def noise(size: tuple[int, int], seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@given(st.integers(1, 6000), st.integers(1, 6000), st.sampled_from([128, 512, 1024]), st.sampled_from([8, 16]))
def test_the_working_size_is_always_allowed(width: int, height: int, native: int, patch: int) -> None:
    for side in working_size((width, height), native, patch):
        assert side % patch == 0 and 64 <= side <= 4096


def test_an_image_near_the_models_size_keeps_its_own() -> None:
    assert working_size((512, 768), 512, 8) == (512, 768)
    assert working_size((4000, 3000), 512, 8) == (592, 440)


@settings(max_examples=30)
@given(st.integers(0, 40), st.integers(0, 10_000))
def test_pixels_outside_the_mask_keep_their_bits(feather: int, seed: int) -> None:
    old, new = noise((61, 47), seed), noise((61, 47), seed + 1)
    hole = np.random.default_rng(seed).random((47, 61)) < 0.3
    mask = Image.fromarray((hole * 255).astype(np.uint8))
    pixels = np.asarray(paste(new, old, mask, feather))
    assert (pixels[~hole] == np.asarray(old)[~hole]).all()
    if feather == 0:
        assert (pixels[hole] == np.asarray(new)[hole]).all()


def test_feathering_fades_inside_the_mask() -> None:
    old, new = Image.new("RGB", (64, 64), "black"), Image.new("RGB", (64, 64), "white")
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (32, 0, 64, 64))
    row = np.asarray(paste(new, old, mask, 12))[32, :, 0].astype(int)
    assert (row[:32] == 0).all() and row[63] == 255
    assert 0 <= row[32] < 128 < row[44] and (np.diff(row) >= 0).all()


def test_a_repainted_area_has_no_seam_by_default() -> None:
    old, new = Image.new("RGB", (64, 64), "black"), Image.new("RGB", (64, 64), "white")
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (32, 0, 64, 64))
    steps = [np.diff(np.asarray(paste(new, old, mask, width))[32, :, 0].astype(int)) for width in (0, FEATHER)]
    assert steps[0].max() == 255 and 0 < steps[1].max() < 80
    assert GenerateConfig(prompt="").feather == FEATHER


def test_numbers_and_pixels_are_inverse() -> None:
    picture = noise((24, 16), 3)
    assert to_image(to_tensor(picture, (24, 16))).tobytes() == picture.tobytes()


def test_transparency_is_white_and_masks_are_black_and_white() -> None:
    clear = Image.new("RGBA", (8, 8), (10, 20, 30, 0))
    assert open_image(clear, "init").getpixel((0, 0)) == (255, 255, 255)
    gray = Image.new("L", (4, 4), 127)
    gray.putpixel((1, 1), 128)
    mask = open_mask(gray, (8, 8))
    assert mask.size == (8, 8) and sorted({v for _, v in mask.getcolors()}) == [0, 255]


def test_files_that_are_not_images_are_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"init .*gone.png: no such file"):
        open_image(tmp_path / "gone.png", "init")
    (tmp_path / "text.png").write_text("hello")
    with pytest.raises(RequestError, match=r"text.png: not an image"):
        open_image(tmp_path / "text.png", "init")
    whole = tmp_path / "cut.png"
    noise((64, 64), 1).save(whole)
    whole.write_bytes(whole.read_bytes()[:600])
    with pytest.raises(RequestError, match=r"cut.png: not an image"):
        open_image(whole, "mask")


def test_a_sheet_has_room_for_every_cell_and_label() -> None:
    cells = [[noise((32, 32), i * 3 + j) for j in range(3)] for i in range(2)]
    plain = Sheet(cells, [], []).render()
    labeled = Sheet(cells, ["a", "b", "c"], ["first row", "second"], "a title").render()
    assert labeled.width > plain.width and labeled.height > plain.height
    raw = plain.tobytes()
    assert all(cell.crop((0, 0, 32, 1)).tobytes() in raw for row in cells for cell in row)


def test_a_result_is_saved_in_a_format_that_holds_settings_or_refused(tmp_path: Path) -> None:
    from inweave.errors import ConfigError
    from inweave.generate.pipeline import Result  # type: ignore[attr-defined]

    result = Result([Image.new("RGB", (8, 8))], [{}], [])
    for name in ("x.gif", "x.bmp", "x", "x.PNG.tiff"):
        with pytest.raises(ConfigError, match=r"\.png, \.jpg"):
            result.save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_sizes_that_a_model_cannot_do_well_are_reported() -> None:
    from inweave.generate.images import size_warnings

    for size in ((512, 512), (512, 768), (640, 384), (256, 256)):
        assert size_warnings(size, None, 512) == []
    assert "larger" in size_warnings((1024, 1024), None, 512)[0]
    assert "smaller" in size_warnings((128, 128), None, 512)[0]
    assert "shape" in size_warnings((1024, 256), None, 512)[0]
    assert size_warnings((512, 512), (512, 512), 512) == []
    (warning,) = size_warnings((504, 496), (501, 499), 512)
    assert "501x499" in warning and "504x496" in warning
