"""A request that was checked, and what becomes of its images: tasks of the denoising loop, records, finished images."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import Tensor

from inweave.generate.applied import AppliedLora
from inweave.generate.conditioning import PromptConditioning
from inweave.generate.config import GenerateConfig
from inweave.generate.denoise import ImageTask
from inweave.generate.images import mask_tensor, paste, to_tensor
from inweave.models.model import Model


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that was checked and has a value for every setting."""

    config: GenerateConfig
    loras: list[AppliedLora]
    init: Image.Image | None
    mask: Image.Image | None
    size: tuple[int, int]
    warnings: tuple[str, ...] = ()
    references: tuple[Image.Image, ...] = ()
    start: Tensor | None = None  # see `ImageTask`
    noise: Tensor | None = None
    keeps_latents: bool = False  # whether the result has the latents of its images
    parts: tuple[PreparedRequest, ...] = ()  # one for each image, where random choices made their prompts different

    is_first_pass: bool = False  # of a request with `upscale`

    @property
    def has_passes(self) -> bool:
        """Whether one pass does not make its images: `Pipeline.run_all` has to."""
        return bool(self.parts) or (self.config.upscale is not None and not self.is_first_pass)

    @property
    def units(self) -> tuple[PreparedRequest, ...]:
        """The request as one for each prompt."""
        return self.parts or (self,)

    @property
    def feather(self) -> int:
        """The number of pixels over which new fades into old."""
        sides = self.config.outpaint
        return self.config.feather if sides is None else max(self.config.feather, 3 * sides.blend // 4)

    @property
    def keeps_init(self) -> bool:
        """Whether there is no first pass, since the image to start from is only to be enlarged."""
        return self.config.upscale is not None and self.init is not None and self.config.strength == 0

    @property
    def shared(self) -> tuple[object, ...]:
        """What requests have in common whose images may share a batch; see `ImageTask.shared`."""
        config, has_image = self.config, self.init is not None or self.start is not None
        inputs = has_image, self.start is not None, self.mask is not None, has_image and config.strength
        return config.sampler, config.schedule, config.steps, self.size, inputs


def tasks_of(request: PreparedRequest, conditioning: PromptConditioning) -> list[ImageTask]:
    """Return the images of a request; they share its input images."""
    assert not request.has_passes, "its images are made by Pipeline.run_all"
    config = request.config
    assert config.seed is not None and config.steps is not None and config.sampler is not None
    init = to_tensor(request.init, request.size) if request.init is not None else None
    mask = mask_tensor(request.mask, request.size) if request.mask is not None else None
    loras = tuple(f"{lora.name}:{lora.te:g}:{lora.unet:g}" for lora in request.loras)
    return [
        ImageTask(
            conditioning, config.sampler, config.schedule, config.steps, config.seed + number, *request.size, init,
            mask, config.strength, loras, request.start, request.noise,
        )
        for number in range(config.count)
    ]  # fmt: skip


def record_of(model: Model, model_hash: str | None, request: PreparedRequest, seed: int) -> dict[str, Any]:
    """Return the settings that reproduce one image of a request."""
    config = request.config.model_copy(update={"seed": seed, "count": 1}, check=False).model_dump(exclude_none=True)
    config = {name: value for name, value in config.items() if value != () or name == "loras"}
    config["loras"] = [
        {"name": lora.name, "te": lora.te, "unet": lora.unet} | ({} if lora.alpha is None else {"alpha": lora.alpha})
        for lora in request.loras
        if not lora.in_prompt
    ]
    config.pop("references", None)  # paths; `inputs` has their hashes
    images = [("init", request.init), ("mask", request.mask)]
    images += [(f"reference {number}", image) for number, image in enumerate(request.references, 1)]
    variant = model.blueprint.variant
    return {
        "config": config,
        "model": {
            "name": model.name,
            "variant": variant.name if variant else None,
            "family": model.family.name,
            "autov1": model_hash,
            **({"quantize": model.quantized} if model.quantized != "off" else {}),
        },
        "loras": [lora.as_dict() for lora in request.loras],
        "inputs": {name: hashlib.sha256(image.tobytes()).hexdigest() for name, image in images if image is not None},
    }


def finished(image: Image.Image, request: PreparedRequest) -> Image.Image:
    """Return the image at the size of its initial image, with everything outside the mask put back."""
    if request.init is None:
        return image
    if image.size != request.init.size:
        image = image.resize(request.init.size, Image.Resampling.LANCZOS)
    if request.mask is not None and request.config.keep_unmasked:
        return paste(image, request.init, request.mask, request.feather)
    return image
