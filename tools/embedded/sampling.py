"""Generate: DDIM with classifier-free guidance, many captions at once, by the network in training.

v = v_empty + guidance * (v_caption - v_empty)          flow: x(s') = x(s) + (s' - s) v, s from 1 to 0
"""

from __future__ import annotations

import torch
from tools.embedded.fit import mixed
from tools.embedded.networks import LATENT_CHANNELS, SCALING, Vocabulary, new_scheduler, token_ids

from inweave.models.sd.autoencoder import AutoencoderKL
from inweave.models.sd.clip import CLIPTextModel
from inweave.models.sd.unet import UNet2DConditionModel

STEPS, GUIDANCE = 12, 2.5


@torch.no_grad()
def sample_latents(
    unet: UNet2DConditionModel,
    text_encoder: CLIPTextModel,
    tokenizer: Vocabulary,
    captions: list[str],
    guidance: torch.Tensor | float = GUIDANCE,
    *,
    steps: int = STEPS,
    seed: int = 0,
    at_once: int = 512,
    extra: torch.Tensor | None = None,
    prediction: str = "v",
) -> torch.Tensor:
    """Sample scaled latents for ``captions``; ``guidance`` is one number, or one for each caption.

    ``extra``: the channels behind the noisy latents for each caption; without it, they are zero.
    """
    device, size = unet.device, unet.config.sample_size
    strengths = torch.as_tensor(guidance, dtype=torch.float32, device=device).expand(len(captions))
    batches = []
    for start in range(0, len(captions), at_once):
        some = captions[start : start + at_once]
        draw = torch.Generator().manual_seed(seed + start)
        latents = torch.randn(len(some), LATENT_CHANNELS, size, size, generator=draw).to(device)
        absent = torch.zeros(len(some), unet.config.in_channels - LATENT_CHANNELS, size, size, device=device)
        known = absent if extra is None else extra[start : start + at_once].float()
        strength = strengths[start : start + at_once, None, None, None]
        scheduler = new_scheduler()
        scheduler.set_timesteps(steps, device=device)
        with mixed(device):
            text = text_encoder(token_ids(tokenizer, some + [""] * len(some), device)).last_hidden_state
        for time in scheduler.timesteps:
            with mixed(device):
                both = unet(torch.cat([torch.cat([latents, known], 1)] * 2), time, text)[0].float()
            conditional, unconditional = both.chunk(2)
            made = unconditional + strength * (conditional - unconditional)
            latents = latents - made / steps if prediction == "flow" else scheduler.step(made, time, latents)[0]
        batches.append(latents)
    return torch.cat(batches)


@torch.no_grad()
def decode(vae: AutoencoderKL, latents: torch.Tensor) -> torch.Tensor:
    """Decode scaled latents to images in [-1, 1]."""
    return torch.cat([vae.decode(part / SCALING)[0].float().clamp(-1, 1) for part in torch.split(latents, 64)])


@torch.no_grad()
def encode(vae: AutoencoderKL, images: torch.Tensor) -> torch.Tensor:
    """Encode images in [-1, 1] to scaled latents."""
    with mixed(images.device):
        return torch.cat([vae.encode(part).latent_dist.mean.float() for part in torch.split(images, 128)]) * SCALING
