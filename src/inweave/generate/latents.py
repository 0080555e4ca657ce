"""Images to latents and back during a request: input images, masks, decoding, and the check for finite numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from PIL import Image
from torch import Tensor

from inweave.errors import FormatError, RequestError
from inweave.generate.conditioning import network_errors
from inweave.generate.images import to_image
from inweave.models import vae
from inweave.models.model import Model


def encode(model: Model, image: Tensor) -> Tensor:
    """Return the most likely latents of an image."""
    with network_errors(model), model.using("vae"):
        return vae.encode(model.vae, image, None).to(model.dtype)


def encode_each(model: Model, images: Sequence[Tensor], generators: Sequence[torch.Generator]) -> Tensor:
    """Return latents that are sampled for each image with its generator; an image that occurs often is encoded once."""
    rows: dict[int, Tensor] = {}
    with network_errors(model), model.using("vae"):
        for image in images:
            same = [number for number, other in enumerate(images) if other is image]
            if same[0] not in rows:
                latents = vae.encode_samples(model.vae, image, [generators[number] for number in same])
                rows |= zip(same, latents.to(model.dtype).chunk(len(same)), strict=True)
    return torch.cat([rows[number] for number in range(len(images))])


def decode(
    model: Model,
    latents: Tensor,
    warn: Callable[[str], object] | None,
    loras: tuple[str, ...] = (),
    *,
    preview: bool = False,
) -> Image.Image:
    """Return the image of latents; unless it is a preview, raise RequestError if its values are not finite."""
    with network_errors(model), model.using("vae"):
        values = vae.decode(model.vae, latents, warn)
        if preview and values.shape[1] == 4:
            values = values[:, :3]  # without its alpha
        if values.shape[1] != 3:
            raise FormatError(f"{model.name}: the autoencoder gives {values.shape[1]} channels; an image has 3")
    if not preview:
        ensure_finite(model, values, "the autoencoder", loras)
    return to_image(values)


def mask_channels(
    model: Model,
    inits: Sequence[Tensor | None],
    masks: Sequence[Tensor | None],
    size: tuple[int, int],
    generators: Sequence[torch.Generator],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the extra channels of a 9-channel model, and the mask to put the known part back with.

    The arguments have one entry per image; ``size``: width and height in pixels.
    """
    width, height = size
    pairs = [(init, mask) for init, mask in zip(inits, masks, strict=True) if init is not None and mask is not None]
    if not pairs:
        if model.inpaints:  # nothing is known: the whole image is to be painted
            blank = encode_each(model, [torch.zeros(1, 3, height, width)] * len(generators), generators)
            return torch.cat([torch.ones_like(blank[:, :1]), blank], 1), None
        return None, None
    scale = model.latent_scale
    small = torch.cat(
        [torch.nn.functional.interpolate(mask, size=(height // scale, width // scale)) for _, mask in pairs]
    )
    small = small.to(model.device, model.dtype)
    if not model.inpaints:
        return None, small
    known: dict[tuple[int, int], Tensor] = {}
    for init, mask in pairs:
        known.setdefault((id(init), id(mask)), init * (mask < 0.5))
    masked = encode_each(model, [known[id(init), id(mask)] for init, mask in pairs], generators)
    return torch.cat([small, masked], 1), None


def ensure_finite(model: Model, values: Tensor, source: str, loras: tuple[str, ...]) -> None:
    """Raise RequestError instead of making a black image, and name the weight that is the most likely cause."""
    if bool(torch.isfinite(values).all()):
        return
    stack = f" with the LoRAs {', '.join(loras)}" if loras else ""
    dtype = str(values.dtype).removeprefix("torch.")
    raise RequestError(
        f"{source} gave numbers that are not finite in {dtype}{stack}, so there is no image; {_largest_weight(model)}. "
        "Use lower strengths and guidance, or a dtype with a wider range (bf16, fp32)"
    )


def _largest_weight(model: Model) -> str:
    largest, place = 0.0, ""
    for folder, network in model.networks.items():
        for name, weight in network.named_parameters():
            size = float(weight.detach().abs().amax()) if weight.numel() else 0.0
            if not size <= largest:  # NaN too
                largest, place = size, f"{folder}: {name}"
            if not math.isfinite(size):
                break
    return f"the largest number in its weights is {largest:g}, in {place}"
