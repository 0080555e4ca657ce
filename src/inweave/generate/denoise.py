"""The loop: from noise to latents, the same for every family and task.

    text to image     x_T = noise
    image to image    x_t = noised picture, from step (1 - strength) * steps on
    inpainting        9-channel models are shown mask and masked picture; for all others the known part is put back
                      after every step:  x = mask * x + (1 - mask) * noised picture

All random numbers of a picture come from one CPU generator in a fixed order, so a seed means the same on every device.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from inweave.errors import CancelledError
from inweave.generate.pictures import to_picture
from inweave.models.families import Conditioning, predict
from inweave.models.model import Model
from inweave.models.samplers import make_scheduler, set_steps

SMALLEST_TILE = 16  # latents a side: smaller ones see too little of the picture


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a picture stands; ``preview`` only where one was asked for."""

    step: int
    total: int
    eta: float  # seconds
    picture: int = 0
    pictures: int = 1
    preview: Image.Image | None = None


@dataclass(frozen=True, slots=True)
class Watch:
    """Who is told of progress, how often a preview is made, who may stop the work between steps, who hears of warnings."""

    progress: Callable[[Progress], object] | None = None
    preview_every: int = 0
    cancelled: Callable[[], bool] | None = None
    warn: Callable[[str], object] | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One picture, everything decided."""

    told: Conditioning
    sampler: str
    schedule: str
    steps: int
    seed: int
    width: int
    height: int
    picture: torch.Tensor | None = None  # to start from, in -1..1
    mask: torch.Tensor | None = None  # one where to repaint
    strength: float = 1.0


@torch.no_grad()
def draw(model: Model, job: Job, watch: Watch, place: tuple[int, int] = (0, 1)) -> Image.Image:
    """Make one picture."""
    generator = torch.Generator("cpu").manual_seed(job.seed)
    if job.picture is not None and job.strength == 0.0:
        return to_picture(decode(model, encode(model, job.picture, None), watch))
    scheduler = make_scheduler(model.blueprint.scheduler, job.sampler, job.schedule, flow=model.flow)
    scale = model.latent_scale
    shape = (1, model.vae.config.latent_channels, job.height // scale, job.width // scale)
    tokens = shape[2] * shape[3] // 4 if model.flow else None
    times = set_steps(scheduler, job.steps, model.device, tokens=tokens, even=model.family == "flux")
    begin = 0
    # a model that is shown the picture may start from noise alone; all others need to know the kept part
    from_noise = job.picture is None or (model.inpaints and job.mask is not None and job.strength == 1.0)
    known = None if from_noise or job.picture is None else encode(model, job.picture, generator)
    noise = torch.randn(shape, generator=generator).to(model.device, model.dtype)
    if known is None:
        latents = noise * getattr(scheduler, "init_noise_sigma", 1.0)
    else:
        begin = _first_step(len(times), job.strength, model.flow)
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(begin)
        latents = _noised(scheduler, known, noise, times[begin : begin + 1])
        if job.mask is not None and job.strength == 1.0:
            latents = noise * getattr(scheduler, "init_noise_sigma", 1.0)
    shown, kept = _mask_inputs(model, job, generator)
    options = {"generator": generator} if "generator" in inspect.signature(scheduler.step).parameters else {}
    started = time.perf_counter()
    for number, t in enumerate(times[begin:]):
        if watch.cancelled is not None and watch.cancelled():
            raise CancelledError(f"cancelled before step {number + 1} of {len(times) - begin}")
        rows = scheduler.scale_model_input(latents, t) if hasattr(scheduler, "scale_model_input") else latents
        found = predict(model, rows if shown is None else torch.cat([rows, shown], 1), t, job.told)
        latents = scheduler.step(found, t, latents, return_dict=False, **options)[0]
        if kept is not None and known is not None:
            following = times[begin + number + 1 : begin + number + 2]
            original = _noised(scheduler, known, noise, following) if len(following) else known
            latents = (kept * latents + (1 - kept) * original).to(latents.dtype)
        _report(model, watch, number + 1, len(times) - begin, started, latents, place)
    return to_picture(decode(model, latents, watch))


def _first_step(steps: int, strength: float, flow: bool) -> int:
    """Where a picture is left at this strength; a broken number of steps is rounded down, for flows up."""
    kept = steps - steps * strength if flow else steps - int(steps * strength)
    return min(int(kept), steps - 1)


def encode(model: Model, picture: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Latents of a picture; without a generator the most likely ones."""
    vae = model.vae
    spread = vae.encode(picture.to(model.device, vae.dtype)).latent_dist
    found = spread.mode() if generator is None else spread.sample(generator)
    shift = getattr(vae.config, "shift_factor", None) or 0.0
    latents: torch.Tensor = (found - shift) * vae.config.scaling_factor
    return latents.to(model.dtype)


