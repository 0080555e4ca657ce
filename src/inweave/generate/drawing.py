"""From prepared requests to their results: images in batches, each with its record.

If a batch does not fit into memory, it is split and made again: an image depends on its own seed alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from inweave.generate.applied import rounding_note
from inweave.generate.batches import Batch, largest_batch, split
from inweave.generate.conditioning import PromptConditioning
from inweave.generate.denoise import Callbacks, ImageTask, decode_image, denoise, pipeline_image
from inweave.generate.images import is_blank
from inweave.generate.prepared import PreparedRequest, finished, record_of, tasks_of
from inweave.generate.result import Result
from inweave.models.model import Model

#: called with (number, image, record)
OnImage = Callable[[int, Image.Image, dict[str, Any]], object]


@dataclass(frozen=True, slots=True)
class Drawing:
    """Makes the images of requests from the current weights.

    ``measured``: see `largest_batch`.
    """

    model: Model
    model_hash: str | None
    batch: Batch
    measured: dict[tuple[object, ...], int]

    def __call__(
        self,
        request: PreparedRequest,
        conditioning: PromptConditioning,
        callbacks: Callbacks,
        on_image: OnImage | None = None,
    ) -> Result:
        """Return the result of one request; raise RequestError if the values of an image are not finite."""
        result = Result([], [], request.loras, _warnings(self.model, request))
        tasks = tasks_of(request, conditioning)
        callbacks = replace(callbacks, warn=result.warnings.append)
        for number, image in enumerate(self._images(tasks, callbacks, result.batches)):
            if is_blank(image):
                result.warnings.append(
                    f"the image of seed {tasks[number].seed} is a single color; lower the strengths of LoRAs, or the "
                    "guidance"
                )
            result.images.append(finished(image, request))
            result.records.append(record_of(self.model, self.model_hash, request, tasks[number].seed))
            if on_image is not None:
                on_image(number, result.images[-1], result.records[-1])
        result.warnings = list(dict.fromkeys([*result.warnings, *conditioning.warnings]))
        return result

    def _images(self, tasks: Sequence[ImageTask], callbacks: Callbacks, batches: list[int]) -> Iterator[Image.Image]:
        """Make images that can share a batch, in order; the size of each batch is added to ``batches``."""
        most = largest_batch(self.model, tasks, self.batch, self.measured)
        waiting = deque(split(len(tasks), most))
        while waiting:
            numbers = waiting.popleft()
            own, place = [tasks[number] for number in numbers], (numbers[0], len(tasks))
            if self.model.family.own_pipeline:
                batches.append(1)
                yield pipeline_image(self.model, own[0], callbacks, place)
                continue
            if (latents := self._denoise(own, callbacks, place)) is None:
                halves = split(len(numbers), -(-len(numbers) // 2))
                waiting.extendleft(range(numbers[0] + half[0], numbers[0] + half[-1] + 1) for half in reversed(halves))
                continue
            batches.append(len(own))
            for position, task in enumerate(own):
                yield decode_image(self.model, latents[position : position + 1], task, callbacks)

    def _denoise(self, tasks: Sequence[ImageTask], callbacks: Callbacks, place: tuple[int, int]) -> Tensor | None:
        """Return the latents of a batch; None if memory ran out for several images."""
        try:
            return denoise(self.model, tasks, callbacks, place)
        except torch.OutOfMemoryError:
            if len(tasks) == 1:
                raise
        # outside of the handler: the error holds its frames, and they hold what was computed
        torch.cuda.empty_cache()
        if callbacks.warn is not None:
            callbacks.warn(f"not enough memory for {len(tasks)} images together; they were made in smaller batches")
        return None


def _warnings(model: Model, request: PreparedRequest) -> list[str]:
    """Return what is to be said about a request before its images are made."""
    warnings = [*request.warnings, *(warning for lora in request.loras for warning in lora.warnings)]
    warnings += [warning for parsed in request.config.prompts for warning in parsed.warnings]
    return [*warnings, *filter(None, [rounding_note(model.rounding_loss)])]
