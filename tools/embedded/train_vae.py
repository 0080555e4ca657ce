"""Train the VAE, on all art sets and on compositions of them.

    loss = L1 + edges + L1 at 1/2 and 1/4 size / 2 + 2 L2 + 0.0005 KL
    z    = mean + sqrt(variance + (r s)^2) n        r in [0, 0.2] an image, s: spread of the latents

The extra noise r s makes the decoder forgive small errors of the UNet. No adversarial loss: with eight latent
channels it is not needed. At the end each latent channel's mean and spread are folded into the convolutions before
and after, so that scaled latents have mean 0 and variance 1.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from tools.embedded.compose import BACKGROUNDS, COLORS, arrange, on_white, over, recolor
from tools.embedded.fit import Group, Length, add_training, fit, mixed, prepare
from tools.embedded.networks import LATENT_CHANNELS, SCALING, keep_weights, new_vae, parameters_of
from tools.embedded.places import add_work
from tools.embedded.sprites import Sprites, load_sprites
from torch.nn import functional

SETS = ("noto", "ink", "blob", "3d", "flat")  # the first one, which the UNet learns to draw, counts three times
KL_WEIGHT = 5e-4
LATENT_NOISE = 0.2
LEARNING_RATE = 6e-4
_KINDS = {"full": 50, "small": 5, "pair": 8, "stack": 4, "two": 3, "three": 2, "four": 4, "shift": 24}
_SWAPS = ((0, 2, 1, 3), (1, 0, 2, 3), (1, 2, 0, 3), (2, 0, 1, 3), (2, 1, 0, 3))  # channels, for other colors


def varied_batch(sets: list[torch.Tensor], size: int, rng: random.Random) -> torch.Tensor:
    """Draw images in [-1, 1]: mirrored, recolored, arranged, shifted, pixelated, on many backgrounds."""
    device, eighth = sets[0].device, max(1, size // 8)
    weights = [3.0] + [1.0] * (len(sets) - 1)
    chosen = rng.choices(range(len(sets)), weights=weights, k=8)
    parts = [sets[i][torch.randint(len(sets[i]), (eighth,), device=device)] for i in chosen]
    sprites = torch.cat(parts).float()
    count = len(sprites)

    def chance(share: float) -> torch.Tensor:
        return (torch.rand(count, device=device) < share)[:, None, None, None]

    colors = torch.tensor(list(COLORS.values()), device=device)
    sprites = torch.where(chance(0.5), sprites.flip(-1), sprites)
    dyed = recolor(sprites, colors[torch.randint(len(colors), (count,), device=device)])
    sprites = torch.where(chance(0.12), dyed, sprites)
    sprites = torch.cat([_rearranged(part, rng) for part in sprites.split(-(-count // 4))])
    return over(sprites, _backgrounds(count, device))


def _rearranged(sprites: torch.Tensor, rng: random.Random) -> torch.Tensor:
    kind = rng.choices(list(_KINDS), weights=list(_KINDS.values()))[0]
    if kind == "shift":  # any offset, so that detail is not tied to the grid
        sprites = torch.roll(sprites, (rng.randint(-12, 12), rng.randint(-12, 12)), (2, 3))
    else:
        sprites = arrange(kind, sprites, sprites.roll(1, 0), rng)
    if rng.random() < 0.12:
        sprites = sprites[:, rng.choice(_SWAPS)]
    if rng.random() < 0.12:  # pixel art
        cells = rng.choice([16, 24, 32, 32])
        small = functional.interpolate(sprites, size=(cells, cells), mode="area")
        sprites = functional.interpolate(small, size=sprites.shape[-2:], mode="nearest")
    return sprites


def _backgrounds(count: int, device: torch.device) -> torch.Tensor:
    """Draw backgrounds: a fifth of the named colors, a tenth of any color, else white."""
    palette = torch.tensor(list(BACKGROUNDS.values()), device=device)
    which = torch.rand(count, 1, device=device)
    some = palette[torch.randint(len(palette), (count,), device=device)]
    other = torch.where(which < 0.3, torch.rand(count, 3, device=device), torch.ones(count, 3, device=device))
    return torch.where(which < 0.2, some, other)


def reconstruction_loss(made: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    loss = (made - true).abs().mean() + 2.0 * (made - true).square().mean()
    for axis in (-1, -2):
        loss = loss + (made.diff(dim=axis) - true.diff(dim=axis)).abs().mean()
    for factor in (2, 4):
        smaller = functional.avg_pool2d(made, factor) - functional.avg_pool2d(true, factor)
        loss = loss + 0.5 * smaller.abs().mean()
    return loss


def vae_loss(vae: AutoencoderKL, images: torch.Tensor, spread: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, and the spread of each latent channel in this batch."""
    with mixed(images.device):
        mean, log_variance = vae.quant_conv(vae.encoder(images)).float().chunk(2, 1)
        log_variance = log_variance.clamp(-30, 20)
        noise = torch.rand(len(mean), 1, 1, 1, device=mean.device) * LATENT_NOISE * spread
        latents = mean + (log_variance.exp() + noise.square()).sqrt() * torch.randn_like(mean)
        made = vae.decoder(vae.post_quant_conv(latents)).float()
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    loss = reconstruction_loss(made, images) + KL_WEIGHT * divergence
    return loss, mean.detach().std((0, 2, 3), keepdim=True)


@torch.no_grad()
def normalize_latents(vae: AutoencoderKL, sprites: torch.Tensor) -> None:
    """Fold (z - mean) / (spread * scaling) into `quant_conv`, and its inverse into `post_quant_conv`."""
    means = [vae.encode(on_white(part)).latent_dist.mean for part in sprites.split(64)]
    latents = torch.cat(means)
    mean = latents.mean((0, 2, 3))
    spread = latents.std((0, 2, 3)).clamp_min(1e-3) * SCALING
    before, after, n = vae.quant_conv, vae.post_quant_conv, LATENT_CHANNELS
    before.weight[:n] /= spread[:, None, None, None]
    before.bias[:n] = (before.bias[:n] - mean) / spread
    before.bias[n:] -= 2 * spread.log()
    after.bias += after.weight[:, :, 0, 0] @ mean
    after.weight *= spread[None, :, None, None]


def load_sets(work: Path, device: torch.device, limit: int) -> list[Sprites]:
    return [load_sprites(work, name, device, limit) for name in SETS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    add_training(parser, seconds=520, batch=128)
    options = parser.parse_args()
    device, rng = prepare(options), random.Random(options.seed + 1)
    sets = [sprites.images for sprites in load_sets(options.work, device, options.limit)]
    vae = new_vae().to(device, memory_format=torch.channels_last)
    print(f"VAE: {parameters_of(vae) / 1e6:.2f} million parameters")
    step = torch.compile(vae_loss) if options.compile else vae_loss
    spread = torch.ones(1, LATENT_CHANNELS, 1, 1, device=device)

    def batch_loss() -> torch.Tensor:
        images = varied_batch(sets, options.batch, rng).contiguous(memory_format=torch.channels_last)
        loss, now = step(vae, images, spread.clone())
        spread.lerp_(now, 0.02)
        return loss

    fit("vae", [Group(list(vae.parameters()), LEARNING_RATE)], batch_loss, Length(options.steps, options.seconds))
    vae.eval()
    normalize_latents(vae, sets[0])
    keep_weights(vae, options.work, "vae")


if __name__ == "__main__":
    main()
