"""What the UNet sees: pools of latents with captions, encoded before they are used, and new ones every few steps.

    plain     (latents, ids)                                  70 % of a batch
    masked    (latents, ids, mask, latents of the image with gray where the mask is)      18 %
    edited    (latents, ids, latents of the image before)     12 %: another color, background or style of the same scene

A pool depends on the run's seed and its number alone, and a batch on the seed and the step, so a run that is stopped
goes on with the same numbers. A tenth of the captions is empty, for guidance; a third of the edits have the
description of the result as their caption, the others an instruction.

    python -m tools.embedded.lessons --sheet build/embedded/lessons.png      draws what is learned from
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tools.embedded.captions import with_article
from tools.embedded.compose import BACKGROUNDS, COLORS
from tools.embedded.fit import generator_of
from tools.embedded.library import Library, load_library
from tools.embedded.networks import LATENT_CHANNELS, MASK_CHANNELS, Vocabulary, token_ids
from tools.embedded.places import add_work
from tools.embedded.sampling import encode
from tools.embedded.scenes import Drawer, Scene, draw_scenes
from tools.embedded.sheets import sheet, to_images
from tools.embedded.variations import FILTERS, STYLES
from torch import Tensor

from inweave.models.sd.autoencoder import AutoencoderKL

MASKED_SHARE, EDITED_SHARE, EMPTY_SHARE = 0.18, 0.12, 0.1
_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Images:
    """Images in [-1, 1], their captions; for some kinds a mask (one where to repaint) or the image before."""

    images: Tensor
    captions: list[str]
    masks: Tensor | None = None
    before: Tensor | None = None


def plain_images(drawer: Drawer, count: int, draw: torch.Generator) -> Images:
    kind = drawer.kind()
    scenes = [drawer.scene(kind) for _ in range(count)]
    images = draw_scenes(drawer.library, scenes, drawer.rng, draw)
    return Images(images, [scene.caption(drawer.library, drawer.rng) for scene in scenes])


def masked_images(drawer: Drawer, count: int, draw: torch.Generator) -> Images:
    plain = plain_images(drawer, count, draw)
    return Images(plain.images, plain.captions, masks=random_masks(count, plain.images.shape[-1], drawer.rng, draw))


def edited_images(drawer: Drawer, count: int, draw: torch.Generator) -> Images:
    """Return scenes before and after one change, drawn in the same place."""
    rng, library = drawer.rng, drawer.library
    kind = rng.choice(("full", "full", "full", "small", "pair", "two"))
    scenes = [drawer.scene(kind) for _ in range(count)]
    changed = [_changed(drawer, scene) for scene in scenes]
    state, places = draw.get_state(), rng.getstate()
    before = draw_scenes(library, scenes, rng, draw)
    draw.set_state(state)
    rng.setstate(places)
    after = draw_scenes(library, [scene for scene, _ in changed], rng, draw)
    captions = [text if rng.random() < 0.67 else scene.caption(library, rng) for scene, text in changed]
    return Images(after, captions, before=before)


def _changed(drawer: Drawer, scene: Scene) -> tuple[Scene, str]:
    rng = drawer.rng
    while True:
        what = rng.choice(("color", "background", "style"))
        if (
            what == "color"
            and drawer.library.sets[scene.first] != "ink"
            and drawer.colorless[scene.first]
            and scene.style is None
        ):
            color = rng.choice([each for each in COLORS if each not in (scene.color, scene.background)])
            name = drawer.library.name(scene.first)
            text = rng.choice([f"make it {color}", f"make the {name} {color}", f"change the color to {color}"])
            result = replace(scene, color=color)
        elif what == "background":
            ground = rng.choice([each for each in BACKGROUNDS if each not in (scene.color, scene.background)])
            text = rng.choice([f"put it on {with_article(ground)} background", f"make the background {ground}"])
            result = replace(scene, background=ground, pattern=None)
        elif what == "style" and scene.style is None and scene.color is None:
            style = rng.choice(list(FILTERS))
            word = rng.choice(STYLES[style])
            text = rng.choice([f"turn it into {word}", f"make it {word}", f"as {word}"])
            result = replace(scene, style=style)
        else:
            continue
        if not result.held_out(drawer.library):
            return result, text


def random_masks(count: int, side: int, rng: random.Random, draw: torch.Generator) -> Tensor:
    """Draw masks (n, 1, side, side): boxes, ellipses, halves, blots, everything; a sixth of them reversed."""
    device = draw.device
    across = (torch.arange(side, device=device) + 0.5) / side
    down, right = across[:, None], across[None, :]
    masks = []
    for _ in range(count):
        kind = rng.choice(("box", "box", "ellipse", "half", "blot", "all" if rng.random() < 0.3 else "box"))
        x, y = rng.uniform(0.15, 0.85), rng.uniform(0.15, 0.85)
        w, h = rng.uniform(0.12, 0.4), rng.uniform(0.12, 0.4)
        if kind == "all":
            mask = torch.ones(side, side, device=device)
        elif kind == "half":
            edge = rng.uniform(0.25, 0.75)
            mask = ((down if rng.random() < 0.5 else right).expand(side, side) > edge).float()
        elif kind == "blot":
            small = torch.randn(1, 1, 5, 5, generator=draw, device=device)
            blot = torch.nn.functional.interpolate(small, size=(side, side), mode="bicubic", align_corners=False)
            mask = (blot[0, 0] > 0.1).float()
        else:
            apart = torch.stack([((right - x) / w).abs().expand(side, side), ((down - y) / h).abs().expand(side, side)])
            mask = ((apart.amax(0) if kind == "box" else apart.square().sum(0)) < 1).float()
        masks.append(1 - mask if kind != "all" and rng.random() < 0.17 else mask)
    return torch.stack(masks)[:, None]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of lesson: ``extra`` is (n, channels, h, w), placed behind the latents at channel ``start``."""

    latents: Tensor
    ids: Tensor
    extra: Tensor | None = None
    start: int = 0


