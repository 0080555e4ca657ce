"""The proof of a derivation: its call is the pipeline's own, bit for bit, on other texts and another size."""

from __future__ import annotations

from typing import Any

import torch

from inweave.errors import FormatError
from inweave.models.derived.arguments import ROUNDING, leaves, same
from inweave.models.derived.call import Derivation, joined, size_values, text_values
from inweave.models.derived.layout import Layout
from inweave.models.derived.recording import Recording, Shapes, record
from inweave.models.vae import LatentSpace

TEXTS = ("a cat", "two red apples on an old wooden table, oil on canvas", "a dog in the snow", "rain")


Size = tuple[int, int]  # width and height in pixels
#: requests after which a pipeline that chooses its size by itself has to repeat it
_REQUESTS = 8


def probe_sizes(scale: int) -> tuple[Size, Size, Size]:
    """Return the sizes that are compared, of different areas; texts are recorded at the first."""
    unit = unit_size(scale)
    return (2 * unit, unit), (unit, unit * 3), (unit * 2, unit * 2)


def made_size(recording: Recording, space: LatentSpace) -> Size:
    """Return the size of the image that a recorded run made."""
    assert recording.decoded is not None
    height, width = (side * space.scale // space.patch for side in recording.decoded.shape[-2:])
    return width, height


def settled_size(pipe: Any, shapes: Shapes, size: Size, strength: float, space: LatentSpace) -> Size:
    """Return a size near ``size`` that a pipeline which chooses sizes makes where it is asked for it.

    Raises:
        FormatError: it makes another size whatever it is asked for.
    """
    for _ in range(_REQUESTS):
        made = made_size(record(pipe, shapes, TEXTS[:1], size, strength), space)
        if made == size:
            return size
        before, size = size, made
    raise FormatError(f"it chooses its size by itself: {size[0]}x{size[1]} where {before[0]}x{before[1]} are asked for")


def unit_size(scale: int) -> int:
    """Return a side in pixels with the largest patches, which most pipelines take."""
    return max(8 * scale, 32)


def prove(
    derivation: Derivation,
    pipe: Any,
    shapes: Shapes,
    sizes: tuple[Size, Size],
    space: LatentSpace,
    sample: Layout,
) -> None:
    """Compare the derived call with the pipeline's for other texts, another size, and both texts at once.

    ``sizes``: that at which texts are recorded, and the other one.
    """
    reference, size = sizes
    c, h, w = space.shape(*size)[1:]
    for texts in (TEXTS[2:3], TEXTS[3:4], TEXTS[2:4]):
        if len(texts) > 1 and any(each.rows == "alike" for each in derivation.arguments.values()):
            texts = texts[:1] * 2
        whole = record(pipe, shapes, texts, size, derivation.strength)
        singles = [record(pipe, shapes, [text], reference, derivation.strength, calls=1) for text in texts]
        # arguments of another text at this size, and of these texts at another size
        sized = size_values(derivation, record(pipe, shapes, TEXTS[:1], size, derivation.strength, calls=1))
        values = joined(derivation, [text_values(derivation, each) for each in singles], derivation.strength)
        for call, answer, step in zip(whole.calls, whole.answers, whole.steps, strict=True):
            received: dict[str, Any] = {}

            def denoiser(answer: Any = answer, received: dict[str, Any] = received, **arguments: Any) -> Any:
                received.update(leaves(arguments, derivation.template))
                return answer

            own = leaves(call, derivation.template)
            x = own[derivation.latents]
            latents = derivation.layout.unpack(torch.stack(x) if derivation.listed else x, (c, h, w))
            prediction = derivation.call(denoiser, latents, torch.as_tensor(step.t), values, sized)
            if received.keys() != own.keys():
                raise FormatError(f"the arguments are {sorted(own)}; derived were {sorted(received)}")
            for name, value in own.items():
                text = name in derivation.arguments and derivation.arguments[name].kind == "text"
                if not same(received[name], value, ROUNDING if text and len(texts) > 1 else 0.0):
                    raise FormatError(f"the derived argument {name} is not the pipeline's for {texts} at {size}")
            if not torch.equal(prediction, sample.unpack(step.prediction, (c, h, w))):
                raise FormatError(f"the derived prediction is not the pipeline's for {texts} at {size}")
