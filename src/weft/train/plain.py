"""Teach a style to a latent diffusion model: LoRA on its UNet, from a few captioned pictures.

    x_t  = sqrt(a_t) z + sqrt(1 - a_t) e            z: latent of a picture, e: noise, a_t: the scheduler's alphas
    loss = | unet(x_t, t, caption) - target |^2     target: e (epsilon), sqrt(a_t) e - sqrt(1 - a_t) z (v_prediction)
                                                            or z (sample)

The alphas are the scheduler's own, so that with zero terminal SNR the last step is pure noise here as there.
Latents and captions are encoded once; a share of the captions is replaced by the empty one, which keeps guidance
working. AdamW, a short warm-up, then a cosine down to zero.

All randomness comes from generators made of the seed: the same seed on the same machine with the same number of
threads gives the same bits, and torch's global generator is neither read nor moved. The networks are worked on in
float32 (one that is held in another dtype is copied for it) and are left as they were found.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import nn

from weft.adapter import Adapter
from weft.errors import ConfigError
from weft.layers import collect, eject, inject
from weft.layers.match import Targets

#: attention, feed-forward, projections and convolutions of the residual blocks
STYLE_TARGETS: tuple[str, ...] = (
    "to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out", "conv1", "conv2",
)  # fmt: skip

PREDICTIONS = ("epsilon", "v_prediction", "sample")
_NAME = "style"
_WARM_UP = 20
_ENCODED_AT_ONCE = 8

Progress = Callable[[int, int, float], None]


class LatentDiffusion(Protocol):
    """What is trained on: a diffusers `StableDiffusionPipeline`, or anything else with these five parts."""

    @property
    def unet(self) -> Any: ...
    @property
    def vae(self) -> Any: ...
    @property
    def text_encoder(self) -> Any: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def scheduler(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Lessons:
    """Everything the loop needs, encoded once: ``latents[i]`` is shown with ``captions[i]`` or with ``empty``."""

    latents: torch.Tensor
    captions: torch.Tensor
    empty: torch.Tensor


def train_style(
    model: LatentDiffusion,
    images: Sequence[Image.Image],
    captions: Sequence[str],
    *,
    steps: int = 300,
    rank: int = 8,
    alpha: float | None = None,
    learning_rate: float = 2e-3,
    batch: int = 2,
    targets: Targets = STYLE_TARGETS,
    seed: int = 0,
    caption_dropout: float = 0.1,
    dtype: torch.dtype = torch.float16,
    progress: Progress | None = None,
) -> tuple[Adapter, list[float]]:
    """The trained adapter (component "unet") and the loss of every step.

    ``alpha``      the scale is alpha / rank; without it the scale is 1
    ``targets``    modules of the UNet, as `weft.inject` takes them
    ``dtype``      of the adapter's tensors; training itself is in float32
    ``progress``   called after every step with its number, the number of all steps and the loss
    """
    kind = _prediction(model.scheduler)
    _check(images, captions, steps=steps, batch=batch, learning_rate=learning_rate, caption_dropout=caption_dropout)
    lessons = encode(model, images, captions)
    unet = _in_float32(model.unet)
    alphas = model.scheduler.alphas_cumprod.to(lessons.latents)
    losses: list[float] = []
    with _injected(unet, rank=rank, alpha=alpha, targets=targets, seed=seed) as parameters:
        optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
        draw = torch.Generator().manual_seed(seed)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * pace(step, steps)
            loss = _loss(unet, lessons, alphas, kind, batch, caption_dropout, draw)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
            if progress is not None:
                progress(step + 1, steps, losses[-1])
        for parameter in parameters:
            parameter.data = parameter.data.to(dtype)
        return collect(unet, _NAME, component="unet"), losses


def pace(step: int, steps: int) -> float:
    """The share of the learning rate at ``step``: warm-up, a plateau of 30 %, then half a cosine towards 0."""
    warm = min(1.0, (step + 1) / min(_WARM_UP, steps))
    return warm * (0.5 + 0.5 * math.cos(math.pi * max(0.0, step / steps - 0.3) / 0.7))


@torch.no_grad()
def encode(model: LatentDiffusion, images: Sequence[Image.Image], captions: Sequence[str]) -> Lessons:
    """Latents (the encoder's mean, scaled as the UNet expects them) and text embeddings, in float32 on the UNet's device."""
    vae, encoder, device = _in_float32(model.vae), _in_float32(model.text_encoder), model.unet.device
    pixels = torch.stack([_pixels(image) for image in images]).to(vae.device)
    means = [vae.encode(some).latent_dist.mean for some in torch.split(pixels, _ENCODED_AT_ONCE)]
    shift = getattr(vae.config, "shift_factor", None) or 0.0
    latents = (torch.cat(means) - shift) * vae.config.scaling_factor
    tokens = model.tokenizer(
        [*captions, ""],
        padding="max_length",
        truncation=True,
        max_length=model.tokenizer.model_max_length,
        return_tensors="pt",
    ).input_ids
    text = torch.cat([encoder(some.to(encoder.device))[0] for some in torch.split(tokens, _ENCODED_AT_ONCE)])
    return Lessons(latents.to(device), text[:-1].to(device), text[-1:].to(device))


def _loss(
    unet: nn.Module,
    lessons: Lessons,
    alphas: torch.Tensor,
    kind: str,
    batch: int,
    caption_dropout: float,
    draw: torch.Generator,
) -> torch.Tensor:
    device = lessons.latents.device
    which = torch.randint(len(lessons.latents), (batch,), generator=draw)
    times = torch.randint(len(alphas), (batch,), generator=draw).to(device)
    noise = torch.randn(batch, *lessons.latents.shape[1:], generator=draw).to(device)
    silent = (torch.rand(batch, generator=draw) < caption_dropout)[:, None, None].to(device)
    latents = lessons.latents[which.to(device)]
    text = torch.where(silent, lessons.empty, lessons.captions[which.to(device)])
    kept = alphas[times].reshape(-1, 1, 1, 1)
    noisy, goal = noised(latents, noise, kept, kind)
    made: torch.Tensor = unet(noisy, times, text).sample
    return (made - goal).square().mean()


def noised(
    latents: torch.Tensor, noise: torch.Tensor, kept: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x_t, target) where ``kept`` is a_t, the share of the latent's variance that is left."""
    signal, spread = kept.sqrt(), (1 - kept).sqrt()
    noisy = signal * latents + spread * noise
    if kind == "epsilon":
        return noisy, noise
    return noisy, signal * noise - spread * latents if kind == "v_prediction" else latents


@contextmanager
def _injected(unet: nn.Module, **options: Any) -> Iterator[list[nn.Parameter]]:
    """The parameters of a new adapter, in ``unet`` for as long as the block lasts."""
    inject(unet, name=_NAME, **options)
    try:
        yield [parameter for parameter in unet.parameters() if parameter.requires_grad]
    finally:
        eject(unet)


def _in_float32(network: Any) -> Any:
    return network if network.dtype == torch.float32 else copy.deepcopy(network).float()


def _pixels(image: Image.Image) -> torch.Tensor:
    """RGB in [-1, 1], (3, height, width); what is transparent is white."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    values = np.asarray(image.convert("RGB"), dtype=np.float32)
    return torch.from_numpy(values / 127.5 - 1).permute(2, 0, 1)


def _prediction(scheduler: Any) -> str:
    kind = str(getattr(scheduler.config, "prediction_type", "epsilon"))
    if kind not in PREDICTIONS or not hasattr(scheduler, "alphas_cumprod"):
        raise ConfigError(
            f"{type(scheduler).__name__} with prediction_type {kind!r} cannot be trained against: expected alphas_cumprod "
            f"and one of {', '.join(PREDICTIONS)}; set the pipeline's scheduler to DDIMScheduler.from_config(...)"
        )
    return kind


def _check(
    images: Sequence[Image.Image],
    captions: Sequence[str],
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    caption_dropout: float,
) -> None:
    problems = []
    if not images or len(images) != len(captions):
        problems.append(f"every picture needs one caption: got {len(images)} pictures and {len(captions)} captions")
    if len(sizes := sorted({image.size for image in images})) > 1:
        shown = ", ".join(f"{width}x{height}" for width, height in sizes[:4])
        problems.append(f"the pictures must all have one size, got {shown}; resize them first")
    problems += [f"{name} must be at least 1, got {n}" for name, n in (("steps", steps), ("batch", batch)) if n < 1]
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        problems.append(f"learning_rate must be a positive number, got {learning_rate!r}")
    if not 0 <= caption_dropout <= 1:
        problems.append(f"caption_dropout must lie between 0 and 1, got {caption_dropout!r}")
    if problems:
        raise ConfigError(problems)
