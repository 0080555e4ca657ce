"""Requests with all of their passes: one for each prompt that random choices made, then that of `upscale`.

request ──► units, each of one prompt ──first pass──► images ──second pass (generate.upscale)──► the result
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from PIL import Image
from torch import Tensor

from inweave.errors import RequestError
from inweave.generate.denoise import Callbacks, Progress
from inweave.generate.drawing import OnImage
from inweave.generate.prepared import PreparedRequest, record_of
from inweave.generate.result import Result
from inweave.generate.upscale import SecondPass
from inweave.generate.upscaler_files import UpscalerFinder
from inweave.models.model import Model

#: makes the images of requests in one pass, each with `on_image` if there is one
Draw = Callable[[Sequence[PreparedRequest], Callbacks, OnImage | None], list[Result]]


@dataclass(slots=True)
class Passes:
    """Runs requests; ``done`` and ``work``: denoising steps so far, and of all passes."""

    model: Model
    model_hash: str | None
    upscalers: UpscalerFinder
    draw: Draw
    callbacks: Callbacks
    on_image: OnImage | None
    work: int = 0
    done: int = 0

    def run(self, requests: Sequence[PreparedRequest]) -> list[Result]:
        """Return one result for each request."""
        units = [unit for request in requests for unit in request.units]
        firsts, images = list[int](), 0
        for unit in units:
            firsts.append(images)
            images += unit.config.count
        if not any(unit.config.upscale for unit in units):
            results = self.draw(units, self.callbacks, self.on_image)
        else:
            results = self._both(units, firsts, images)
        made = iter(results)
        return [_merged(request, [next(made) for _ in request.units]) for request in requests]

    def _both(self, units: Sequence[PreparedRequest], firsts: Sequence[int], images: int) -> list[Result]:
        """Draw units of which some have a second pass."""
        units_to_draw = [replace(unit, is_first_pass=True) for unit in units if not unit.keeps_init]
        numbers = [first + n for unit, first in zip(units, firsts, strict=True) if not unit.keeps_init
                   for n in range(unit.config.count)]  # fmt: skip
        final = {first + n for unit, first in zip(units, firsts, strict=True) if unit.config.upscale is None
                 for n in range(unit.config.count)}  # fmt: skip
        self.work = sum(_steps(unit.config.steps, 1.0 if unit.start is None and unit.init is None
                               else unit.config.strength) * unit.config.count for unit in units_to_draw)  # fmt: skip
        self.work += sum(self._later_work(unit) for unit in units)

        def on_image(number: int, image: Image.Image, record: dict[str, object]) -> None:
            if self.on_image is not None and numbers[number] in final:
                self.on_image(numbers[number], image, record)

        made = iter(self.draw(units_to_draw, self._counted(images), on_image))
        results = []
        for unit, first in zip(units, firsts, strict=True):
            result = Result([], [], unit.loras) if unit.keeps_init else next(made)
            if unit.keeps_init and unit.init is not None:
                seed = unit.config.seed or 0
                result.images = [unit.init] * unit.config.count
                result.records = [
                    record_of(self.model, self.model_hash, unit, seed + n) for n in range(unit.config.count)
                ]
                result.batches = [1] * unit.config.count
                result.warnings += unit.warnings
            if unit.config.upscale is not None and result.error is None:
                self._upscale(unit, result, first, images)
            results.append(result)
        return results

    def _upscale(self, unit: PreparedRequest, result: Result, first: int, images: int) -> None:
        """Replace the images of a result by those of its second pass."""
        settings = unit.config.upscale
        assert settings is not None
        latents: Sequence[Tensor | None] = result.latents or [None] * len(result.images)
        for number, image in enumerate(result.images):
            second = SecondPass(
                self.model, unit, settings, self.upscalers, image, result.records[number]["config"]["seed"],
                latents[number], self.callbacks.cancelled,
            )  # fmt: skip
            if second.only_enlarges:
                result.images[number] = second.enlarged()
            else:
                parts = self.draw(second.requests(), self._counted(images, first + number), None)
                problem = next((part.error for part in parts if part.error is not None), None)
                if problem is not None:
                    result.error = RequestError(f"the second pass: {problem}")
                    del result.images[number:], result.records[number:], result.batches[number:]
                    return
                result.images[number] = second.tiles.join([part.images[0] for part in parts])
                warnings = [warning for part in parts for warning in part.warnings]
                result.warnings = list(dict.fromkeys([*result.warnings, *warnings]))
            if self.on_image is not None:
                self.on_image(first + number, result.images[number], result.records[number])
        result.latents = []

    def _later_work(self, unit: PreparedRequest) -> int:
        """Return the steps of the second passes of a unit."""
        settings = unit.config.upscale
        if settings is None or not settings.strength:
            return 0
        size = unit.size if unit.init is None else unit.init.size
        second = SecondPass(self.model, unit, settings, self.upscalers, Image.new("1", size), 0)
        return _steps(settings.steps, settings.strength) * len(second.tiles.boxes) * unit.config.count

    def _counted(self, images: int, image: int | None = None) -> Callbacks:
        """Return callbacks whose progress counts the steps of all passes; ``image``: the one that is made."""
        progress, before, last = self.callbacks.progress, self.done, 0
        if progress is None:
            return self.callbacks

        def report(at: Progress) -> None:
            nonlocal last
            last = max(last, at.done)
            self.done = before + last
            own = at.image if image is None else image
            progress(replace(at, image=own, images=images, all_passes=(self.done, max(self.work, self.done))))

        previews = self.callbacks.preview_every if image is None else 0  # those of tiles would show a part
        return replace(self.callbacks, progress=report, preview_every=previews)


def _steps(steps: int | None, strength: float) -> int:
    return max(1, round((steps or 1) * strength))


def _merged(request: PreparedRequest, results: Sequence[Result]) -> Result:
    """Return the results of the units of a request as one."""
    if len(results) == 1:
        return results[0]
    whole = Result([], [], [])
    for result in results:
        whole.images += result.images
        whole.records += result.records
        whole.batches += result.batches
        whole.loras += [lora for lora in result.loras if lora not in whole.loras]
        whole.warnings += [warning for warning in result.warnings if warning not in whole.warnings]
        whole.added += [name for name in result.added if name not in whole.added]
        whole.swap_seconds += result.swap_seconds
        whole.error, whole.merge_reason = whole.error or result.error, whole.merge_reason or result.merge_reason
        if result.error is not None:
            break
    return whole
