"""The denoising loop: from noise to images, the same for every family and task.

    text to image     x_T = noise
    image to image    x_t = noised image, from step (1 - strength) * steps on
    inpainting        9-channel models see mask and masked image; for all others the known part is put back
                      after every step:  x = mask * x + (1 - mask) * noised image

Images of one batch share sampler, steps, size and strength; each has its own prompts, guidance, seed and input images.
All random numbers of an image come from its own CPU generator in a fixed order, so a seed means the same on every
device and in every batch: the noise of an image is bit for bit that of the image alone. What networks compute from it
is rounded differently, because kernels sum rows of another shape in another order.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from inweave.errors import CancelledError
from inweave.generate.conditioning import BatchConditioning, PromptConditioning, network_errors
from inweave.generate.latents import decode, encode, encode_each, ensure_finite, mask_channels
from inweave.models.model import Model
from inweave.models.samplers import make_scheduler, scaled_input, set_steps


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request is; ``preview`` only where previews are on.

    ``image``: the image of the preview, otherwise the first of the ``batch`` images that are made together, after
    ``finished`` others.
    """

    step: int
    total: int
    eta: float  # seconds, for this batch
    image: int = 0
    images: int = 1
    preview: Image.Image | None = None
    batch: int = 1
    finished: int = 0
    all_passes: tuple[int, int] | None = None  # steps done and in total, of a request with several passes

    @property
    def done(self) -> int:
        """The steps that are done, of all images."""
        return self.all_passes[0] if self.all_passes else self.finished * self.total + self.step * self.batch

    @property
    def work(self) -> int:
        """The steps of all images."""
        return self.all_passes[1] if self.all_passes else self.total * self.images


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Receivers of progress and warnings, how often a preview is made, and a check for cancellation between steps."""

    progress: Callable[[Progress], object] | None = None
    preview_every: int = 0
    cancelled: Callable[[], bool] | None = None
    warn: Callable[[str], object] | None = None
    preview_first: bool = False  # previews of the steps 1, 1 + every, ... and of the last one


@dataclass(frozen=True, slots=True)
class Place:
    """The numbers of the images of a batch, of ``images``, of which ``finished`` were made before."""

    numbers: Sequence[int] = (0,)
    finished: int = 0
    images: int = 1


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
    init: Tensor | None = None  # the image to start from, in -1..1
    mask: Tensor | None = None  # one where to repaint
    strength: float = 1.0
    loras: tuple[str, ...] = ()  # names and strengths, for messages
    start: Tensor | None = None  # latents to start from, instead of `init`
    noise: Tensor | None = None  # that is added to them, instead of that of the seed

    @property
    def shared(self) -> tuple[object, ...]:
        """What all images of a batch have in common."""
        has_image = self.init is not None or self.start is not None
        inputs = has_image, self.start is not None, self.mask is not None, has_image and self.strength
        return self.sampler, self.schedule, self.steps, self.width, self.height, *inputs


@torch.no_grad()
def denoise(model: Model, tasks: Sequence[ImageTask], callbacks: Callbacks, place: Place | None = None) -> Tensor:
    """Return the latents of a batch of images; ``place``: theirs among all images, for progress."""
    place = place or Place(range(len(tasks)), 0, len(tasks))
    task, generators = tasks[0], [torch.Generator("cpu").manual_seed(each.seed) for each in tasks]
    assert len({each.shared for each in tasks}) == 1, "images of a batch share their settings"
    inits = [each.init for each in tasks if each.init is not None]
    starts = [each.start for each in tasks if each.start is not None]
    if starts and task.strength == 0.0:
        return torch.cat(starts)
    if inits and task.strength == 0.0:
        return torch.cat([encode(model, init) for init in inits])
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
        from_noise = not (inits or starts) or (model.inpaints and task.mask is not None and task.strength == 1.0)
        original = None if from_noise else torch.cat(starts) if starts else encode_each(model, inits, generators)
        noise = torch.cat([noise_of(each, shape, own) for each, own in zip(tasks, generators, strict=True)])
        noise = noise.to(model.device, model.dtype)
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
        size = task.width, task.height
        channels, mask = mask_channels(model, [t.init for t in tasks], [t.mask for t in tasks], size, generators)
        draws = "generator" in inspect.signature(scheduler.step).parameters
        options = {"generator": generators if len(tasks) > 1 else generators[0]} if draws else {}
    conditioning = BatchConditioning(model, [each.conditioning for each in tasks], shape)
    started = time.perf_counter()
    total = -(-(len(times) - first) // order)
    pace = _Pace(model.device)
    with model.using(model.blueprint.denoiser.folder), conditioning.acting():
        for step, t in enumerate(times[first:]):
            if callbacks.cancelled is not None and callbacks.cancelled():
                raise CancelledError(f"cancelled before step {step + 1} of {len(times) - first}")
            with network_errors(model):
                rows = scaled_input(scheduler, latents, t)
                rows = rows if channels is None else torch.cat([rows, channels], 1)
                prediction = _predict(model, rows, t, conditioning, (step // order, total))
                latents = scheduler.step(prediction, t, latents, return_dict=False, **options)[0]
                # the first half of a step of two ends at no noise level of its own
                if mask is not None and original is not None and getattr(scheduler, "state_in_first_order", True):
                    following = times[first + step + 1 : first + step + 2]
                    outside = _add_noise(scheduler, original, noise, following) if len(following) else original
                    latents = (mask * latents + (1 - mask) * outside).to(latents.dtype)
            pace.wait()
            _report(model, callbacks, step // order + 1, total, started, latents, place)
    return latents


def noise_of(task: ImageTask, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return the noise of an image: its own, or that of its seed."""
    return torch.randn(shape, generator=generator) if task.noise is None else task.noise


