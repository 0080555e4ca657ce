"""Train the text encoder and the UNet together: captions to latents of the finished VAE.

v       x = sqrt(a_t) z + sqrt(1 - a_t) e     target sqrt(a_t) e - sqrt(1 - a_t) z
flow    x = (1 - s) z + s e, s = t / 1000     target e - z            an experiment: the shipped family predicts v

loss = | unet([x, mask, masked image, reference], t, text) - target |^2      the last three zero where absent
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tools.embedded.fit import Batch, generator_of, mixed
from tools.embedded.lessons import Pool
from tools.embedded.networks import INPUT_CHANNELS, new_scheduler
from torch import Tensor

from inweave.models.sd.clip import CLIPTextModel
from inweave.models.sd.unet import UNet2DConditionModel

UNET_RATE, TEXT_RATE = 5e-4, 2e-4


def lesson_batches(make_pool: Callable[[int], Pool], size: int, seed: int, steps_each: int) -> Callable[[int], Batch]:
    """Return what draws the batch of a step; ``make_pool`` is called with the number of the pool it is from."""
    current: dict[int, Pool] = {}

    def batch(step: int) -> Batch:
        number = step // steps_each
        if number not in current:
            current.clear()
            current[number] = make_pool(number)
        pool = current[number]
        return pool.batch(size, INPUT_CHANNELS, generator_of(pool.empty_ids.device, seed, "unet", step))

    return batch


def noised(batch: Batch, prediction: str, alphas: Tensor) -> tuple[Tensor, Tensor]:
    """Return the noisy latents of a batch, and what is to be predicted."""
    latents, noise, times = batch["latents"], batch["noise"], batch["times"]
    if prediction == "flow":
        share = ((times + 1) / len(alphas))[:, None, None, None].to(latents.dtype)
        return (1 - share) * latents + share * noise, noise - latents
    signal, sigma = alphas[times].sqrt()[:, None, None, None], (1 - alphas[times]).sqrt()[:, None, None, None]
    return signal * latents + sigma * noise, signal * noise - sigma * latents


def unet_loss(
    unet: UNet2DConditionModel, text_encoder: CLIPTextModel, prediction: str = "v"
) -> Callable[[Batch], Tensor]:
    alphas = new_scheduler().alphas_cumprod.to(unet.device)

    def loss(batch: Batch) -> Tensor:
        noisy, target = noised(batch, prediction, alphas)
        rows = torch.cat([noisy, batch["extra"]], 1).contiguous(memory_format=torch.channels_last)
        with mixed(rows.device):
            made = unet(rows, batch["times"], text_encoder(batch["ids"]).last_hidden_state)[0]
        error: Tensor = (made.float() - target).square().mean()
        return error

    return loss
