"""The result of a request: images, the settings that reproduce each of them, and warnings."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from PIL import Image
from torch import Tensor

from inweave.errors import ConfigError, RequestError
from inweave.files.image_names import format_of
from inweave.generate.applied import AppliedLora
from inweave.generate.saving import save_image


@dataclass(slots=True)
class Result:
    """The images of one request.

    Attributes:
        images: the images, in the order of their seeds.
        records: for each image the settings that reproduce it.
        loras: each LoRA with its file, its strengths and the number of modules it changed.
        warnings: settings that had no effect, and other remarks.
        swap_seconds: the time to merge all LoRAs into the weights.
        batches: for each image how many were made together, of all requests.
        error: why its images could not all be made, if it was one request of several.
        added: the names of the LoRAs that were added to the rows of a batch with other LoRAs; the others were merged.
        merge_reason: why its LoRAs were merged and its images made without those of requests with other LoRAs.
        latents: of its images, for a second pass in latent space.
    """

    images: list[Image.Image]
    records: list[dict[str, Any]]
    loras: list[AppliedLora]
    warnings: list[str] = field(default_factory=list)
    swap_seconds: float = 0.0
    batches: list[int] = field(default_factory=list)
    error: RequestError | None = None
    added: list[str] = field(default_factory=list)
    merge_reason: str = ""
    latents: list[Tensor] = field(default_factory=list, repr=False)

    def save(self, path: str | os.PathLike[str], number: int = 0) -> None:
        """Write one image with its settings in it.

        Args:
            path: the file to write, .png, .jpg or .webp.
            number: which image, counted from 0.

        Raises:
            ConfigError: the name has another ending, or there is no such image.
            RequestError: its images could not all be made (`error`).
        """
        format_of(path)
        if self.error is not None and number >= len(self.images):
            raise self.error
        if not 0 <= number < len(self.images):
            raise ConfigError(f"there is no image {number}; this result has {len(self.images)}, counted from 0")
        save_image(path, self.images[number], self.records[number])

    def _repr_png_(self) -> bytes:
        """Return the images side by side, as a notebook shows them."""
        return _png(self.images[0] if len(self.images) == 1 else side_by_side(self.images))

    def _repr_html_(self) -> str:
        """Return the images with their seeds and prompts, as a notebook shows them."""
        figures = []
        for image, record in zip(self.images, self.records, strict=True):
            caption = " - ".join(str(record[key]) for key in ("seed", "prompt") if record.get(key) not in (None, ""))
            source = f"data:image/png;base64,{base64.b64encode(_png(image)).decode()}"
            figures.append(
                f'<figure style="display:inline-block;margin:4px"><img src="{source}" width="{image.width}" '
                f'height="{image.height}" alt="{escape(caption)}"><figcaption>{escape(caption)}</figcaption></figure>'
            )
        return "".join([*figures, *(f"<p>{escape(warning)}</p>" for warning in self.warnings)])


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def side_by_side(images: Sequence[Image.Image]) -> Image.Image:
    """Return images in a row on white."""
    row = Image.new("RGB", (sum(image.width for image in images), max(image.height for image in images)), "white")
    left = 0
    for image in images:
        row.paste(image, (left, 0))
        left += image.width
    return row
