"""The denoising loop: from noise to images, the same for every family and task.

Images of one batch share sampler, steps, size and strength; each has its own prompts, guidance, seed and input images
(`sampling`). Several such batches of one size may share the calls of the denoiser, each at its own step (`evaluate`).
What networks compute for an image is rounded differently in another batch, because kernels sum rows of another shape in
another order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from inweave.errors import CancelledError
from inweave.generate.conditioning import BatchConditioning, network_errors
from inweave.generate.latents import decode, ensure_finite
from inweave.generate.sampling import ImageTask as ImageTask
from inweave.generate.sampling import Sampling
from inweave.models.model import Model


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


@torch.no_grad()
def denoise(model: Model, tasks: Sequence[ImageTask], callbacks: Callbacks, place: Place | None = None) -> Tensor:
    """Return the latents of a batch of images; ``place``: theirs among all images, for progress."""
    place = place or Place(range(len(tasks)), 0, len(tasks))
    sampling = Sampling(model, tasks)
    shape = model.latent_space.shape(tasks[0].width, tasks[0].height)
    conditioning = BatchConditioning(model, [each.conditioning for each in tasks], shape)
    started = time.perf_counter()
    pace = Pace(model.device)
    with model.using(model.blueprint.denoiser.folder), conditioning.acting():
        while not sampling.done:
            if callbacks.cancelled is not None and callbacks.cancelled():
                raise CancelledError(f"cancelled before step {sampling.evaluation + 1} of {sampling.evaluations}")
            evaluate(model, [sampling], conditioning)
            pace.wait()
            done = (sampling.evaluation - 1) // sampling.order + 1
            _report(model, callbacks, done, sampling.steps, started, sampling.latents, place)
    return sampling.latents


@torch.no_grad()
def evaluate(model: Model, samplings: Sequence[Sampling], conditioning: BatchConditioning) -> None:
    """Call the denoiser once for images that may be at different steps, and take each to its next noise level.

    ``conditioning``: of the images of all of them, in their order; its adapters are acting.
    """
    inputs = [each.inputs() for each in samplings]
    latents, t = inputs[0]
    if len(samplings) > 1:
        latents = torch.cat([rows for rows, _ in inputs])
        t = _joined_times([(len(rows), own) for rows, own in inputs])
    places = [(each.step, each.steps) for each in samplings for _ in each.tasks]
    with network_errors(model):
        predictions = _predict(model, latents, t, conditioning, places)
    parts = torch.split(predictions, [len(each) for each in samplings])
    for sampling, own in zip(samplings, parts, strict=True):
        sampling.advance(own)


def _joined_times(times: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Return one time per image; schedulers with whole numbers and those with others meet in float32."""
    dtype = times[0][1].dtype if len({t.dtype for _, t in times}) == 1 else torch.float32
    return torch.cat([t.to(dtype).expand(count) for count, t in times])


class Pace:
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


def _predict(
    model: Model, latents: Tensor, t: Tensor, images: BatchConditioning, places: Sequence[tuple[int, int]]
) -> Tensor:
    """Return one prediction per image; images whose texts do not fit into one batch take a call per group.

    ``t``: one time for all images, or one for each. ``places``: (step, steps) of each image.
    """
    predictions: dict[int, Tensor] = {}
    groups = images.at(places)
    for numbers, conditioning in groups:
        own, times = (latents, t) if len(groups) == 1 else (latents[numbers], t[numbers] if t.dim() else t)
        images.fill(numbers, conditioning)
        times = times.repeat_interleave(conditioning.rows) if times.dim() else times
        made = run_denoiser(model, conditioning.expand(own), times, conditioning.inputs)
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
    due = is_preview_due(callbacks, step, total)
    if not due or latents is None:
        callbacks.progress(_at(place, place.numbers[0], step, total, left, None))
        return
    for number, row in zip(place.numbers, latents.chunk(len(place.numbers)), strict=True):
        callbacks.progress(_at(place, number, step, total, left, decode(model, row, callbacks.warn, preview=True)))


def is_preview_due(callbacks: Callbacks, step: int, total: int) -> bool:
    """Return whether previews are made after step ``step``, counted from 1."""
    every = callbacks.preview_every
    if every <= 0 or step < 1:
        return False
    return (step - 1) % every == 0 or step == total if callbacks.preview_first else step % every == 0 and step < total


def _at(place: Place, image: int, step: int, total: int, left: float, preview: Image.Image | None) -> Progress:
    return Progress(step, total, left, image, place.images, preview, len(place.numbers), place.finished)
