"""Train the VAE's decoder once more, on latents that the finished UNet generates.

    half of a batch   latents generated for captions whose image is known exactly, if they are close to it
    the other half    ordinary latents with noise, so that nothing is forgotten

After that, small errors of the UNet are no longer visible.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from tools.embedded.captions import with_article
from tools.embedded.compose import BACKGROUNDS, COLORS
from tools.embedded.fit import Group, Length, add_training, fit, mixed, prepare
from tools.embedded.networks import (
    SCALING,
    keep_weights,
    load_tokenizer,
    new_text_encoder,
    new_unet,
    new_vae,
    round_to_half,
    take_weights,
)
from tools.embedded.places import add_work
from tools.embedded.sampling import encode, sample_latents
from tools.embedded.scenes import Drawer, Scene, draw_scenes
from tools.embedded.sprites import Sprites
from tools.embedded.train_vae import LATENT_NOISE, load_sets, reconstruction_loss, varied_batch
from transformers import CLIPTextModel, CLIPTokenizer

NEAR = 0.45  # root mean square distance of scaled latents
LEARNING_RATE = 3e-4
_GUIDANCE = (1.5, 2.0, 2.5, 2.5, 3.0, 4.0)
_AT_ONCE = 512


def known_scene(drawer: Drawer, rng: random.Random) -> tuple[Scene, str]:
    """Draw a scene that its caption describes exactly: plain, of one color, or on a background."""
    while True:
        chance, first = rng.random(), drawer.emoji()
        color = rng.choice(list(COLORS)) if chance < 0.2 and drawer.colorless[first] else None
        background = rng.choice(list(BACKGROUNDS)) if 0.2 <= chance < 0.4 else None
        scene = Scene("full", first, first, color, None, background)
        if not scene.held_out(drawer.emojis):
            break
    name = f"{color or ''} {drawer.emojis[first].name}".strip()
    caption = rng.choice([name, name, f"{name} emoji", with_article(name)])
    return scene, caption + (f" on {with_article(background)} background" if background else "")


def generated_bank(
    vae: AutoencoderKL,
    unet: UNet2DConditionModel,
    text_encoder: CLIPTextModel,
    tokenizer: CLIPTokenizer,
    sprites: Sprites,
    *,
    size: int,
    seconds: float,
    rng: random.Random,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return generated latents, and the true images as uint8."""
    drawer, start, tried = Drawer(sprites.emojis, rng), time.monotonic(), 0
    latents: list[torch.Tensor] = []
    images: list[torch.Tensor] = []
    while tried < size and (time.monotonic() - start < seconds or not tried):
        scenes, captions = zip(*(known_scene(drawer, rng) for _ in range(min(_AT_ONCE, size - tried))), strict=True)
        true = draw_scenes(sprites, list(scenes), rng)
        guidance = torch.tensor([rng.choice(_GUIDANCE) for _ in captions])
        made = sample_latents(unet, text_encoder, tokenizer, list(captions), guidance, seed=1000 + tried)
        near = (made - encode(vae, true)).square().mean((1, 2, 3)).sqrt() < NEAR
        latents.append(made[near])
        images.append(((true[near] + 1) * 127.5).round().to(torch.uint8))
        tried += len(captions)
    print(f"{sum(map(len, latents))} of {tried} generated latents are near their image")
    return torch.cat(latents), torch.cat(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    add_training(parser, seconds=90, batch=128)
    parser.add_argument("--bank", type=int, default=12_288, help="how many latents to generate")
    parser.add_argument("--bank-seconds", type=float, default=35)
    options = parser.parse_args()
    device, rng = prepare(options), random.Random(options.seed + 4)
    tokenizer = load_tokenizer(options.work)
    vae, unet = new_vae().to(device).eval(), new_unet().to(device).eval()
    text_encoder = new_text_encoder(tokenizer).to(device).eval()
    for network, name in ((vae, "vae"), (unet, "unet"), (text_encoder, "text_encoder")):
        take_weights(network, options.work, name)
        network.requires_grad_(False)
    round_to_half(unet)
    round_to_half(text_encoder)
    sets = load_sets(options.work, device, options.limit)
    bank = {"size": options.bank, "seconds": options.bank_seconds, "rng": rng}
    latents, images = generated_bank(vae, unet, text_encoder, tokenizer, sets[0], **bank)
    parts = [vae.decoder, vae.post_quant_conv]
    parameters = [parameter for part in parts for parameter in part.requires_grad_(True).parameters()]
    generated = options.batch // 2 if len(latents) else 0

    def decoder_loss(true: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        with mixed(device):
            decoded = vae.decoder(vae.post_quant_conv(made / SCALING)).float()
        return reconstruction_loss(decoded, true)

    step = torch.compile(decoder_loss) if options.compile else decoder_loss

    def batch_loss() -> torch.Tensor:
        ordinary = varied_batch([sprites.images for sprites in sets], max(8, options.batch - generated), rng)
        noise = torch.rand(len(ordinary), 1, 1, 1, device=device) * LATENT_NOISE
        encoded = encode(vae, ordinary)
        encoded = encoded + noise * torch.randn_like(encoded)
        if not generated:
            return step(ordinary, encoded)
        which = torch.randint(len(latents), (generated,), device=device)
        true = torch.cat([images[which].float() / 127.5 - 1, ordinary])
        return step(true, torch.cat([latents[which], encoded]))

    fit("decoder", [Group(parameters, LEARNING_RATE)], batch_loss, Length(options.steps, options.seconds), decay=0.998)
    keep_weights(vae, options.work, "vae_adapted")


if __name__ == "__main__":
    main()