def decode(model: Model, latents: torch.Tensor, watch: Watch) -> torch.Tensor:
    """The picture of latents; where memory runs out, in tiles that overlap, half as large each time."""
    vae = model.vae
    shift = getattr(vae.config, "shift_factor", None) or 0.0
    hidden = latents.to(vae.dtype) / vae.config.scaling_factor + shift
    whole = side = max(hidden.shape[-2:])
    while True:
        try:
            numbers: torch.Tensor
            with _tiled(vae, side if side < whole else None, model.latent_scale):
                numbers = vae.decode(hidden, return_dict=False)[0]
            if side < whole and watch.warn is not None:
                pixels = side * model.latent_scale
                watch.warn(f"there was no memory to decode the picture at once: it is made of tiles of {pixels} pixels")
            return numbers
        except torch.OutOfMemoryError:
            if side // 2 < SMALLEST_TILE:
                raise
        # outside of the handler: the error holds its frames, and they hold what was computed
        torch.cuda.empty_cache()
        side //= 2


@contextmanager
def _tiled(vae: Any, side: int | None, scale: int) -> Iterator[None]:
    """Tiles of ``side`` latents inside the block; None: the picture as one."""
    before = vae.use_tiling, vae.tile_latent_min_size, vae.tile_sample_min_size
    if side is not None:
        vae.use_tiling, vae.tile_latent_min_size, vae.tile_sample_min_size = True, side, side * scale
    try:
        yield
    finally:
        vae.use_tiling, vae.tile_latent_min_size, vae.tile_sample_min_size = before


def _noised(scheduler: Any, latents: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    mix = scheduler.scale_noise if hasattr(scheduler, "scale_noise") else None
    found: torch.Tensor = mix(latents, t, noise) if mix is not None else scheduler.add_noise(latents, noise, t)
    return found


def _mask_inputs(model: Model, job: Job, generator: torch.Generator) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(channels a 9-channel model is shown, mask to put the known part back with)."""
    if job.mask is None or job.picture is None:
        if model.inpaints:  # nothing is known: everything is to be painted
            return _all_open(model, job, generator), None
        return None, None
    scale = model.latent_scale
    small = torch.nn.functional.interpolate(job.mask, size=(job.height // scale, job.width // scale))
    small = small.to(model.device, model.dtype)
    if not model.inpaints:
        return None, small
    hidden = encode(model, job.picture * (job.mask < 0.5), generator)
    return torch.cat([small, hidden], 1), None


def _all_open(model: Model, job: Job, generator: torch.Generator) -> torch.Tensor:
    blank = torch.zeros(1, 3, job.height, job.width)
    hidden = encode(model, blank, generator)
    return torch.cat([torch.ones_like(hidden[:, :1]), hidden], 1)


def _report(
    model: Model, watch: Watch, step: int, total: int, started: float, latents: torch.Tensor, place: tuple[int, int]
) -> None:
    if watch.progress is None:
        return
    left = (time.perf_counter() - started) / step * (total - step)
    wanted = watch.preview_every > 0 and step % watch.preview_every == 0 and step < total
    preview = to_picture(decode(model, latents, watch)) if wanted else None
    watch.progress(Progress(step, total, left, *place, preview=preview))
