"""The result of a request: images, the settings that reproduce each of them, and warnings."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from inweave.errors import ConfigError
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
    """

    images: list[Image.Image]
    records: list[dict[str, Any]]
    loras: list[AppliedLora]
    warnings: list[str] = field(default_factory=list)
    swap_seconds: float = 0.0

    def save(self, path: str | os.PathLike[str], number: int = 0) -> None:
        """Write one image with its settings in it.

        Args:
            path: the file to write, .png, .jpg or .webp.
            number: which image, counted from 0.

        Raises:
            ConfigError: the name has another ending, or there is no such image.
        """
        format_of(path)
        if not 0 <= number < len(self.images):
            raise ConfigError(f"there is no image {number}; this result has {len(self.images)}, counted from 0")
        save_image(path, self.images[number], self.records[number])
