"""Quality of the embedded model, measured through the pipeline that serves every request.

recall      the first captions of the reference sheet, generated without LoRAs
styles      captions that no style dataset contains, generated with each style's LoRA at strength 1 and without it: the
            bundled LoRAs, or others trained on the same images
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from PIL import Image

from inweave.bench.embedded import Generate, measure_recall, measure_style, reference, style_set
from inweave.generate.config import GenerateConfig, parse_loras
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
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure recall of ``captions``, and how far ``styled`` images with each LoRA moved toward its style.

    ``loras``: style -> LoRA, instead of the bundled ones. ``progress(activity, done, total)`` is called per image.
    """
    lora_of = {name: name for name in embedded.loras()} if loras is None else loras
    for style in lora_of:
        embedded.style_folder(style)
    seconds: list[float] = []

    def with_loras(loras: list[str], activity: str) -> Generate:
        def generate(prompts: list[str]) -> list[Image.Image]:
            images = []
            for number, prompt in enumerate(prompts):
                started = time.perf_counter()
                config = GenerateConfig(prompt=prompt, loras=parse_loras(loras), steps=steps, seed=seed)
                images.append(pipe(config).images[0])
                seconds.append(time.perf_counter() - started)
                if progress is not None:
                    progress(activity, number + 1, len(prompts))
            return images

        return generate

    recall = measure_recall(with_loras([], "recall"), captions)
    trained_on = {caption for style in embedded.styles() for caption in style_set(style)[0]}
    unseen = [caption for caption in reference()[0] if caption not in trained_on][:styled]
    styles = {
        style: measure_style(with_loras([lora], style), with_loras([], f"base for {style}"), unseen, style)
        for style, lora in lora_of.items()
    }
    return {"recall": recall, "styles": styles, "seconds_per_image": sum(seconds) / len(seconds)}
