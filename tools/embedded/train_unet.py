"""Train the text encoder and the UNet together: captions to latents of the finished VAE.

    loss = | unet(sqrt(a_t) z + sqrt(1 - a_t) e, t, text) - (sqrt(a_t) e - sqrt(1 - a_t) z) |^2      v-prediction

Half of a batch is plain images under 32 captions each, half comes from a pool of compositions (`scenes`), both
encoded once before training. A tenth of the captions is left empty for guidance.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL
from tools.embedded.captions import random_caption
from tools.embedded.compose import on_white
from tools.embedded.fit import Group, Length, add_training, fit, mixed, prepare
from tools.embedded.networks import (
    keep_weights,
    load_tokenizer,
    new_scheduler,
    new_text_encoder,
    new_unet,
    new_vae,
    parameters_of,
    round_to_half,
    take_weights,
    token_ids,
)
from tools.embedded.places import add_work
from tools.embedded.sampling import encode
from tools.embedded.scenes import KINDS, Drawer, draw_scenes
from tools.embedded.sprites import Sprites, load_sprites
from transformers import CLIPTokenizer

CAPTIONS_EACH = 32
PLAIN_SHARE = 0.5
EMPTY_SHARE = 0.1
UNET_RATE, TEXT_RATE = 6e-4, 2e-4
_SCENES_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Lessons:
    """Latents and token ids: ``plain_ids`` is (images, captions each, tokens)."""

    plain: torch.Tensor
    plain_ids: torch.Tensor
    weights: torch.Tensor
    pool: torch.Tensor
    pool_ids: torch.Tensor
    empty_ids: torch.Tensor

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        device, plain_size = self.plain.device, int(size * PLAIN_SHARE)
        which = torch.multinomial(self.weights, plain_size, replacement=True)
        words = torch.randint(CAPTIONS_EACH, (plain_size,), device=device)
        picks = torch.randint(len(self.pool), (size - plain_size,), device=device)
        latents = torch.cat([self.plain[which], self.pool[picks]]).float()
        ids = torch.cat([self.plain_ids[which, words], self.pool_ids[picks]])
        silent = torch.rand(size, device=device) < EMPTY_SHARE
        return latents, torch.where(silent[:, None], self.empty_ids, ids)


def make_lessons(
    vae: AutoencoderKL, tokenizer: CLIPTokenizer, sprites: Sprites, pool_size: int, rng: random.Random
) -> Lessons:
    device = sprites.images.device
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    plain = torch.cat([encode(vae, on_white(part)).to(dtype) for part in sprites.images.split(64)])
    plain_captions = [
        random_caption(emoji, rng) + (" on a white background" if rng.random() < 0.04 else "")
        for emoji in sprites.emojis
        for _ in range(CAPTIONS_EACH)
    ]
    plain_ids = token_ids(tokenizer, plain_captions, device).view(len(sprites), CAPTIONS_EACH, -1)
    weights = torch.tensor([emoji.weight for emoji in sprites.emojis], device=device)
    drawer, pool, captions = Drawer(sprites.emojis, rng), [], []
    while len(captions) < pool_size:
        kind = rng.choices(list(KINDS), weights=list(KINDS.values()))[0]
        scenes = [drawer.scene(kind) for _ in range(min(_SCENES_AT_ONCE, pool_size - len(captions)))]
        pool.append(encode(vae, draw_scenes(sprites, scenes, rng)).to(dtype))
        captions += [scene.caption(sprites.emojis, rng) for scene in scenes]
    empty = token_ids(tokenizer, [""], device)
    return Lessons(plain, plain_ids, weights, torch.cat(pool), token_ids(tokenizer, captions, device), empty)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    add_training(parser, seconds=520, batch=512)
    parser.add_argument("--pool", type=int, default=150_000, help="how many compositions to draw")
    options = parser.parse_args()
    device, rng = prepare(options), random.Random(options.seed + 2)
    tokenizer = load_tokenizer(options.work)
    vae = new_vae().to(device).eval().requires_grad_(False)
    take_weights(vae, options.work, "vae")
    round_to_half(vae)
    sprites = load_sprites(options.work, "noto", device, options.limit)
    lessons = make_lessons(vae, tokenizer, sprites, options.pool, rng)
    unet = new_unet().to(device, memory_format=torch.channels_last)
    text_encoder = new_text_encoder(tokenizer).to(device)
    sizes = f"UNet {parameters_of(unet) / 1e6:.2f}, text encoder {parameters_of(text_encoder) / 1e6:.2f} million"
    print(f"{sizes} parameters; {len(lessons.plain)} images, {len(lessons.pool)} compositions")
    alphas = new_scheduler().alphas_cumprod.to(device)

    def v_loss(latents: torch.Tensor, ids: torch.Tensor, times: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        signal, sigma = alphas[times].sqrt()[:, None, None, None], (1 - alphas[times]).sqrt()[:, None, None, None]
        noisy = (signal * latents + sigma * noise).contiguous(memory_format=torch.channels_last)
        with mixed(device):
            prediction = unet(noisy, times, text_encoder(ids)[0]).sample
        return (prediction.float() - (signal * noise - sigma * latents)).square().mean()

    step = torch.compile(v_loss) if options.compile else v_loss

    def batch_loss() -> torch.Tensor:
        latents, ids = lessons.batch(options.batch)
        times = torch.randint(len(alphas), (len(latents),), device=device)
        return step(latents, ids, times, torch.randn_like(latents))

    groups = [Group(list(unet.parameters()), UNET_RATE), Group(list(text_encoder.parameters()), TEXT_RATE)]
    fit("unet", groups, batch_loss, Length(options.steps, options.seconds), weight_decay=0.01)
    keep_weights(unet, options.work, "unet")
    keep_weights(text_encoder, options.work, "text_encoder")


if __name__ == "__main__":
    main()
