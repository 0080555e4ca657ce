"""The embedded model measured through the same road as every request.

recall      the first captions of the reference sheet, drawn without LoRAs
styles      captions no style set holds, drawn with each style's LoRA at strength 1 and without: the shipped ones, or
            others that were trained on the same pictures
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from PIL import Image

from inweave.bench.embedded import Generate, measure_recall, measure_style, reference, style_set
from inweave.generate.config import GenerateConfig
from inweave.generate.pipeline import Pipeline
from inweave.models import embedded


def measure(
    pipe: Pipeline,
    *,
    captions: int = 256,
    styled: int = 16,
    steps: int = 20,
    seed: int = 0,
    loras: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Recall, and how far the pictures drawn with a LoRA (by the style it was trained on) moved towards that style."""
    taught_by = {name: name for name in embedded.loras()} if loras is None else loras
    for style in taught_by:
        embedded.style_folder(style)
    spent: list[float] = []

    def drawn_with(loras: list[str]) -> Generate:
        def draw(texts: list[str]) -> list[Image.Image]:
            found = []
            for text in texts:
                started = time.perf_counter()
                config = GenerateConfig.of(prompt=text, loras=loras, steps=steps, seed=seed)
                found.append(pipe(config).images[0])
                spent.append(time.perf_counter() - started)
            return found

        return draw

    recall = measure_recall(drawn_with([]), captions)
    taught = {caption for style in embedded.styles() for caption in style_set(style)[0]}
    fresh = [caption for caption in reference()[0] if caption not in taught][:styled]
    styles = {
        style: measure_style(drawn_with([lora]), drawn_with([]), fresh, style) for style, lora in taught_by.items()
    }
    return {"recall": recall, "styles": styles, "seconds_a_picture": sum(spent) / len(spent)}