class _Pace:
    """Keeps the host at most one step ahead of a GPU, so that progress and cancellation are about what it computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait for the end of the step before the present one."""
        if self._device.type != "cuda":
            return
        before, self._step = self._step, torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._step.record(torch.cuda.current_stream(self._device))
        if before is not None:
            before.synchronize()


def run_denoiser(model: Model, rows: Tensor, t: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the denoiser's predictions for rows of latents at time ``t``; a step does nothing else with a network."""
    return model.predict(rows, t, inputs)


def _predict(model: Model, latents: Tensor, t: Tensor, images: BatchConditioning, at: tuple[int, int]) -> Tensor:
    """Return one prediction per image; images whose texts do not fit into one batch take a call per group."""
    predictions: dict[int, Tensor] = {}
    groups = images.at(*at)
    for numbers, conditioning in groups:
        own = latents if len(groups) == 1 else latents[numbers]
        images.fill(numbers, conditioning)
        made = run_denoiser(model, conditioning.expand(own), t, conditioning.inputs)
        prediction = conditioning.combine(model.family, made)
        if len(groups) == 1:
            return prediction
        predictions |= zip(numbers, prediction.chunk(len(numbers)), strict=True)
    return torch.cat([predictions[number] for number in range(len(latents))])


@torch.no_grad()
def decode_image(model: Model, latents: Tensor, task: ImageTask, callbacks: Callbacks) -> Image.Image:
    """Return the image of one row of `denoise`; raise RequestError if its values are not finite."""
    is_encoded = task.init is not None and task.strength == 0.0
    ensure_finite(model, latents, "the autoencoder" if is_encoded else "the denoiser", task.loras)
    return decode(model, latents, callbacks.warn, task.loras)


@torch.no_grad()
def pipeline_image(model: Model, task: ImageTask, callbacks: Callbacks, place: Place) -> Image.Image:
    """Return the image that the model's own pipeline makes."""
    started = time.perf_counter()

    def on_step(step: int, latents: Tensor | None) -> None:
        if callbacks.cancelled is not None and callbacks.cancelled():
            raise CancelledError(f"cancelled after step {step} of {task.steps}")
        _report(model, callbacks, min(step, task.steps), task.steps, started, latents, place)

    with network_errors(model), model.using(*model.networks):
        image = model.family.generate(
            model, task.conditioning.at(0, 1), (task.width, task.height), task.steps, task.seed, on_step
        )
    assert isinstance(image, Image.Image)
    return image


def _first_step(evaluations: int, strength: float, flow: bool, order: int = 1) -> int:
    """Return the step where denoising starts at this strength; a fraction of a step is rounded down, for flows up.

    ``order``: how many evaluations of the model make one step of the sampler; the last step takes one less.
    """
    steps = -(-evaluations // order)
    skipped = steps - steps * strength if flow else steps - int(steps * strength)
    return min(int(skipped), steps - 1) * order


def _add_noise(scheduler: Any, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    if hasattr(scheduler, "scale_noise"):
        noisy: Tensor = scheduler.scale_noise(latents, t, noise)
    else:
        noisy = scheduler.add_noise(latents, noise, t)
    return noisy


def _report(
    model: Model,
    callbacks: Callbacks,
    step: int,
    total: int,
    started: float,
    latents: Tensor | None,
    place: Place,
) -> None:
    """Call ``progress``, for a preview once for each image; without ``latents`` there is none."""
    if callbacks.progress is None:
        return
    left = (time.perf_counter() - started) / step * (total - step)
    due = callbacks.preview_every > 0 and (
        ((step - 1) % callbacks.preview_every == 0 or step == total)
        if callbacks.preview_first
        else (step % callbacks.preview_every == 0 and step < total)
    )
    if not due or latents is None:
        callbacks.progress(_at(place, place.numbers[0], step, total, left, None))
        return
    for number, row in zip(place.numbers, latents.chunk(len(place.numbers)), strict=True):
        callbacks.progress(_at(place, number, step, total, left, decode(model, row, callbacks.warn, preview=True)))


def _at(place: Place, image: int, step: int, total: int, left: float, preview: Image.Image | None) -> Progress:
    return Progress(step, total, left, image, place.images, preview, len(place.numbers), place.finished)
