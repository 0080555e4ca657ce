"""Images that requests bring: checked and encoded anew in a confined process before anything else sees them."""

from __future__ import annotations

import asyncio
from typing import Any

from inweave.serve.jobs.image_request import decode_base64
from inweave.serve.sandbox.client import SandboxClient
from inweave.serve.settings import ServeSettings
from inweave.serve.storage.uploads import PREFIX, Upload, UploadStore


class Images:
    """Images in base64, images of uploads, and the settings that are stored in images."""

    def __init__(self, settings: ServeSettings, uploads: UploadStore, sandbox: SandboxClient) -> None:
        self._bytes, self._pixels = settings.body_bytes, settings.image_pixels
        self._uploads, self._sandbox = uploads, sandbox

    async def read(self, text: str, label: str) -> bytes:
        """Return an image of a request, in base64 or by the id of an upload, as a clean PNG."""
        if text.startswith(PREFIX):
            return await self.uploaded(text)
        return await self.clean(decode_base64(text, label, self._bytes), label)

    async def clean(self, content: bytes, label: str) -> bytes:
        """Return an image as a clean PNG; raise RequestError if it cannot be read."""
        return await self._sandbox.image(content, label, self._pixels)

    async def texts(self, text: str, label: str) -> dict[str, str]:
        """Return the texts in an image in base64."""
        return await self._sandbox.record(decode_base64(text, label, self._bytes))

    async def settings(self, content: bytes) -> dict[str, Any]:
        """Return the settings that an image was made with; raise RequestError if it does not hold them."""
        return await self._sandbox.settings(content)

    async def upload(self, content: bytes) -> Upload:
        """Keep an image for later jobs."""
        return await asyncio.to_thread(self._uploads.add, await self.clean(content, "image"))

    async def find_upload(self, upload: str) -> Upload:
        """Return an upload; raise MissingError if it never existed, GoneError if it has expired."""
        return await asyncio.to_thread(self._uploads.find, upload)

    async def uploaded(self, upload: str) -> bytes:
        """Return the image of an upload, as PNG."""
        return await asyncio.to_thread(self._uploads.read, upload)

    async def delete_upload(self, upload: str) -> None:
        """Remove an upload."""
        await asyncio.to_thread(self._uploads.remove, upload)
