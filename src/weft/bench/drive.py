"""The embedded model measured through the same road as every request.

recall      the first captions of the reference sheet, drawn without LoRAs
styles      captions no style set holds, drawn with each shipped LoRA at strength 1 and without
"""

from __future__ import annotations

import time
from typing import Any

from PIL import Image

from weft.bench.embedded import Generate, measure_recall, measure_style, reference, style_set
from weft.generate.config import GenerateConfig
from weft.generate.pipeline import Pipeline
from weft.models import embedded


def measure(pipe: Pipeline, *, captions: int = 256, styled: int = 16, steps: int = 20, seed: int = 0) -> dict[str, Any]:
    """Recall, and for every shipped style how far the pictures drawn with its LoRA moved towards it."""
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
        style: measure_style(drawn_with([style]), drawn_with([]), fresh, style)
        for style in embedded.styles()
        if style in embedded.loras()
    }
    return {"recall": recall, "styles": styles, "seconds_a_picture": sum(spent) / len(spent)}
