"""The denoising loop: from noise to an image, the same for every family and task.

    text to image     x_T = noise
    image to image    x_t = noised image, from step (1 - strength) * steps on
    inpainting        9-channel models see mask and masked image; for all others the known part is put back
                      after every step:  x = mask * x + (1 - mask) * noised image

All random numbers of an image come from one CPU generator in a fixed order, so a seed means the same on every device.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from inweave.errors import CancelledError, FormatError, RequestError
from inweave.generate.conditioning import PromptConditioning, network_errors
from inweave.generate.images import to_image
from inweave.models import vae
from inweave.models.model import Model
from inweave.models.samplers import make_scheduler, scaled_input, set_steps


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request is; ``preview`` only where previews are on."""

    step: int
    total: int
    eta: float  # seconds
    image: int = 0
    images: int = 1
    preview: Image.Image | None = None


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Receivers of progress and warnings, how often a preview is made, and a check for cancellation between steps."""

    progress: Callable[[Progress], object] | None = None
    preview_every: int = 0
    cancelled: Callable[[], bool] | None = None
    warn: Callable[[str], object] | None = None
    preview_first: bool = False  # previews of the steps 1, 1 + every, ... and of the last one


@dataclass(frozen=True, slots=True)
class ImageTask:
    """One image, everything decided."""

    conditioning: PromptConditioning
    sampler: str
    schedule: str
    steps: int
    seed: int
    width: int
    height: int
    init: torch.Tensor | None = None  # the image to start from, in -1..1
    mask: torch.Tensor | None = None  # one where to repaint
    strength: float = 1.0
    loras: tuple[str, ...] = ()  # names and strengths, for messages


@torch.no_grad()
def generate_image(
    model: Model, task: ImageTask, callbacks: Callbacks, number: tuple[int, int] = (0, 1)
) -> Image.Image:
    """Make one image, the first of ``number`` out of the second; raise RequestError if its values are not finite."""
    if model.family.own_pipeline:
        return _from_pipeline(model, task, callbacks, number)
    generator = torch.Generator("cpu").manual_seed(task.seed)
    if task.init is not None and task.strength == 0.0:
        return _decode(model, _encode(model, task.init, None), callbacks, task.loras)
    with network_errors(model):
        scheduler = make_scheduler(model.blueprint.scheduler, task.sampler, task.schedule, flow=model.flow)
        shape = model.latent_space.shape(task.width, task.height)
        tokens = model.family.image_tokens(shape) if model.flow else None
        times = set_steps(
            scheduler,
            task.steps,
            model.device,
            tokens=tokens,
            even_sigmas=model.family.even_sigmas,
            mu=None if tokens is None else model.family.mu(tokens, task.steps),
        )
        first, order = 0, getattr(scheduler, "order", 1)
        # a model that sees the masked image may start from noise alone; all others need to know the kept part
        from_noise = task.init is None or (model.inpaints and task.mask is not None and task.strength == 1.0)
        original = None if from_noise or task.init is None else _encode(model, task.init, generator)
        noise = torch.randn(shape, generator=generator).to(model.device, model.dtype)
        if original is None:
            latents = noise * getattr(scheduler, "init_noise_sigma", 1.0)
            if times[:1].tolist() == times[1:2].tolist() and hasattr(scheduler, "set_begin_index"):
                scheduler.set_begin_index(
                    0
                )  # two noise levels round to one timestep: looked up, it would be the second
        else:
            first = _first_step(len(times), task.strength, model.flow, order)
            if hasattr(scheduler, "set_begin_index"):
                scheduler.set_begin_index(first)
            latents = _add_noise(scheduler, original, noise, times[first : first + 1])
            if task.mask is not None and task.strength == 1.0:
                latents = noise * getattr(scheduler, "init_noise_sigma", 1.0)
        channels, mask = _mask_inputs(model, task, generator)
        options = {"generator": generator} if "generator" in inspect.signature(scheduler.step).parameters else {}
    started = time.perf_counter()
    total = -(-(len(times) - first) // order)
    with model.using(model.blueprint.denoiser.folder):
        for step, t in enumerate(times[first:]):
            if callbacks.cancelled is not None and callbacks.cancelled():
                raise CancelledError(f"cancelled before step {step + 1} of {len(times) - first}")
            with network_errors(model):
                rows = scaled_input(scheduler, latents, t)
                rows = rows if channels is None else torch.cat([rows, channels], 1)
                prediction = model.family.predict(model, rows, t, task.conditioning.at(step // order, total))
                latents = scheduler.step(prediction, t, latents, return_dict=False, **options)[0]
                # the first half of a step of two ends at no noise level of its own
                if mask is not None and original is not None and getattr(scheduler, "state_in_first_order", True):
                    following = times[first + step + 1 : first + step + 2]
                    outside = _add_noise(scheduler, original, noise, following) if len(following) else original
                    latents = (mask * latents + (1 - mask) * outside).to(latents.dtype)
            _report(model, callbacks, step // order + 1, total, started, latents, number)
    _ensure_finite(model, latents, "the denoiser", task.loras)
    return _decode(model, latents, callbacks, task.loras)


def _from_pipeline(model: Model, task: ImageTask, callbacks: Callbacks, number: tuple[int, int]) -> Image.Image:
    """Return the image that the model's own pipeline makes."""
    started = time.perf_counter()

    def on_step(step: int, latents: torch.Tensor | None) -> None:
        if callbacks.cancelled is not None and callbacks.cancelled():
            raise CancelledError(f"cancelled after step {step} of {task.steps}")
        _report(model, callbacks, min(step, task.steps), task.steps, started, latents, number)

    with network_errors(model), model.using(*model.networks):
        image = model.family.generate(
            model, task.conditioning.at(0, 1), (task.width, task.height), task.steps, task.seed, on_step
        )
    assert isinstance(image, Image.Image)
    return image


