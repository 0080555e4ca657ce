"""What a request gives: images, the settings that reproduce each of them, and what was noticed on the way."""

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
    """The images of one request; ``records`` hold for each one the settings that reproduce it.

    ``loras``: what each LoRA changed; ``warnings``: settings that had no effect.
    """

    images: list[Image.Image]
    records: list[dict[str, Any]]
    loras: list[AppliedLora]
    warnings: list[str] = field(default_factory=list)
    swap_seconds: float = 0.0  # to make the weights those of all the LoRAs together

    def save(self, path: str | os.PathLike[str], number: int = 0) -> None:
        """One image with its settings in it, as .png, .jpg or .webp; a name of another format is a `ConfigError`."""
        format_of(path)
        if not 0 <= number < len(self.images):
            raise ConfigError(f"there is no image {number}; this result has {len(self.images)}, counted from 0")
        save_image(path, self.images[number], self.records[number])
