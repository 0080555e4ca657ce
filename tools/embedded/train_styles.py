"""Train the two shipped style adapters from the two shipped datasets, with weft's own layers.

    styles/<name>/*.png, *.txt  ->  weft.train.plain.train_style  ->  loras/<name>.safetensors

kohya's spelling, float16. The settings below are all there is to a file: the same settings on the same machine give
the same bits. They are also written into the file's metadata.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from tools.embedded.places import SHIPPED

import weft
from weft.bench.embedded import style_set
from weft.train.plain import train_style


@dataclass(frozen=True, slots=True)
class Settings:
    """How one style is trained."""

    title: str
    description: str
    steps: int = 400
    batch: int = 4
    rank: int = 8
    alpha: float = 8.0
    learning_rate: float = 2e-3
    caption_dropout: float = 0.1
    seed: int = 0


STYLES = {
    "pixel": Settings("pixel", "Pixel art: 16x16 flat cells, six levels a channel, hard edges."),
    "ink": Settings("ink", "Ink: black outlines and dark areas on white."),
}
LICENCE = "Apache-2.0; trained on pictures derived from Noto Emoji by Google Inc"


def metadata(name: str, settings: Settings, captions: list[str]) -> dict[str, str]:
    """kohya's and modelspec's fields, all of them strings."""
    return {
        "ss_output_name": name,
        "ss_base_model_version": "weft-emoji",
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(settings.rank),
        "ss_network_alpha": f"{settings.alpha:g}",
        "ss_learning_rate": f"{settings.learning_rate:g}",
        "ss_max_train_steps": str(settings.steps),
        "ss_total_batch_size": str(settings.batch),
        "ss_caption_dropout_rate": f"{settings.caption_dropout:g}",
        "ss_num_train_images": str(len(captions)),
        "ss_resolution": "(128, 128)",
        "ss_seed": str(settings.seed),
        "ss_v2": "False",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": "weft-emoji/lora",
        "modelspec.implementation": "https://github.com/huggingface/diffusers",
        "modelspec.title": settings.title,
        "modelspec.description": settings.description,
        "modelspec.resolution": "128x128",
        "modelspec.prediction_type": "v",
        "modelspec.license": LICENCE,
        "weft.train.captions": json.dumps(captions),
    }


def train(name: str, settings: Settings, out: Path) -> None:
    model = StableDiffusionPipeline.from_pretrained(SHIPPED, dtype=torch.float32)
    captions, images = style_set(name)
    start = time.monotonic()

    def tell(step: int, steps: int, loss: float) -> None:
        if step % 50 == 0:
            print(f"{name}: step {step} of {steps}, loss {loss:.4f}, {time.monotonic() - start:.0f} s", flush=True)

    adapter, losses = train_style(
        model,
        images,
        captions,
        steps=settings.steps,
        rank=settings.rank,
        alpha=settings.alpha,
        learning_rate=settings.learning_rate,
        batch=settings.batch,
        seed=settings.seed,
        caption_dropout=settings.caption_dropout,
        progress=tell,
    )
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.safetensors"
    adapter = replace(adapter, metadata=metadata(name, settings, captions))
    weft.save(adapter, path, dialect="kohya", base=SHIPPED)
    last = sum(losses[-50:]) / len(losses[-50:])
    spent = time.monotonic() - start
    print(f"{path}: {path.stat().st_size} bytes, {len(losses)} steps in {spent:.0f} s, loss of the last 50: {last:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--styles", nargs="+", default=list(STYLES), choices=list(STYLES))
    parser.add_argument("--out", type=Path, default=SHIPPED / "loras")
    parser.add_argument("--steps", type=int, default=0, help="other than the settings' own, for a trial")
    parser.add_argument("--threads", type=int, default=1, help="part of the settings: sums depend on it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.styles:
        settings = STYLES[name]
        train(name, replace(settings, steps=options.steps) if options.steps else settings, options.out)


if __name__ == "__main__":
    main()