def _ensure_finite(model: Model, values: torch.Tensor, source: str, loras: tuple[str, ...]) -> None:
    """Raise RequestError instead of making a black image, and name the weight that is the most likely cause."""
    if bool(torch.isfinite(values).all()):
        return
    stack = f" with the LoRAs {', '.join(loras)}" if loras else ""
    dtype = str(values.dtype).removeprefix("torch.")
    raise RequestError(
        f"{source} gave numbers that are not finite in {dtype}{stack}, so there is no image; {_largest_weight(model)}. "
        "Use lower strengths and guidance, or a dtype with a wider range (bf16, fp32)"
    )


def _largest_weight(model: Model) -> str:
    largest, place = 0.0, ""
    for folder, network in model.networks.items():
        for name, weight in network.named_parameters():
            size = float(weight.detach().abs().amax()) if weight.numel() else 0.0
            if not size <= largest:  # NaN too
                largest, place = size, f"{folder}: {name}"
            if not math.isfinite(size):
                break
    return f"the largest number in its weights is {largest:g}, in {place}"


def _first_step(evaluations: int, strength: float, flow: bool, order: int = 1) -> int:
    """Return the step where denoising starts at this strength; a fraction of a step is rounded down, for flows up.

    ``order``: how many evaluations of the model make one step of the sampler; the last step takes one less.
    """
    steps = -(-evaluations // order)
    skipped = steps - steps * strength if flow else steps - int(steps * strength)
    return min(int(skipped), steps - 1) * order


def _encode(model: Model, image: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    with network_errors(model), model.using("vae"):
        return vae.encode(model.vae, image, generator).to(model.dtype)


def _decode(
    model: Model, latents: torch.Tensor, callbacks: Callbacks, loras: tuple[str, ...] = (), *, preview: bool = False
) -> Image.Image:
    with network_errors(model), model.using("vae"):
        values = vae.decode(model.vae, latents, callbacks.warn)
        if preview and values.shape[1] == 4:
            values = values[:, :3]  # without its alpha
        if values.shape[1] != 3:
            raise FormatError(f"{model.name}: the autoencoder gives {values.shape[1]} channels; an image has 3")
    if not preview:
        _ensure_finite(model, values, "the autoencoder", loras)
    return to_image(values)


def _add_noise(scheduler: Any, latents: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    if hasattr(scheduler, "scale_noise"):
        noisy: torch.Tensor = scheduler.scale_noise(latents, t, noise)
    else:
        noisy = scheduler.add_noise(latents, noise, t)
    return noisy


def _mask_inputs(
    model: Model, task: ImageTask, generator: torch.Generator
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the extra channels of a 9-channel model, and the mask to put the known part back with."""
    if task.mask is None or task.init is None:
        if model.inpaints:  # nothing is known: the whole image is to be painted
            blank = _encode(model, torch.zeros(1, 3, task.height, task.width), generator)
            return torch.cat([torch.ones_like(blank[:, :1]), blank], 1), None
        return None, None
    scale = model.latent_scale
    small = torch.nn.functional.interpolate(task.mask, size=(task.height // scale, task.width // scale))
    small = small.to(model.device, model.dtype)
    if not model.inpaints:
        return None, small
    masked = _encode(model, task.init * (task.mask < 0.5), generator)
    return torch.cat([small, masked], 1), None


def _report(
    model: Model,
    callbacks: Callbacks,
    step: int,
    total: int,
    started: float,
    latents: torch.Tensor | None,
    number: tuple[int, int],
) -> None:
    """Call ``progress``; without ``latents`` there is no preview."""
    if callbacks.progress is None:
        return
    left = (time.perf_counter() - started) / step * (total - step)
    due = callbacks.preview_every > 0 and (
        ((step - 1) % callbacks.preview_every == 0 or step == total)
        if callbacks.preview_first
        else (step % callbacks.preview_every == 0 and step < total)
    )
    preview = _decode(model, latents, callbacks, preview=True) if due and latents is not None else None
    callbacks.progress(Progress(step, total, left, *number, preview=preview))
