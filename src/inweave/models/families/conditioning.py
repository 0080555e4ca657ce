"""The conditioning of one image, or of several that one call of the denoiser predicts together.

    rows       of the denoiser: those of an image are neighbors, its negative prompt first where it is guided
               negative 1, positive 1 | negative 2, positive 2 | ...
    combined   positive = negative + sum of weight (prediction - negative), and `Family.guide` of both

Images are joined if they have as many rows, and texts that fit into one batch; each keeps its own guidance and weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from inweave.models.families.references import Reference, shapes

if TYPE_CHECKING:
    from torch import Tensor

#: (text, weight) in order; a piece with the text BREAK starts a new chunk
Pieces = Sequence[tuple[str, float]]


class FamilyView(Protocol):
    """The members of `inweave.models.families.base.Family` that join and combine images."""

    @property
    def masks_padding(self) -> bool: ...

    def join_text(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]: ...

    def batch_inputs(
        self, model: Any, text: dict[str, Tensor], sizes: Tensor, latents: tuple[int, ...], guidance: float
    ) -> dict[str, Tensor]: ...

    def guide(self, negative: Tensor, positive: Tensor, guidance: float) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class ConditioningRequest:
    """Both prompts of an image, how strongly to guide, and the image's size in pixels.

    ``others``: prompts that are composed with the positive one, each with its weight; ``weight`` is the first one's.
    ``references``: images that an edit model sees.
    """

    positive: Pieces
    negative: Pieces
    guidance: float
    width: int
    height: int
    clip_skip: int | None = None
    weight: float = 1.0
    others: tuple[tuple[Pieces, float], ...] = ()
    references: tuple[Reference, ...] = ()


def warnings_without_clip(request: ConditioningRequest, guided: bool) -> list[str]:
    """Return a warning for each setting that has no effect on a model without CLIP; ``guided``: by negative prompts."""
    warnings = []
    if request.clip_skip is not None:
        warnings.append("this model has no CLIP text encoder; clip_skip was ignored")
    if request.negative and not guided:
        warnings.append("a negative prompt has no effect without guidance; it was ignored")
    return warnings


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Arguments of the denoiser, and how its predictions are combined.

    ``weights``: those of several positive prompts, in order; nothing for a single one of weight 1.
    ``text``, ``sizes``: the encoded rows, and the image sizes, from which `Family.batch_inputs` made the arguments.
    ``images``: those that were joined to this one; nothing for a single image.
    """

    inputs: Mapping[str, Tensor]
    guidance: float
    guided: bool
    warnings: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    text: Mapping[str, Tensor] = field(default_factory=dict)
    sizes: Tensor | None = None
    images: tuple[Conditioning, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of the denoiser for one image."""
        return 1 + max(len(self.weights), 1) if self.guided else 1

    def layout(self, family: FamilyView) -> tuple[object, ...]:
        """Return what images must have in common to be joined."""
        if family.masks_padding:
            return self.rows, shapes(self.text)
        return (self.rows, *sorted((name, tuple(value.shape[1:])) for name, value in self.text.items()))

    def expand(self, latents: Tensor) -> Tensor:
        """Return latents of the images as rows of the denoiser."""
        return latents if self.rows == 1 else latents.repeat_interleave(self.rows, 0)

    def combine(self, family: FamilyView, predictions: Tensor) -> Tensor:
        """Return one prediction per image from those of its rows."""
        if not self.guided:
            return predictions
        images = self.images or (self,)
        rows = predictions.reshape(len(images), self.rows, *predictions.shape[1:])
        if len({(each.guidance, each.weights) for each in images}) == 1:
            return _guided(family, rows, images[0])
        import torch

        return torch.cat([_guided(family, rows[number : number + 1], each) for number, each in enumerate(images)])


def _guided(family: FamilyView, rows: Tensor, settings: Conditioning) -> Tensor:
    """Return the guided predictions of rows (images, rows of an image, ...) with the same settings."""
    negative, positive = rows[:, 0], rows[:, 1]
    if settings.weights:
        positives = zip(settings.weights, rows[:, 1:].unbind(1), strict=True)
        positive = negative + sum(weight * (each - negative) for weight, each in positives)
    return family.guide(negative, positive, settings.guidance)


def join(family: FamilyView, model: Any, images: Sequence[Conditioning], latents: tuple[int, ...]) -> Conditioning:
    """Return the conditioning of several images of one size and one `layout`; ``latents``: the shape of one's."""
    import torch

    first = images[0]
    assert first.sizes is not None, "the conditioning was made by `Family.condition`"
    text = family.join_text([dict(each.text) for each in images])
    sizes = torch.cat([each.sizes for each in images if each.sizes is not None])
    inputs = family.batch_inputs(model, text, sizes, latents, first.guidance)
    if "guidance" in inputs:  # of a denoiser that takes it as an input, where images differ in it
        inputs["guidance"] = torch.cat([each.inputs["guidance"] for each in images])
    return Conditioning(inputs, first.guidance, first.guided, weights=first.weights, images=tuple(images))
