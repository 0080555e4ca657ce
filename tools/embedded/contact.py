"""A contact sheet of the shipped styles: each alone at half and full strength, and both together.

    rows      prompts: a name the styles have seen, names they have not, and compositions
    columns   base | pixel 0.5 | pixel 1 | ink 0.5 | ink 1 | both 0.6

With --scores it also measures them: the share of names recognized, and how close the images come to the style.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from tools.embedded.places import SHIPPED, WORK
from tools.embedded.sheets import sheet
from tools.embedded.styles import UNSEEN

import inweave
from inweave.bench.embedded import closer_to_style, recall, reference, style_set

PROMPTS = (
    "grinning face",
    "hamburger",
    "cat face",
    "rocket",
    "pizza",
    "house",
    "birthday cake",
    "a blue cat face",
    "red apple on a blue background",
)
STACKS: dict[str, dict[str, float]] = {
    "base": {},
    "pixel 0.5": {"pixel": 0.5},
    "pixel 1": {"pixel": 1.0},
    "ink 0.5": {"ink": 0.5},
    "ink 1": {"ink": 1.0},
    "both 0.6": {"pixel": 0.6, "ink": 0.6},
}


class Painter:
    """The pipeline and its weaver; the same noise for the same prompt, whatever the stack."""

    def __init__(self, model: Path, loras: Path, steps: int, guidance: float) -> None:
        self.pipe: Any = StableDiffusionPipeline.from_pretrained(model, dtype=torch.float32)
        self.pipe.set_progress_bar_config(disable=True)
        self.weaver = inweave.Weaver({"unet": self.pipe.unet})
        self.loras, self.steps, self.guidance = loras, steps, guidance

    def paint(self, prompts: list[str], stack: dict[str, float], seed: int = 3) -> list[Image.Image]:
        self.weaver.apply([(self.loras / f"{name}.safetensors", strength) for name, strength in stack.items()])
        images: list[Image.Image] = []
        for start in range(0, len(prompts), 8):
            some = prompts[start : start + 8]
            draws = [torch.Generator().manual_seed(seed + start + i) for i in range(len(some))]
            made = self.pipe(some, num_inference_steps=self.steps, guidance_scale=self.guidance, generator=draws)
            images += made.images
        return images


def contact_sheet(painter: Painter) -> Image.Image:
    columns = [painter.paint(list(PROMPTS), stack) for stack in STACKS.values()]
    cells = [column[row] for row in range(len(PROMPTS)) for column in columns]
    return sheet(cells, len(columns), heads=list(STACKS), rows=PROMPTS)


def scores(painter: Painter) -> dict[str, dict[str, float]]:
    """Score names that no style has seen: recognized among these and the references, and nearer to the style."""
    captions, thumbnails = reference()
    taught = set(style_set("pixel")[0])
    names = [*UNSEEN, *(name for name in captions[60::16] if name not in taught and name not in UNSEEN)][:24]
    base = painter.paint(names, {})
    known = [*base, *(image for caption, image in zip(captions, thumbnails, strict=True) if caption not in names)]
    rows: dict[str, dict[str, float]] = {}
    for style in ("pixel", "ink"):
        images = style_set(style)[1]
        for strength in (0.5, 1.0):
            styled = painter.paint(names, {style: strength})
            top1, top5 = recall(styled, known)
            numbers = closer_to_style(styled, images, base)
            rows[f"{style} {strength:g}"] = {"top1": top1, "top5": top5, **numbers}
    for name, numbers in rows.items():
        print(name, {key: round(value, 3) for key, value in numbers.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--loras", type=Path, default=SHIPPED / "loras")
    parser.add_argument("--out", type=Path, default=WORK / "styles.png")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=2.5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scores", type=Path, default=None, help="also measure, and write the numbers into this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    painter = Painter(options.model, options.loras, options.steps, options.guidance)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(painter).save(options.out)
    if options.scores is not None:
        options.scores.write_text(json.dumps(scores(painter), indent=1) + "\n")


if __name__ == "__main__":
    main()
