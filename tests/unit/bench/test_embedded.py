"""The metrics of the embedded model: they must distinguish names, and styles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from inweave.bench.embedded import (
    closer_to_style,
    features,
    measure_recall,
    measure_style,
    recall,
    reference,
    strokes,
    style_set,
)
from inweave.errors import ConfigError, FormatError

STYLES = ("pixel", "ink")
#: names that the style datasets must not contain, because they test how an adapter generalizes
UNSEEN = {
    "cat face", "rocket", "pizza", "octopus", "crown", "robot", "frog", "house", "birthday cake", "dog face",
    "red apple", "snowman", "guitar", "butterfly", "elephant",
}  # fmt: skip


@pytest.fixture(scope="module")
def thumbnails() -> list[Image.Image]:
    return reference()[1]


@pytest.fixture(scope="module")
def base(thumbnails: list[Image.Image]) -> list[Image.Image]:
    """Return every tenth thumbnail at the size of the model's images."""
    return [image.resize((128, 128), Image.Resampling.BICUBIC) for image in thumbnails[::10]]


def style_distance(images: list[Image.Image], style: list[Image.Image]) -> float:
    return closer_to_style(images, style, style)["to_style"]


def noise(count: int) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (128, 128, 3), dtype=np.uint8)) for _ in range(count)]


def test_the_reference_sheet_has_256_different_captions() -> None:
    captions, images = reference()
    assert len(captions) == len(set(captions)) == len(images) == 256
    assert {image.size for image in images} == {(32, 32)}


def test_features_have_unit_length_and_survive_another_size(thumbnails: list[Image.Image]) -> None:
    vector = features(thumbnails[7])
    assert np.isclose(np.linalg.norm(vector), 1)
    larger = features(thumbnails[7].resize((128, 128), Image.Resampling.BICUBIC))
    assert vector @ larger > 0.98


def test_recall_of_the_references_against_themselves_is_one(thumbnails: list[Image.Image]) -> None:
    assert recall(thumbnails, thumbnails) == (1.0, 1.0)


def test_recall_survives_blur_and_a_change_of_brightness(thumbnails: list[Image.Image]) -> None:
    worse = [
        image.resize((12, 12), Image.Resampling.BOX).resize((128, 128)).point(lambda value: 20 + value * 0.8)
        for image in thumbnails
    ]
    top1, top5 = recall(worse, thumbnails)
    assert top1 > 0.95 and top5 > 0.98


def test_noise_is_recalled_by_chance(thumbnails: list[Image.Image]) -> None:
    top1, top5 = recall(noise(256), thumbnails)
    assert top1 <= 4 / 256 and top5 <= 15 / 256  # expected: 1 and 5 of 256


def test_recall_needs_a_reference_for_every_image(thumbnails: list[Image.Image]) -> None:
    with pytest.raises(ConfigError, match="3 images and 2 references"):
        recall(thumbnails[:3], thumbnails[:2])
    with pytest.raises(ConfigError, match="0 images"):
        recall([], thumbnails)


@pytest.mark.parametrize("name", STYLES)
def test_a_style_is_nearer_to_its_other_half_than_to_the_base(name: str, base: list[Image.Image]) -> None:
    images = style_set(name)[1]
    distances = closer_to_style(images[::2], images[1::2], base)
    assert distances["ratio"] < 0.5 and distances["share"] == 1.0
    assert distances["to_style"] == pytest.approx(style_distance(images[::2], images[1::2]))


@pytest.mark.parametrize("name", STYLES)
def test_the_base_is_nearer_to_itself(name: str, base: list[Image.Image]) -> None:
    distances = closer_to_style(base[::2], style_set(name)[1], base[1::2])
    assert distances["ratio"] > 2 and distances["share"] == 0.0


def test_the_two_styles_are_far_from_each_other_and_at_distance_zero_from_themselves() -> None:
    pixel, ink = (style_set(name)[1] for name in STYLES)
    assert style_distance(pixel, pixel) < 1e-3
    assert style_distance(pixel, ink) == pytest.approx(style_distance(ink, pixel), rel=1e-6)
    assert style_distance(pixel, ink) > 3 * style_distance(ink[::2], ink[1::2])


@pytest.mark.parametrize("name", STYLES)
def test_a_style_dataset_is_24_images_on_white_with_their_names(name: str) -> None:
    captions, images = style_set(name)
    assert len(images) == len(set(captions)) == 24 and not UNSEEN & set(captions)
    assert {image.size for image in images} == {(128, 128)}
    assert all(image.getpixel((0, 0)) == (255, 255, 255) for image in images)


def test_pixel_art_is_made_of_cells() -> None:
    for image in style_set("pixel")[1]:
        values = np.asarray(image)
        assert (values == values[::8, ::8].repeat(8, 0).repeat(8, 1)).all()
        assert not (values % 51).any()


def test_blank_images_are_an_error() -> None:
    blank = Image.new("RGB", (128, 128), "white")
    assert strokes(blank).shape == (0, 130)
    with pytest.raises(ConfigError, match="images are blank"):
        style_distance([blank], style_set("ink")[1])


def test_transparent_is_white(thumbnails: list[Image.Image]) -> None:
    clear = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    assert np.array_equal(features(clear), features(Image.new("RGB", (64, 64), "white")))


def test_generation_is_driven_by_a_callable(thumbnails: list[Image.Image], base: list[Image.Image]) -> None:
    captions, _ = reference()
    known = dict(zip(captions, thumbnails, strict=True))
    requests: list[str] = []

    def generate(prompts: list[str]) -> list[Image.Image]:
        requests.extend(prompts)
        return [known[caption] for caption in prompts]

    assert measure_recall(generate, 8) == {"captions": 8.0, "top1": 1.0, "top5": 1.0}
    assert requests == captions[:8]
    styled: Callable[[list[str]], list[Image.Image]] = lambda prompts: style_set("pixel")[1]  # noqa: E731
    assert measure_style(styled, lambda prompts: base, ["fox"], "pixel")["share"] == 1.0


def test_a_missing_style_or_thumbnail_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'oil'; known: ink, pixel"):
        style_set("oil")
    (tmp_path / "reference.json").write_text('{"captions": ["a", "b"], "side": 32, "columns": 2}')
    Image.new("RGB", (32, 32)).save(tmp_path / "reference.png")
    with pytest.raises(FormatError, match="lists 2 thumbnails"):
        reference(tmp_path)
