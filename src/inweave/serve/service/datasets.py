"""Datasets that training jobs use."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, ConflictError, RequestError
from inweave.files.writing import write_atomic
from inweave.serve.jobs.errors import StorageError
from inweave.serve.jobs.store import JobStore
from inweave.serve.planner.captions import CaptionClient
from inweave.serve.sandbox.client import SandboxClient
from inweave.serve.service.images import Images
from inweave.serve.storage.datasets import MAX_CAPTION, MAX_DATASETS, MAX_IMAGES, THUMBNAIL, DatasetStore

__all__ = ["MAX_CAPTION", "MAX_DATASETS", "MAX_IMAGES", "Datasets"]


class Datasets:
    """The datasets of a worker: images and captions."""

    def __init__(
        self, store: DatasetStore, images: Images, sandbox: SandboxClient, jobs: JobStore,
        captioner: CaptionClient | None = None,
    ) -> None:  # fmt: skip
        self._store, self._images, self._sandbox, self._jobs = store, images, sandbox, jobs
        self._captioner = captioner

    @property
    def captions(self) -> bool:
        """Whether this worker has a model that captions images."""
        return self._captioner is not None

    async def create(self, name: str) -> dict[str, Any]:
        """Make an empty dataset and describe it."""
        return await asyncio.to_thread(self._store.create, name)

    async def rename(self, dataset: str, name: str) -> dict[str, Any]:
        """Change the name that people see, and describe the dataset."""
        return await asyncio.to_thread(self._store.rename, dataset, name)

    async def summaries(self) -> list[dict[str, Any]]:
        """Return one row per dataset."""
        return await asyncio.to_thread(self._store.summaries)

    async def describe(self, dataset: str) -> dict[str, Any]:
        """Return the name, the images and the captions of a dataset."""
        return await asyncio.to_thread(self._store.describe, dataset)

    async def folder(self, dataset: str) -> Path:
        """Return the folder of a dataset; raise MissingError if there is none."""
        return await asyncio.to_thread(self._store.folder, dataset)

    async def delete(self, dataset: str) -> None:
        """Remove a dataset; raise ConflictError if a job that has not ended needs it."""
        await asyncio.to_thread(self._ensure_unused, dataset)
        await asyncio.to_thread(self._store.delete, dataset)

    def _ensure_unused(self, dataset: str) -> None:
        for job in self._jobs.jobs(states=("queued", "running"), limit=100_000):
            if job.kind == "train" and job.request.get("dataset") == dataset:
                raise ConflictError(f"job {job.id} trains on this dataset; cancel it first, or wait until it has ended")

    async def put_image(self, dataset: str, name: str, content: bytes) -> str:
        """Check and store an image; return the name it is stored under."""
        await self.folder(dataset)
        clean = await self._images.clean(content, f"image {name[:100]}")
        return await asyncio.to_thread(self._store.put_image, dataset, name, clean)

    async def image(self, dataset: str, name: str) -> Path:
        """Return the path of an image, a PNG."""
        return await asyncio.to_thread(self._store.image, dataset, name)

    async def thumbnail(self, dataset: str, name: str) -> Path | None:
        """Return the path of a small copy of an image, a WebP; None if the image itself is small."""
        image, small = await asyncio.to_thread(self._store.thumbnail, dataset, name)
        if small is not None and not small.is_file():
            content = await self._sandbox.thumbnail(str(image), THUMBNAIL, f"image {name[:100]}")
            await asyncio.to_thread(_write, small, content)
        return small

    async def delete_image(self, dataset: str, name: str) -> None:
        """Remove an image and its caption."""
        await asyncio.to_thread(self._store.delete_image, dataset, name)

    async def put_caption(self, dataset: str, name: str, caption: str) -> str:
        """Store the caption of an image; return the name of its file."""
        return await asyncio.to_thread(self._store.put_caption, dataset, name, caption)

    async def put_captions(self, dataset: str, captions: Mapping[str, str]) -> dict[str, str]:
        """Store several captions, or none; return those they replace."""
        return await asyncio.to_thread(self._store.put_captions, dataset, captions)

    async def suggest_caption(self, dataset: str, name: str, instruction: str = "") -> str:
        """Return a caption of an image by the model of `--captioner`; it is not stored."""
        if self._captioner is None:
            raise RequestError("this worker has no captioner; start it with --captioner FOLDER, a local model")
        return await self._captioner.caption(await self.image(dataset, name), instruction)

    async def close(self) -> None:
        """End the process that captions."""
        if self._captioner is not None:
            await self._captioner.close()

    async def has_images(self, dataset: str) -> bool:
        """Return whether a dataset holds an image."""
        folder = await self.folder(dataset)
        return await asyncio.to_thread(lambda: any(folder.glob("*.png")))

    async def ensure_captions(self, dataset: str, caption: object) -> None:
        """Raise ConfigError if no run could train on a dataset; ``caption``: one for all of its images, if any."""
        await asyncio.to_thread(_ensure_captions, await self.folder(dataset), dataset, caption)


def _ensure_captions(folder: Path, dataset: str, caption: object) -> None:
    images = sorted(folder.glob("*.png"))
    if not images:
        raise ConfigError(f"dataset {dataset}: it has no images; put some into it first")
    if not caption and not any(path.with_suffix(".txt").is_file() for path in images):
        advice = "write some, or set `caption`, one for all images"
        raise ConfigError(f"dataset {dataset}: none of its {len(images)} images has a caption; {advice}")


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, [content], error=StorageError)
