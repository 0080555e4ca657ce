"""Images that are denoised with the same settings, between two evaluations of the denoiser.

    text to image     x_T = noise
    image to image    x_t = noised image, from step (1 - strength) * steps on
    inpainting        9-channel models see mask and masked image; for all others the known part is put back
                      after every step:  x = mask * x + (1 - mask) * noised image

All random numbers of an image come from its own CPU generator in a fixed order, so a seed means the same on every
device and in every batch: the noise of an image is bit for bit that of the image alone. A scheduler carries state, so
every `Sampling` has its own, whichever others share the calls of the denoiser with it. Schedulers get times in host
memory, where their tables are, so that a step waits for no number of the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inweave.generate.conditioning import PromptConditioning, network_errors
from inweave.generate.latents import encode, encode_each, mask_channels
from inweave.models.model import Model
from inweave.models.samplers import make_scheduler, scaled_input, set_steps


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


class Sampling:
    """The latents of images with the same settings, and how far they are."""

    def __init__(self, model: Model, tasks: Sequence[ImageTask]) -> None:
        """Draw the noise; the images share all settings but prompts, guidance, seeds and input images."""
        assert len({each.shared for each in tasks}) == 1, "images of a batch share their settings"
        self.model, self.tasks, task = model, tuple(tasks), tasks[0]
        self._evaluation, self.order = 0, 1
        self._scheduler: Any = None
        self._channels: Tensor | None = None
        self._mask: Tensor | None = None
        generators = [torch.Generator("cpu").manual_seed(each.seed) for each in tasks]
        inits = [each.init for each in tasks if each.init is not None]
        starts = [each.start for each in tasks if each.start is not None]
        self._original: Tensor | None = None
        if starts and task.strength == 0.0:
            self.latents, self._times = torch.cat(starts), torch.empty(0)
            return
        if inits and task.strength == 0.0:
            self.latents, self._times = torch.cat([encode(model, init) for init in inits]), torch.empty(0)
            return
        with network_errors(model):
            self._begin(generators, inits, starts)

    def _begin(self, generators: list[torch.Generator], inits: list[Tensor], starts: list[Tensor]) -> None:
        model, task = self.model, self.tasks[0]
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
        first, self.order = 0, getattr(scheduler, "order", 1)
        # a model that sees the masked image may start from noise alone; all others need to know the kept part
        from_noise = not (inits or starts) or (model.inpaints and task.mask is not None and task.strength == 1.0)
        original = None if from_noise else torch.cat(starts) if starts else encode_each(model, inits, generators)
        noise = torch.cat([noise_of(each, shape, own) for each, own in zip(self.tasks, generators, strict=True)])
        noise = noise.to(model.device, model.dtype)
        if original is None:
            latents = noise * getattr(scheduler, "init_noise_sigma", 1.0)
            if times[:1].tolist() == times[1:2].tolist() and hasattr(scheduler, "set_begin_index"):
                scheduler.set_begin_index(
                    0
                )  # two noise levels round to one timestep: looked up, it would be the second
        else:
            first = _first_step(len(times), task.strength, model.flow, self.order)
            if hasattr(scheduler, "set_begin_index"):
                scheduler.set_begin_index(first)
            latents = _add_noise(scheduler, original, noise, times[first : first + 1])
            if task.mask is not None and task.strength == 1.0:
                latents = noise * getattr(scheduler, "init_noise_sigma", 1.0)
        size, masks = (task.width, task.height), [each.mask for each in self.tasks]
        self._channels, self._mask = mask_channels(model, [t.init for t in self.tasks], masks, size, generators)
        draws = "generator" in inspect.signature(scheduler.step).parameters
        self._options = {"generator": generators if len(generators) > 1 else generators[0]} if draws else {}
        self._scheduler, self._times, self.latents = scheduler, times[first:], latents
        self._host_times = self._times.cpu()
        self._noise, self._original = noise, original

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def evaluations(self) -> int:
        """How often the denoiser is called in all."""
        return len(self._times)

    @property
    def evaluation(self) -> int:
        """How often it was called so far."""
        return self._evaluation

    @property
    def steps(self) -> int:
        """Steps of the sampler in all; some take two evaluations."""
        return -(-len(self._times) // self.order)

    @property
    def step(self) -> int:
        """The step that the next evaluation belongs to, counted from 0."""
        return self._evaluation // self.order

    @property
    def done(self) -> bool:
        """Whether there is nothing left to evaluate."""
        return self._evaluation >= len(self._times)

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Return what the denoiser gets next: one row of latents per image, and their time."""
        now = self._evaluation
        with network_errors(self.model):
            rows = scaled_input(self._scheduler, self.latents, self._host_times[now])
            rows = rows if self._channels is None else torch.cat([rows, self._channels], 1)
        return rows, self._times[now]

    def advance(self, prediction: Tensor) -> None:
        """Take one prediction per image to the next noise level."""
        scheduler, now = self._scheduler, self._evaluation
        with network_errors(self.model):
            t = self._host_times[now]
            latents = scheduler.step(prediction, t, self.latents, return_dict=False, **self._options)[0]
            # the first half of a step of two ends at no noise level of its own
            whole = getattr(scheduler, "state_in_first_order", True)
            if self._mask is not None and self._original is not None and whole:
                following = self._times[now + 1 : now + 2]
                original = self._original
                outside = _add_noise(scheduler, original, self._noise, following) if len(following) else original
                latents = (self._mask * latents + (1 - self._mask) * outside).to(latents.dtype)
        self.latents = latents
        self._evaluation += 1


def noise_of(task: ImageTask, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return the noise of an image: its own, or that of its seed."""
    return torch.randn(shape, generator=generator) if task.noise is None else task.noise


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
