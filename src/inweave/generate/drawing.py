"""From prepared requests to their results: images in batches, each with its record.

Images share a batch if their tasks do (`ImageTask.shared`), whichever request they belong to. If a batch does not fit
into memory, it is split and made again: an image depends on its own seed alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from inweave.errors import RequestError
from inweave.generate.applied import rounding_note
from inweave.generate.batches import Batch, largest_batch, split
from inweave.generate.conditioning import PromptConditioning
from inweave.generate.denoise import Callbacks, ImageTask, Place, decode_image, denoise, pipeline_image
from inweave.generate.images import is_blank
from inweave.generate.prepared import PreparedRequest, finished, record_of, tasks_of
from inweave.generate.result import Result
from inweave.models.model import Model

#: called with (number, image, record); the images of several requests are numbered through, in their order
OnImage = Callable[[int, Image.Image, dict[str, Any]], object]


@dataclass(frozen=True, slots=True)
class Job:
    """A request with its result, to which images are added, and the number of its first image."""

    request: PreparedRequest
    result: Result
    first: int


@dataclass(frozen=True, slots=True)
class _Draft:
    """An image that is to be made."""

    job: Job
    task: ImageTask
    number: int  # among all images


@dataclass(slots=True)
class Drawing:
    """Makes the images of requests from the current weights, and adds them to the results.

    ``measured``: see `largest_batch`. ``images``: how many there are in all calls; ``done``: how many are made.
    """

    model: Model
    model_hash: str | None
    batch: Batch
    measured: dict[tuple[object, ...], int]
    callbacks: Callbacks
    on_image: OnImage | None
    images: int
    done: int = 0

    def __call__(self, jobs: Sequence[Job], conditionings: Sequence[PromptConditioning]) -> None:
        """Make the images of requests.

        An image whose values are not finite ends its request with an error in the result.
        """
        shared: dict[tuple[object, ...], list[_Draft]] = {}
        for job, conditioning in zip(jobs, conditionings, strict=True):
            job.result.warnings += warnings_of(self.model, job.request)
            for number, task in enumerate(tasks_of(job.request, conditioning)):
                shared.setdefault(task.shared, []).append(_Draft(job, task, job.first + number))
        for drafts in shared.values():
            self._draw(drafts)
        for job, conditioning in zip(jobs, conditionings, strict=True):
            job.result.warnings = list(dict.fromkeys([*job.result.warnings, *conditioning.warnings]))

    def _draw(self, drafts: Sequence[_Draft]) -> None:
        """Make images that can share a batch, in order."""
        most = largest_batch(self.model, [draft.task for draft in drafts], self.batch, self.measured)
        waiting = deque([drafts[part.start : part.stop] for part in split(len(drafts), most)])
        while waiting:
            whole = waiting.popleft()
            batch = [draft for draft in whole if draft.job.result.error is None]
            self.done += len(whole) - len(batch)
            if not batch:
                continue
            place = Place([draft.number for draft in batch], self.done, self.images)
            if self.model.family.own_pipeline:
                self._add(batch[0], pipeline_image(self.model, batch[0].task, self._callbacks(batch), place), 1)
                continue
            if (latents := self._denoise(batch, place)) is None:
                half = -(-len(batch) // 2)
                waiting.extendleft((batch[half:], batch[:half]))
                continue
            for draft, row in zip(batch, latents.chunk(len(batch)), strict=True):
                if draft.job.result.error is not None:
                    self.done += 1
                    continue
                try:
                    image = decode_image(self.model, row, draft.task, self._callbacks([draft]))
                except RequestError as error:
                    draft.job.result.error, image = error, None
                self._add(draft, image, len(batch), row)

    def _denoise(self, batch: Sequence[_Draft], place: Place) -> Tensor | None:
        """Return the latents of a batch; None if memory ran out for several images."""
        callbacks = self._callbacks(batch)
        recorded = self.model.recorded
        try:
            latents = denoise(self.model, [draft.task for draft in batch], callbacks, place)
            if recorded is not None and callbacks.warn is not None and (problem := recorded.new_problem()):
                callbacks.warn(f"steps are not recorded in a CUDA graph, which would be faster: {problem}")
            return latents
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
        # outside of the handler: the error holds its frames, and they hold what was computed
        if recorded is not None:
            recorded.clear()
        torch.cuda.empty_cache()
        assert callbacks.warn is not None
        callbacks.warn(f"not enough memory for {len(batch)} images together; they were made in smaller batches")
        return None

    def _add(self, draft: _Draft, image: Image.Image | None, batch: int, latents: Tensor | None = None) -> None:
        """Add an image to the result of its request; None: it could not be made."""
        self.done += 1
        if image is None:
            return
        add_image(self.model, self.model_hash, draft.job, draft.task, image, batch)
        result = draft.job.result
        if draft.job.request.keeps_latents and latents is not None:
            result.latents.append(latents)
        if self.on_image is not None:
            self.on_image(draft.number, result.images[-1], result.records[-1])

    def _callbacks(self, drafts: Sequence[_Draft]) -> Callbacks:
        """Return the callbacks with warnings that go to the results of these images."""

        def warn(text: str) -> None:
            for draft in drafts:
                if text not in draft.job.result.warnings:
                    draft.job.result.warnings.append(text)

        return replace(self.callbacks, warn=warn)


def add_image(model: Model, model_hash: str | None, job: Job, task: ImageTask, image: Image.Image, batch: int) -> None:
    """Add an image, which was made with ``batch`` - 1 others, to the result of its request."""
    request, result = job.request, job.result
    if is_blank(image):
        result.warnings.append(
            f"the image of seed {task.seed} is a single color; lower the strengths of LoRAs, or the guidance"
        )
    result.images.append(finished(image, request))
    result.records.append(record_of(model, model_hash, request, task.seed))
    result.batches.append(batch)


def warnings_of(model: Model, request: PreparedRequest) -> list[str]:
    """Return what is to be said about a request before its images are made."""
    warnings = [*request.warnings, *(warning for lora in request.loras for warning in lora.warnings)]
    warnings += [warning for parsed in request.config.prompts for warning in parsed.warnings]
    return [*warnings, *filter(None, [rounding_note(model.rounding_loss)])]
