"""Generate: DDIM with classifier-free guidance, many captions at once.

v = v_empty + guidance * (v_caption - v_empty)
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from tools.embedded.fit import mixed
from tools.embedded.networks import LATENT_CHANNELS, SCALING, new_scheduler, token_ids
from transformers import CLIPTextModel, CLIPTokenizer


@torch.no_grad()
def sample_latents(
    unet: UNet2DConditionModel,
    text_encoder: CLIPTextModel,
    tokenizer: CLIPTokenizer,
    captions: list[str],
    guidance: torch.Tensor | float,
    *,
    steps: int = 20,
    seed: int = 0,
    at_once: int = 512,
) -> torch.Tensor:
    """Sample scaled latents for ``captions``; ``guidance`` is one number, or one for each caption."""
    device, size = unet.device, unet.config.sample_size
    strengths = torch.as_tensor(guidance, dtype=torch.float32, device=device).expand(len(captions))
    batches = []
    for start in range(0, len(captions), at_once):
        some = captions[start : start + at_once]
        draw = torch.Generator().manual_seed(seed + start)
        latents = torch.randn(len(some), LATENT_CHANNELS, size, size, generator=draw).to(device)
        strength = strengths[start : start + at_once, None, None, None]
        scheduler = new_scheduler()
        scheduler.set_timesteps(steps, device=device)
        with mixed(device):
            text = text_encoder(token_ids(tokenizer, some + [""] * len(some), device))[0]
        for time in scheduler.timesteps:
            with mixed(device):
                both = unet(torch.cat([latents, latents]), time, text).sample.float()
            conditional, unconditional = both.chunk(2)
            latents = scheduler.step(
                unconditional + strength * (conditional - unconditional), time, latents
            ).prev_sample
        batches.append(latents)
    return torch.cat(batches)


@torch.no_grad()
def decode(vae: AutoencoderKL, latents: torch.Tensor) -> torch.Tensor:
    """Decode scaled latents to images in [-1, 1]."""
    return torch.cat([vae.decode(part / SCALING).sample.float().clamp(-1, 1) for part in latents.split(64)])


@torch.no_grad()
def encode(vae: AutoencoderKL, images: torch.Tensor) -> torch.Tensor:
    """Encode images in [-1, 1] to scaled latents."""
    with mixed(images.device):
        return torch.cat([vae.encode(part).latent_dist.mean.float() for part in images.split(64)]) * SCALING
