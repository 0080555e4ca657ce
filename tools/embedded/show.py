"""Sheets and scores of a model in training: what it draws now, in four images and one file of numbers.

prompts.png   names, and below them combinations that training leaves out
seeds.png     the same captions with six seeds, and with the words of each style
masks.png     images, the same with a part repainted
edits.png     images, and the same after an instruction
scores.json   the share of names whose image the judge of `inweave bench embedded` recognizes, by guidance and steps
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tools.embedded.compose import on_white
from tools.embedded.library import Library
from tools.embedded.networks import LATENT_CHANNELS, MASK_CHANNELS, Vocabulary
from tools.embedded.sampling import GUIDANCE, STEPS, decode, encode, sample_latents
from tools.embedded.scenes import PROMPTS
from tools.embedded.sheets import sheet, to_images
from tools.embedded.variations import SET_WORDS, STYLES
from torch import Tensor, nn

from inweave.bench.judge import FILE, load_judge

SEEDED = ("cat face", "rocket", "pizza", "octopus", "house", "a blue cat face")
STYLED = ("cat face", "rocket")
EDITS = ("make it blue", "put it on a yellow background", "turn it into pixel art", "make it black and white")
REPAINTED = ("red apple", "pizza", "ghost", "cat face")
_TRIALS = ((GUIDANCE, STEPS), (2.0, STEPS), (3.0, STEPS), (GUIDANCE, 20))


@torch.no_grad()
def show(
    networks: Mapping[str, nn.Module], tokenizer: Vocabulary, library: Library, out: Path, names: int,
    prediction: str = "v",
) -> dict[str, Any]:  # fmt: skip
    """Write the sheet into ``out``; return the scores."""
    vae: Any = networks["vae"]
    unet: Any = networks["unet"]

    def draw(
        captions: list[str], guidance: float = GUIDANCE, steps: int = STEPS, seed: int = 0, extra: Tensor | None = None
    ) -> Tensor:
        parts = unet, networks["text_encoder"], tokenizer, captions, guidance
        return decode(vae, sample_latents(*parts, steps=steps, seed=seed, extra=extra, prediction=prediction))  # type: ignore[arg-type]

    out.mkdir(parents=True, exist_ok=True)
    sheets = [sheet(to_images(draw(list(PROMPTS))), 9, labels=PROMPTS)]
    words = [each[0] for each in (*SET_WORDS.values(), *STYLES.values())][: 2 * 8]
    captions = [each for each in SEEDED for _ in range(8)] + [f"{name}, {word}" for name in STYLED for word in words]
    sheets.append(sheet(to_images(draw(captions, seed=7)), 8, labels=captions))
    rows = torch.linspace(0, len(library) - 1, len(EDITS)).long().to(library.images.device)
    true = on_white(library.images[rows])
    known = encode(vae, true)
    count, _, side, _ = known.shape
    extra = torch.zeros(count, unet.config.in_channels - LATENT_CHANNELS, side, side, device=known.device)
    extra[:, MASK_CHANNELS:] = known
    edited = draw(list(EDITS), extra=extra)
    pairs = [each for pair in zip(to_images(true), to_images(edited), strict=True) for each in pair]
    sheets.append(sheet(pairs, 8, labels=[each for text in EDITS for each in ("before", text)]))
    extra = torch.zeros_like(extra)
    mask = torch.zeros_like(true[:, :1])
    mask[..., mask.shape[-2] // 2 :, :] = 1
    extra[:, :MASK_CHANNELS] = torch.cat(
        [nn.functional.interpolate(mask, size=(side, side)), encode(vae, true * (mask < 0.5))], 1
    )
    painted = draw(list(REPAINTED), extra=extra)
    visible = [to_images(true), to_images(painted), to_images(torch.where(mask > 0, painted, true))]
    triples = [each for triple in zip(*visible, strict=True) for each in triple]
    heads = ("before", "as made", "put together")
    sheets.append(sheet(triples, 6, labels=[f"{name}, {head}" for name in REPAINTED for head in heads]))
    joined = Image.new("RGB", (max(each.width for each in sheets), sum(each.height for each in sheets)), "white")
    top = 0
    for each in sheets:
        joined.paste(each, (0, top))
        top += each.height
    joined.save(out / "sheets.png")
    return _scores(draw, names)


def _scores(draw: Any, names: int) -> dict[str, Any]:
    if not FILE.exists():
        return {}
    referee = load_judge()
    known: list[str] = referee.facts["sure"]
    chosen = known[:: max(1, len(known) // names)][:names]
    trials = {
        f"guidance {guidance:g}, {steps} steps": draw(chosen, guidance, steps, 100) for guidance, steps in _TRIALS
    }
    return {label: round(referee.right(to_images(images), chosen), 4) for label, images in trials.items()}
