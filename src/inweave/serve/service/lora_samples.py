"""The sample of a LoRA, kept from two finished jobs: the same prompt and seed with the LoRA and without it."""

from __future__ import annotations

import asyncio
from typing import Any

from inweave.errors import ConfigError, ConflictError, Problem, RequestError
from inweave.serve.jobs.job import Job
from inweave.serve.sandbox.client import SandboxClient
from inweave.serve.service.jobs import Jobs
from inweave.serve.service.loras import Loras
from inweave.serve.storage.lora_samples import SIDE

#: settings in which the two images may differ
_APART = ("loras", "prompt", "count")


class Samples:
    """Samples of the LoRAs of a worker."""

    def __init__(self, loras: Loras, jobs: Jobs, sandbox: SandboxClient) -> None:
        self._loras, self._jobs, self._sandbox = loras, jobs, sandbox

    async def keep(self, reference: str, with_lora: str, without: str) -> dict[str, Any]:
        """Store the first images of two jobs as the sample of a LoRA; return how it was made.

        Raises:
            ConfigError: the jobs are not of this LoRA, or differ in more than the LoRA.
            ConflictError: one of them has not made its image.
        """
        entry = await self._loras.find(reference)
        made, plain = await self._done(with_lora, "with"), await self._done(without, "without")
        images = [_first(job) for job in (made, plain)]
        applied = made.request.get("loras", {})
        if set(applied.values()) != {entry.id}:
            raise ConfigError(Problem("with", f"job {made.id} was not made with LoRA {entry.name} alone"))
        if plain.request.get("loras"):
            raise ConfigError(Problem("without", f"job {plain.id} was made with a LoRA"))
        settings = [image["settings"] for image in images]
        prompt = _untagged(str(settings[0].get("prompt", "")))
        same = [{name: value for name, value in each.items() if name not in _APART} for each in settings]
        if same[0] != same[1] or made.model != plain.model or prompt != _untagged(str(settings[1].get("prompt", ""))):
            raise ConfigError(Problem("without", "the two jobs differ in more than the LoRA, such as seed or prompt"))
        contents = {
            name: await self._small(job, image["file"])
            for name, job, image in zip(("with", "without"), (made, plain), images, strict=True)
        }
        lora = made.result["loras"][0] if made.result and made.result.get("loras") else {}
        facts = {
            "prompt": prompt, "seed": images[0]["seed"], "model": made.model, "strength": lora.get("unet", 1.0),
            "width": images[0]["width"], "height": images[0]["height"],
        }  # fmt: skip
        return await asyncio.to_thread(self._loras.samples.put, entry, contents, facts)

    async def _done(self, job: str, field: str) -> Job:
        current = await self._jobs.present(job)
        if current.kind == "train":
            raise RequestError(Problem(field, f"job {current.id} makes no images"))
        if current.state != "done":
            raise ConflictError(f"{field}: job {current.id} is {current.state}; wait until it is done")
        return current

    async def _small(self, job: Job, name: str) -> bytes:
        path = await self._jobs.file(job.id, name)
        return await self._sandbox.thumbnail(str(path), SIDE, "the sample image")


def _first(job: Job) -> dict[str, Any]:
    images = (job.result or {}).get("images", ())
    if not images:
        raise ConflictError(f"job {job.id} has no image any more")
    image: dict[str, Any] = images[0]
    return image


def _untagged(prompt: str) -> str:
    from inweave.generate.prompt import parse

    return parse(prompt).text
