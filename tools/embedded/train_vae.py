"""Train the VAE further, from the shipped one, on all sets, their styles and compositions.

    loss = L1 + edges + L1 at 1/2 and 1/4 size / 2 + 2 L2 + 0.0005 KL
    z    = mean + sqrt(variance + (r s)^2) n        r in [0, 0.2] an image, s: spread of the latents

The extra noise r s makes the decoder forgive small errors of the UNet. No adversarial loss: with eight latent
channels it is not needed. At the end each latent channel's mean and spread are folded into the convolutions before
and after, so that scaled latents have mean 0 and variance 1.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from tools.embedded.fit import Batch, generator_of, mixed
from tools.embedded.library import Library
from tools.embedded.networks import LATENT_CHANNELS, SCALING
from tools.embedded.scenes import Drawer, draw_scenes
from torch import Tensor
from torch.nn import functional

from inweave.models.sd.autoencoder import AutoencoderKL

KL_WEIGHT = 5e-4
LATENT_NOISE = 0.2
LEARNING_RATE = 2e-4
_SCENES_AT_ONCE = 32


def image_batches(library: Library, size: int, seed: int, stage: str) -> Callable[[int], Tensor]:
    """Return what draws the images of a step: scenes of a few kinds."""

    def batch(step: int) -> Tensor:
        drawer = Drawer(library, random.Random(f"{seed}/{stage}/{step}"))
        draw = generator_of(library.images.device, seed, stage, step)
        parts = []
        for start in range(0, size, _SCENES_AT_ONCE):
            kind = drawer.kind()
            scenes = [drawer.scene(kind) for _ in range(min(_SCENES_AT_ONCE, size - start))]
            parts.append(draw_scenes(library, scenes, drawer.rng, draw))
        return torch.cat(parts).contiguous(memory_format=torch.channels_last)

    return batch


def vae_batches(library: Library, size: int, seed: int) -> Callable[[int], Batch]:
    images = image_batches(library, size, seed, "vae")

    def batch(step: int) -> Batch:
        made = images(step)
        draw = generator_of(made.device, seed, "vae noise", step)
        side = made.shape[-1] // 8
        noise = torch.randn(size, LATENT_CHANNELS, side, side, generator=draw, device=made.device)
        share = torch.rand(size, 1, 1, 1, generator=draw, device=made.device) * LATENT_NOISE
        return {"images": made, "noise": noise, "share": share}

    return batch


def reconstruction_loss(made: Tensor, true: Tensor) -> Tensor:
    loss = (made - true).abs().mean() + 2.0 * (made - true).square().mean()
    for axis in (-1, -2):
        loss = loss + (made.diff(dim=axis) - true.diff(dim=axis)).abs().mean()
    for factor in (2, 4):
        smaller = functional.avg_pool2d(made, factor) - functional.avg_pool2d(true, factor)
        loss = loss + 0.5 * smaller.abs().mean()
    return loss


def vae_loss(vae: AutoencoderKL) -> Callable[[Batch], Tensor]:
    def loss(batch: Batch) -> Tensor:
        images = batch["images"]
        with mixed(images.device):
            mean, log_variance = vae.quant_conv(vae.encoder(images)).float().chunk(2, 1)
            log_variance = log_variance.clamp(-30, 20)
            spread = mean.detach().std((0, 2, 3), keepdim=True)
            noisy = (log_variance.exp() + (batch["share"] * spread).square()).sqrt()
            made = vae.decoder(vae.post_quant_conv(mean + noisy * batch["noise"])).float()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        total: Tensor = reconstruction_loss(made, images) + KL_WEIGHT * divergence
        return total

    return loss


@torch.no_grad()
def normalize_latents(vae: AutoencoderKL, images: Tensor) -> None:
    """Fold (z - mean) / (spread * scaling) into `quant_conv`, and its inverse into `post_quant_conv`."""
    latents = torch.cat([vae.encode(part).latent_dist.mean for part in torch.split(images, 64)])
    mean = latents.mean((0, 2, 3))
    spread = latents.std((0, 2, 3)).clamp_min(1e-3) * SCALING
    before, after, n = vae.quant_conv, vae.post_quant_conv, LATENT_CHANNELS
    assert before.bias is not None and after.bias is not None
    before.weight[:n] /= spread[:, None, None, None]
    before.bias[:n] = (before.bias[:n] - mean) / spread
    before.bias[n:] -= 2 * spread.log()
    after.bias += after.weight[:, :, 0, 0] @ mean
    after.weight *= spread[None, :, None, None]
