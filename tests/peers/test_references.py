"""Edit models with reference images against diffusers' pipelines: images with several references of their own sizes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("peft")

import torch  # noqa: E402
from PIL import Image  # noqa: E402

from inweave.errors import ConfigError  # noqa: E402
from inweave.generate.config import GenerateConfig  # noqa: E402
from inweave.generate.denoise import Callbacks  # noqa: E402
from inweave.generate.pipeline import Pipeline  # noqa: E402
from inweave.models.model import load_model  # noqa: E402
from tests.peers import tiny_models as tiny  # noqa: E402
from tests.peers.test_families import CLOSE, PROMPT, SEED, assert_same, difference, picture  # noqa: E402

KONTEXT, DEV, KLEIN_BASE = VARIANTS = ("flux1-kontext-dev", "flux2-dev", "flux2-klein-base-4b")
STEPS = 2


def assert_other(mine: Image.Image, other: Image.Image) -> None:
    assert difference(mine, other).max() > 2 * CLOSE  # small networks look at a reference a little


@cache
def ours(variant: str) -> Pipeline:
    with tiny.quick_tokenizers():
        return Pipeline(load_model(tiny.folder(variant)))


@cache
def theirs(variant: str) -> Any:
    pipe = tiny.pipeline(variant)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def references(count: int) -> list[Image.Image]:
    """Images of different shapes; the sides of the first are odd."""
    shapes = [(101, 75), (64, 128), (96, 64), (80, 80)]
    return [picture().resize(shape).rotate(40 * number) for number, shape in enumerate(shapes[:count])]


def made(variant: str, images: list[Image.Image], size: tuple[int, int] | None = (96, 64), **more: Any) -> Image.Image:
    options = {"steps": STEPS, "guidance": 3.0, "seed": SEED}
    if size is not None:
        options |= {"width": size[0], "height": size[1]}
    return ours(variant)(PROMPT, references=images, **options | more).images[0]


def expected(variant: str, images: list[Image.Image], size: tuple[int, int] | None = (96, 64)) -> Image.Image:
    options: dict[str, Any] = {"width": size[0], "height": size[1]} if size is not None else {}
    if variant == KONTEXT and size is not None:
        options |= {"max_area": size[0] * size[1]}
    image: Image.Image = theirs(variant)(
        prompt=PROMPT, image=images or None, num_inference_steps=STEPS, guidance_scale=3.0,
        generator=torch.Generator().manual_seed(SEED), **options,
    ).images[0]  # fmt: skip
    return image


@pytest.mark.sample(3)
@pytest.mark.parametrize(("variant", "count"), [(KONTEXT, 0), (KONTEXT, 1), (DEV, 1), (DEV, 2), (KLEIN_BASE, 4)])
def test_images_with_references_are_those_of_the_pipeline(variant: str, count: int) -> None:
    images = references(count)
    image = made(variant, images)
    assert_same(image, expected(variant, images))
    if count:
        assert_other(image, made(variant, [each.rotate(180) for each in images]))
        assert_other(image, made(variant, []))


def test_the_order_of_references_matters() -> None:
    first, second = references(2)
    assert_other(made(DEV, [first, second]), made(DEV, [second, first]))


def test_without_a_size_the_image_has_that_of_the_first_reference() -> None:
    images = references(2)
    image = made(DEV, images, None)
    assert image.size == (96, 64)
    assert_same(image, expected(DEV, images, None))


def test_a_request_is_the_same_in_a_batch_with_others() -> None:
    """References of the same sizes share a batch; others have one of their own."""
    one, other, narrow = references(1), [references(1)[0].rotate(90)], [references(2)[1]]
    pipe = ours(KLEIN_BASE)
    config = {"steps": STEPS, "guidance": 3.0, "seed": SEED, "width": 96, "height": 64}
    requests = [pipe.prepare(GenerateConfig(prompt=PROMPT, **config), references=each) for each in (one, other, narrow)]
    results = pipe.run_all(requests, Callbacks(), batch=4)
    for result, images in zip(results, (one, other, narrow), strict=True):
        assert_same(result.images[0], made(KLEIN_BASE, images))


@pytest.mark.parametrize(
    ("variant", "images", "text"),
    [
        (KONTEXT, 2, "reads up to 1 reference image, got 2"),
        (DEV, 5, "reads up to 4 reference images, got 5"),
        ("flux1-dev", 1, "is not an edit model"),
    ],
)
def test_references_that_a_model_cannot_read_are_refused(variant: str, images: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        made(variant, (references(4) * 2)[:images])


def test_a_reference_of_an_impossible_shape_is_named() -> None:
    with pytest.raises(ConfigError, match=r"image 2: it is 40x80; FLUX.2 reads references whose sides are 64"):
        made(DEV, [picture(), picture().resize((40, 80))])
    with pytest.raises(ConfigError, match="up to 8 times as long"):
        made(DEV, [picture().resize((64, 576))])
