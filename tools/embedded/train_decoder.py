"""Train the VAE's decoder once more, on latents that the finished UNet generates.

    half of a batch   latents generated for captions whose image is known exactly, if they are close to it
    the other half    ordinary latents with noise, so that nothing is forgotten

A caption that names its set, and nothing else, says exactly what is drawn. After this stage, small errors of the UNet
are no longer visible.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch
from tools.embedded.compose import BACKGROUNDS, COLORS
from tools.embedded.fit import Batch, generator_of, mixed
from tools.embedded.library import Library
from tools.embedded.networks import SCALING, Vocabulary
from tools.embedded.sampling import encode, sample_latents
from tools.embedded.scenes import Drawer, Scene, draw_scenes
from tools.embedded.train_vae import LATENT_NOISE, image_batches, reconstruction_loss
from tools.embedded.variations import SET_WORDS
from torch import Tensor

from inweave.models.sd.autoencoder import AutoencoderKL
from inweave.models.sd.clip import CLIPTextModel
from inweave.models.sd.unet import UNet2DConditionModel

NEAR = 0.55  # root mean square distance of scaled latents
LEARNING_RATE = 2e-4
_GUIDANCE = (1.5, 2.0, 2.5, 2.5, 3.0)
_AT_ONCE = 512


def known_scene(drawer: Drawer) -> tuple[Scene, str]:
    """Draw a scene that its caption describes exactly: of a named set, plain, of one color, or on a background."""
    rng, library = drawer.rng, drawer.library
    while True:
        chance, first = rng.random(), library.row(rng)
        is_colorless = drawer.colorless[first] and library.sets[first] != "ink"
        color = rng.choice(list(COLORS)) if chance < 0.15 and is_colorless else None
        background = rng.choice(list(BACKGROUNDS)) if 0.15 <= chance < 0.35 else None
        scene = Scene("full", first, first, color, None, background)
        if not scene.held_out(library):
            break
    name = f"{color or ''} {library.name(first)}".strip()
    ground = f" on a {background} background" if background else ""
    return scene, f"{name}{ground}, {rng.choice(SET_WORDS[library.sets[first]])}"


def generated_bank(
    vae: AutoencoderKL, unet: UNet2DConditionModel, text_encoder: CLIPTextModel, tokenizer: Vocabulary,
    library: Library, *, size: int, deadline: float, seed: int, prediction: str = "v",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return generated latents, and the true images as uint8."""
    drawer, tried = Drawer(library, random.Random(f"{seed}/bank")), 0
    draw = generator_of(unet.device, seed, "bank", 0)
    latents: list[Tensor] = []
    images: list[Tensor] = []
    while tried < size and (time.monotonic() < deadline or not tried):
        scenes, captions = zip(*(known_scene(drawer) for _ in range(min(_AT_ONCE, size - tried))), strict=True)
        true = draw_scenes(library, list(scenes), drawer.rng, draw, still=True)
        guidance = torch.tensor([drawer.rng.choice(_GUIDANCE) for _ in captions])
        made = sample_latents(
            unet, text_encoder, tokenizer, list(captions), guidance, seed=1000 + tried, prediction=prediction
        )
        near = (made - encode(vae, true)).square().mean((1, 2, 3)).sqrt() < NEAR
        latents.append(made[near])
        images.append(((true[near] + 1) * 127.5).round().to(torch.uint8))
        tried += len(captions)
    print(f"{sum(map(len, latents))} of {tried} generated latents are near their image", flush=True)
    return torch.cat(latents), torch.cat(images)


def decoder_batches(
    vae: AutoencoderKL, library: Library, bank: tuple[Tensor, Tensor], size: int, seed: int
) -> Callable[[int], Batch]:
    latents, images = bank
    generated = size // 2 if len(latents) else 0
    ordinary = image_batches(library, size - generated, seed, "decoder")

    def batch(step: int) -> Batch:
        true = ordinary(step)
        draw = generator_of(true.device, seed, "decoder noise", step)
        encoded = encode(vae, true)
        noise = torch.randn(encoded.shape, generator=draw, device=true.device)
        encoded = encoded + LATENT_NOISE * torch.rand(len(true), 1, 1, 1, generator=draw, device=true.device) * noise
        if generated:
            which = torch.randint(len(latents), (generated,), generator=draw, device=true.device)
            true = torch.cat([images[which].float() / 127.5 - 1, true])
            encoded = torch.cat([latents[which], encoded])
        return {"images": true.contiguous(memory_format=torch.channels_last), "latents": encoded}

    return batch


def decoder_loss(vae: AutoencoderKL) -> Callable[[Batch], Tensor]:
    def loss(batch: Batch) -> Tensor:
        with mixed(batch["latents"].device):
            made = vae.decoder(vae.post_quant_conv(batch["latents"] / SCALING)).float()
        return reconstruction_loss(made, batch["images"])

    return loss
