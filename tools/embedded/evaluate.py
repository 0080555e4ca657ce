"""Score a model folder: does it follow its captions, and how sharp are the images?

    recall   share of names whose image is nearest, at 32x32 pixels, to that emoji among the whole set
    PSNR     10 log10(1 / mean squared error), against the true image (median) and of the VAE alone (mean)
    edges    mean absolute difference of neighboring pixels, as a fraction of the true images'

Writes scores.json and, with --sheet, an image of the test prompts.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from tools.embedded.compose import on_white
from tools.embedded.places import SHIPPED, add_work
from tools.embedded.sampling import decode, encode, sample_latents
from tools.embedded.scenes import PROMPTS
from tools.embedded.sheets import sheet, to_images
from tools.embedded.sprites import Sprites, load_sprites
from torch.nn import functional


def psnr(made: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Return one number per image, in dB; images are in [-1, 1]."""
    error = ((made - true).square().mean((1, 2, 3)) / 4).clamp_min(1e-8)
    return -10 * torch.log10(error)


def sharpness(images: torch.Tensor) -> float:
    return float(images.diff(dim=-1).abs().mean() + images.diff(dim=-2).abs().mean())


def small(images: torch.Tensor) -> torch.Tensor:
    return functional.interpolate(images, size=(32, 32), mode="area").flatten(1)


def score(model: Any, sprites: Sprites, names: int, guidance: float, steps: int) -> dict[str, float]:
    """Generate ``names`` of the set's names and compare each with its own image and with all others."""
    plain = [i for i, emoji in enumerate(sprites.emojis) if emoji.tone == 0]
    random.Random(3).shuffle(plain)
    chosen = plain[:names]
    parts = (model.unet, model.text_encoder, model.tokenizer)
    captions = [sprites.emojis[i].name for i in chosen]
    made = decode(model.vae, sample_latents(*parts, captions, guidance, steps=steps, seed=100, at_once=64))
    true = on_white(sprites.images[chosen])
    references = torch.cat([small(on_white(part)) for part in sprites.images.split(256)])
    nearest = torch.cdist(small(made), references).topk(min(5, len(references)), largest=False).indices.cpu()
    own = torch.tensor(chosen)[:, None]
    return {
        "guidance": guidance,
        "steps": steps,
        "names": len(chosen),
        "top1": round(float((nearest[:, :1] == own).float().mean()), 4),
        "top5": round(float((nearest == own).any(1).float().mean()), 4),
        "median_psnr": round(float(psnr(made, true).median()), 2),
        "edges": round(sharpness(made) / sharpness(true), 3),
    }


def vae_score(model: Any, sprites: Sprites, names: int) -> float:
    true = on_white(sprites.images[:names])
    return round(float(psnr(decode(model.vae, encode(model.vae, true)), true).mean()), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--model", type=Path, default=SHIPPED, help="the folder to score (default: the shipped one)")
    parser.add_argument("--names", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.5, 2.5, 4.0])
    parser.add_argument("--limit", type=int, default=0, help="compare with only this many images (0: all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sheet", type=Path, default=None, help="also draw the test prompts into this file")
    options = parser.parse_args()
    model = StableDiffusionPipeline.from_pretrained(options.model, dtype=torch.float32).to(options.device)
    sprites = load_sprites(options.work, "noto", torch.device(options.device), options.limit)
    scores: dict[str, Any] = {"vae_psnr": vae_score(model, sprites, options.names), "recall": []}
    for guidance in options.guidance:
        scores["recall"].append(score(model, sprites, options.names, guidance, options.steps))
        print(scores["recall"][-1], flush=True)
    options.work.mkdir(parents=True, exist_ok=True)
    (options.work / "scores.json").write_text(json.dumps(scores, indent=1) + "\n")
    if options.sheet is not None:
        prompts = list(PROMPTS)
        latents = sample_latents(model.unet, model.text_encoder, model.tokenizer, prompts, 2.5, steps=options.steps)
        sheet(to_images(decode(model.vae, latents)), columns=6).save(options.sheet)


if __name__ == "__main__":
    main()
