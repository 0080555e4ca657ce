"""The input images of a request, and the size it is worked on at."""

from __future__ import annotations

import os
from collections.abc import Sequence

from PIL import Image

from inweave.errors import Problem, RequestError, amount
from inweave.generate.canvas import extended
from inweave.generate.config import GenerateConfig
from inweave.generate.enlarge import MAX_SIDE
from inweave.generate.images import ImageInput, open_image, open_mask, working_size
from inweave.models.model import Model


def open_inputs(
    config: GenerateConfig, init: ImageInput | None, mask: ImageInput | None, wrong: list[str | Problem]
) -> tuple[Image.Image | None, Image.Image | None]:
    """Return the image to start from and its mask, extended where the request asks for it.

    ``init`` and ``mask`` come before those of the configuration; problems are added to ``wrong``.
    """
    init = config.init if init is None else init
    mask = config.mask if mask is None else mask
    if init is None:
        if mask is not None:
            wrong.append(Problem("mask", "there is no image to repaint; give one as init"))
        if config.outpaint is not None:
            wrong.append(Problem("outpaint", "there is no image to extend; give one as init"))
        return None, None
    try:
        image = open_image(init, "init")
        region = open_mask(mask, image.size) if mask is not None else None
    except RequestError as error:
        wrong.append(str(error))
        return None, None
    if config.outpaint is None:
        return image, region
    width, height = config.outpaint.size_of(image.size)
    if max(width, height) > MAX_SIDE:
        reason = f"the canvas would have {width}x{height} pixels; at most {MAX_SIDE} are possible on a side"
        wrong.append(Problem("outpaint", reason))
        return image, region
    return extended(image, region, config.outpaint)


def open_references(
    model: Model, config: GenerateConfig, references: Sequence[ImageInput] | None, wrong: list[str | Problem]
) -> tuple[Image.Image, ...]:
    """Return the reference images of a request; problems are appended to ``wrong``."""
    chosen = config.references if references is None else references
    if isinstance(chosen, str | os.PathLike | Image.Image):
        chosen = [chosen]
    images = list[Image.Image]()
    for number, source in enumerate(chosen, 1):
        try:
            images.append(open_image(source, f"reference {number}"))
        except RequestError as error:
            wrong.append(str(error))
    problems = reference_problems(model, images) if len(images) == len(chosen) else []
    wrong += problems
    return () if problems else tuple(images)


def size_for(
    model: Model,
    config: GenerateConfig,
    image: Image.Image | None,
    references: Sequence[Image.Image],
    wrong: list[str | Problem],
) -> tuple[int, int]:
    """Return the size to work on; problems are added to ``wrong``."""
    native, patch = model.size, model.patch
    width, height = (native, native) if image is None else working_size(image.size, native, patch)
    if image is None and references:
        width, height = model.family.edit_size(model, [each.size for each in references])
    width, height = config.width or width, config.height or height
    for name, side in (("width", width), ("height", height)):
        if not patch <= side <= MAX_SIDE:
            wrong.append(Problem(name, f"{side} is out of range; use {patch} to {MAX_SIDE}"))
        elif side % patch:
            wrong.append(Problem(name, f"{side} is not a multiple of {patch}, which this model needs"))
    return width, height


def reference_problems(model: Model, images: Sequence[Image.Image]) -> list[Problem]:
    """Return why a model cannot be given these reference images."""
    family, most = model.family, model.family.most_references(model.blueprint)
    name = model.blueprint.variant.name if model.blueprint.variant else family.name
    if images and not most:
        return [Problem("references", f"{name} is not an edit model and reads no reference images; leave them out")]
    if len(images) > most:
        return [Problem("references", f"{name} reads up to {amount(most, 'reference image')}, got {len(images)}")]
    if family.needs_reference and not images:
        return [Problem("references", f"{name} edits images; give it one reference or more, at most {most}")]
    problems = [(number, family.reference_problem(image.size)) for number, image in enumerate(images, 1)]
    return [Problem("references", f"image {number}: {text}") for number, text in problems if text]