@dataclass(frozen=True, slots=True)
class Pool:
    """Lessons on the device, by kind, and how many of each a batch has."""

    kinds: tuple[tuple[Kind, float], ...]
    empty_ids: Tensor

    def batch(self, size: int, channels: int, draw: torch.Generator) -> dict[str, Tensor]:
        """Return latents, ids, the channels behind the noisy latents, times and noise."""
        device = self.empty_ids.device
        latents, ids, extras = [], [], []
        left = size
        for number, (kind, share) in enumerate(self.kinds):
            count = left if number == len(self.kinds) - 1 else round(size * share)
            left -= count
            picks = torch.randint(len(kind.latents), (count,), generator=draw, device=device)
            latents.append(kind.latents[picks].float())
            ids.append(kind.ids[picks])
            extra = torch.zeros(count, channels - LATENT_CHANNELS, *latents[-1].shape[2:], device=device)
            if kind.extra is not None:
                values = kind.extra[picks].float()
                extra[:, kind.start : kind.start + values.shape[1]] = values
            extras.append(extra)
        silent = torch.rand(size, generator=draw, device=device) < EMPTY_SHARE
        joined = torch.cat(latents)
        return {
            "latents": joined,
            "ids": torch.where(silent[:, None], self.empty_ids, torch.cat(ids)),
            "extra": torch.cat(extras),
            "times": torch.randint(1000, (size,), generator=draw, device=device),
            "noise": torch.randn(joined.shape, generator=draw, device=device),
        }


def make_pool(vae: AutoencoderKL, tokenizer: Vocabulary, library: Library, size: int, seed: int, number: int) -> Pool:
    """Draw and encode pool ``number`` of a run; ``size``: the plain images in it, the others in proportion."""
    device = library.images.device
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    drawer = Drawer(library, random.Random(f"{seed}/{number}"))
    draw = generator_of(device, seed, "pool", number)
    plain_share = 1 - MASKED_SHARE - EDITED_SHARE

    def collect(make: Callable[[Drawer, int, torch.Generator], Images], count: int, start: int) -> Kind:
        latents, extras, captions = list[torch.Tensor](), list[torch.Tensor](), list[str]()
        while len(captions) < count:
            some = make(drawer, min(_AT_ONCE, count - len(captions)), draw)
            latents.append(encode(vae, some.images).to(dtype))
            if some.masks is not None:
                known = encode(vae, some.images * (some.masks < 0.5))
                small = torch.nn.functional.interpolate(some.masks, size=known.shape[2:])  # as a request's mask is
                extras.append(torch.cat([small, known], 1).to(dtype))
            if some.before is not None:
                extras.append(encode(vae, some.before).to(dtype))
            captions += some.captions
        ids = token_ids(tokenizer, captions, device)
        return Kind(torch.cat(latents), ids, torch.cat(extras) if extras else None, start)

    shares = {plain_images: plain_share, masked_images: MASKED_SHARE, edited_images: EDITED_SHARE}
    starts = {plain_images: 0, masked_images: 0, edited_images: MASK_CHANNELS}
    kinds = [
        (collect(make, max(1, round(size * share / plain_share)), starts[make]), share)
        for make, share in shares.items()
    ]
    return Pool(tuple(kinds), token_ids(tokenizer, [""], device))


def show(library: Library, path: Path, seed: int) -> None:
    """Draw a contact sheet: plain lessons, masked ones with their masks, edits beside what they were."""
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    drawer = Drawer(library, rng)
    cells: list[Tensor] = []
    words: list[str] = []
    for _ in range(14):
        some = plain_images(drawer, 4, draw)
        cells, words = [*cells, *some.images], [*words, *some.captions]
    for _ in range(2):
        some = masked_images(drawer, 4, draw)
        assert some.masks is not None
        cells, words = [*cells, *(some.images * (some.masks < 0.5))], [*words, *some.captions]
    for _ in range(3):
        some = edited_images(drawer, 4, draw)
        assert some.before is not None
        pairs = [each for pair in zip(some.before, some.images, strict=True) for each in pair]
        cells, words = [*cells, *pairs], [*words, *(each for text in some.captions for each in ("before", text))]
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet(to_images(torch.stack(cells)), 8, labels=words).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--sheet", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=int, default=60)
    options = parser.parse_args()
    show(load_library(options.work, torch.device("cpu"), options.limit), options.sheet, options.seed)


if __name__ == "__main__":
    main()
