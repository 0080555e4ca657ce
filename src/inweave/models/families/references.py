"""Reference images of an edit model, in order: the denoiser reads their latents besides those of its own image.

    image ──`Family.reference_fit`──► resized, cut ──VAE──► its most likely latents ──► text["reference.<number>"]

References have sizes of their own, which follow from the image and an area in pixels: that of the model when images
are generated, and that of the run's resolution in training. They are tensors among those of the text, so
that they reach `Family.batch_inputs`, batches and caches on the same way; their numbers begin at 0.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Size = tuple[int, int]  # width, height
REFERENCE = "reference."
MOST_REFERENCES = 4  # of any model


@dataclass(frozen=True, slots=True)
class ReferenceFit:
    """How an image becomes a reference: it is resized, and ``size`` is cut from its center."""

    resized: Size
    size: Size

    @property
    def crop(self) -> tuple[int, int, int, int]:
        """Left, top, width and height of what is cut."""
        (across, down), (width, height) = self.resized, self.size
        return (across - width) // 2, (down - height) // 2, width, height


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference image: its latents (1, channels, height, width), and the image for a text encoder that sees it."""

    latents: Tensor
    image: Any  # PIL's


def reference_tensors(references: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the latents of references as tensors of a text."""
    return {f"{REFERENCE}{number}": latents for number, latents in enumerate(references)}


def pop_references(text: MutableMapping[str, Tensor]) -> list[Tensor]:
    """Remove the latents of references from the tensors of a text and return them in order."""
    names = sorted((name for name in text if name.startswith(REFERENCE)), key=lambda name: int(name[len(REFERENCE) :]))
    return [text.pop(name) for name in names]


def shapes(text: Mapping[str, Tensor]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the shapes of the references among the tensors of a text."""
    return tuple(sorted((name, tuple(value.shape[1:])) for name, value in text.items() if name.startswith(REFERENCE)))


def of_area(size: Size, area: int, step: int) -> Size:
    """Return the size of this shape and about this area whose sides are the closest multiples of ``step``."""
    ratio = size[0] / size[1]
    width = sqrt(area * ratio)
    width, height = (max(round(side / step), 1) * step for side in (width, width / ratio))
    return width, height
