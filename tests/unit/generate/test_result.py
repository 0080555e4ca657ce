"""What a notebook shows of a result, and the keywords that editors complete."""

from __future__ import annotations

import io
from typing import get_args, get_type_hints

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("torch")

from PIL import Image

from inweave.formats.dialects import WRITTEN, DialectName
from inweave.generate.config import GenerateConfig, RequestSettings
from inweave.generate.result import Result


def result(count: int) -> Result:
    images = [Image.new("RGB", (8 + 4 * n, 8), (20 * n, 0, 0)) for n in range(count)]
    records = [{"seed": n, "prompt": 'a <b>red</b> "apple"'} for n in range(count)]
    return Result(images, records, [], ["clip_skip & friends had no effect"])


@pytest.mark.parametrize("count", [1, 3])
def test_a_notebook_shows_the_images_with_their_seeds(count: int) -> None:
    made = result(count)
    with Image.open(io.BytesIO(made._repr_png_())) as picture:
        assert picture.size == (sum(image.width for image in made.images), 8)
        assert picture.convert("RGB").getpixel((picture.width - 1, 0)) == (20 * (count - 1), 0, 0)
    html = made._repr_html_()
    assert html.count("data:image/png;base64,") == count and "<b>" not in html
    assert "0 - a &lt;b&gt;red&lt;/b&gt; &quot;apple&quot;" in html and "clip_skip &amp; friends" in html


def test_keywords_of_a_pipeline_are_the_fields_of_a_request() -> None:
    # the last two are what a prompt with choices was resolved to
    fields = set(GenerateConfig.model_fields) - {"prompt", "init", "mask", "references", "template", "image_prompts"}
    assert set(get_type_hints(RequestSettings)) == fields | {"guidance_scale"}
    assert get_args(DialectName) == WRITTEN
