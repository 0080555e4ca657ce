"""Image jobs: parse -> resolve choices and styles -> look up model and LoRAs -> prove that each LoRA fits -> queue."""

from __future__ import annotations

import asyncio
from typing import Any

from inweave.errors import ConfigError, Problem, amount
from inweave.generate.config import GenerateConfig
from inweave.models.samplers import ensure_schedule
from inweave.serve.jobs.image_request import ImageRequest, png_size
from inweave.serve.jobs.job import Job, Submission
from inweave.serve.service.images import Images
from inweave.serve.service.jobs import Jobs
from inweave.serve.service.loras import Loras
from inweave.serve.service.models import Models
from inweave.serve.service.prompts import Prompts
from inweave.serve.service.sheets import SheetRequest
from inweave.serve.settings import ServeSettings

MAX_LORAS = 100


class ImageJobs:
    """Submits requests for images."""

    def __init__(
        self, settings: ServeSettings, models: Models, loras: Loras, prompts: Prompts, images: Images, jobs: Jobs
    ) -> None:
        self._settings, self._models, self._loras = settings, models, loras
        self._prompts, self._images, self._jobs = prompts, images, jobs

    async def submit(
        self, request: ImageRequest, *, client: str = "", key: str | None = None, fingerprint: str = ""
    ) -> Job:
        """Check a request whole and queue it."""
        if (known := await self._jobs.submitted(key, fingerprint)) is not None:
            return known  # whatever became of its LoRAs meanwhile
        model = self._models.name(request.model)
        config = await asyncio.to_thread(self._prompts.sources.resolve, request.settings)
        sheet = await asyncio.to_thread(self._sheet, request)
        configs = [config] if sheet is None else [config, *sheet.configs]
        for each in configs:
            self._ensure_limits(each)
        choices = (
            tuple(dict.fromkeys(choice for each in configs for choice in (*each.loras, *each.tagged_loras())))
            if sheet
            else (*config.loras, *config.tagged_loras())
        )
        if len(choices) > MAX_LORAS:
            raise ConfigError(Problem("loras", f"at most {MAX_LORAS} in one job, got {len(choices)}"))
        loras = await self._loras.find_all(choices)
        models = sheet.models if sheet is not None else []
        model = models[0] if models else model
        warnings = []
        for name in models or [model]:
            warnings += await self._loras.ensure_fit(loras.values(), name, request.on_mismatch)
        body = {
            "config": _stored(config), "loras": {label: entry.id for label, entry in loras.items()},
            "lora_files": await asyncio.to_thread(self._loras.identities, loras),
            "preview_every": request.preview_every, "preview_first": request.preview_first,
            "on_mismatch": request.on_mismatch, "gallery": request.gallery,
            "warnings": list(dict.fromkeys(warnings)),
        }  # fmt: skip
        if sheet is not None:
            body |= {"sheet": sheet.stored(_stored), "models": models}
        if names := {each.upscale.upscaler for each in configs if each.upscale is not None}:
            body["upscalers"] = await asyncio.to_thread(self._prompts.upscalers_of, names)
        if request.references and len(request.references) > (most := await self._models.references(model)):
            limit = f"reads up to {amount(most, 'reference image')}" if most else "reads no reference images"
            raise ConfigError(Problem("references", f"{model} {limit}, got {len(request.references)}"))
        if request.references and sheet is not None:
            raise ConfigError(Problem("references", "a sheet takes no reference images; send a job for each value"))
        inputs = await self._inputs(request)
        submission = Submission(request.operation, model, body, inputs, request.priority, client, key, fingerprint)
        job, _ = await self._jobs.submit(submission)
        return job

    def _ensure_limits(self, config: GenerateConfig) -> None:
        limits = self._settings
        if config.count > limits.max_images:
            raise ConfigError(Problem("count", f"at most {limits.max_images} images in one job, got {config.count}"))
        if config.sampler is not None:
            ensure_schedule(config.sampler, config.schedule)
        size = config.width or 0, config.height or 0
        if config.upscale is not None and all(size):
            size = config.upscale.size_of(size)
        if size[0] * size[1] > limits.image_pixels:
            raise ConfigError(f"width x height: at most {limits.image_pixels:,} pixels")

    def _sheet(self, request: ImageRequest) -> SheetRequest | None:
        """Return the table of a request with a grid, every cell resolved."""
        if not request.grid:
            return None
        return SheetRequest.of(request.settings, request.grid, self._prompts.sources, self._models)

    async def _inputs(self, request: ImageRequest) -> dict[str, bytes]:
        """Return the images of a request by the names of their files."""
        texts = [("init", "image", request.image), ("mask", "mask_image", request.mask_image)]
        texts += [(f"reference-{number}", "references", text) for number, text in enumerate(request.references, 1)]
        inputs = {
            f"{name}.png": await self._images.read(text, label) for name, label, text in texts if text is not None
        }
        if "mask.png" in inputs:
            (width, height), (across, down) = (png_size(inputs[name]) for name in ("init.png", "mask.png"))
            if (width, height) != (across, down):
                reason = f"{across}x{down}; it must have the size of the image, {width}x{height}"
                raise ConfigError(Problem("mask_image", reason))
        return inputs


def _stored(config: GenerateConfig) -> dict[str, Any]:
    """Return the settings to store: LoRAs by the reference the client used, never by a path of this machine."""
    fields = config.model_dump(exclude_none=True, exclude_defaults=True)
    fields["prompt"] = config.prompt
    fields["loras"] = [
        {"name": choice.label, "strength": choice.strength, "te": choice.te, "unet": choice.unet, "alpha": choice.alpha}
        for choice in config.loras
    ]
    return fields
