"""The second pass of a request with `upscale` (hires fix): enlarge each image, then paint it again at that size.

    pixels    image ──lanczos or a network──► target size ──encode──► latents
    latents   latents of the first pass ──interpolate──► target size
    paint     image to image with the request's prompts, LoRAs, guidance and seed, at the strength of the pass

A target larger than a tile is painted in overlapping tiles, each an image to image of its own, so that memory follows a
tile. All tiles cut their noise from one large noise, so that they agree where they overlap; there each fades into the
next:

    image = sum w_i * tile_i / sum w_i      w: product of ramps over the overlaps of both axes, 1 at the image's border
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional

from inweave.errors import CancelledError, ConfigError, Problem
from inweave.generate.enlarge import LATENT_MODES, UpscalePass
from inweave.generate.images import to_image, to_tensor
from inweave.generate.prepared import PreparedRequest
from inweave.generate.upscaler_files import UpscalerFinder
from inweave.models.model import Model

_FILTERS = {
    "lanczos": Image.Resampling.LANCZOS, "bicubic": Image.Resampling.BICUBIC, "nearest": Image.Resampling.NEAREST,
}  # fmt: skip
_OVERLAP = 4  # the share of a tile that the next one repeats


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of an image of ``size``, at most ``side`` pixels each way, at multiples of ``patch``."""

    size: tuple[int, int]
    side: int
    patch: int

    @staticmethod
    def starts(length: int, side: int, patch: int) -> list[int]:
        """Return where tiles begin along an axis, evenly spaced."""
        if length <= side:
            return [0]
        count = -(-(length - side) // (side - side // _OVERLAP)) + 1
        return [round((length - side) * number / (count - 1) / patch) * patch for number in range(count)]

    @property
    def boxes(self) -> list[tuple[int, int, int, int]]:
        """The tiles as (left, top, right, bottom)."""
        width, height = self.size
        wide, high = min(self.side, width), min(self.side, height)
        across, down = self.starts(width, self.side, self.patch), self.starts(height, self.side, self.patch)
        return [(left, top, left + wide, top + high) for top, left in product(down, across)]

    def join(self, images: Sequence[Image.Image]) -> Image.Image:
        """Return the image of its tiles, each faded into the next."""
        if len(images) == 1:
            return images[0]
        width, height = self.size
        total, weights = np.zeros((height, width, 3), np.float32), np.zeros((height, width, 1), np.float32)
        for image, (left, top, right, bottom) in zip(images, self.boxes, strict=True):
            share = np.outer(self._ramp(top, bottom, height), self._ramp(left, right, width))[..., None]
            total[top:bottom, left:right] += np.asarray(image, np.float32) * share
            weights[top:bottom, left:right] += share
        return Image.fromarray((total / weights).round().astype(np.uint8))

    def _ramp(self, start: int, end: int, length: int) -> np.ndarray:
        overlap = max(self.side // _OVERLAP, 1)
        steps = (np.arange(end - start, dtype=np.float32) + 1) / (overlap + 1)
        rising = np.minimum(steps, 1.0) if start > 0 else np.ones_like(steps)
        falling = np.minimum(steps[::-1], 1.0) if end < length else np.ones_like(steps)
        return rising * falling


@dataclass(frozen=True)
class SecondPass:
    """The second pass of one image: ``image`` of the first, and its ``latents`` where those are enlarged."""

    model: Model
    request: PreparedRequest
    settings: UpscalePass
    upscalers: UpscalerFinder
    image: Image.Image
    seed: int
    latents: Tensor | None = None
    cancelled: Callable[[], bool] | None = None

    @cached_property
    def tiles(self) -> Tiles:
        """The tiles of the result."""
        size = self.settings.size_of(self.image.size, self.patch)
        return Tiles(size, self.settings.tile or max(size), self.patch)

    @property
    def patch(self) -> int:
        """The number of pixels that sides of the result are a multiple of."""
        return 1 if self.only_enlarges else self.model.patch

    @property
    def only_enlarges(self) -> bool:
        """Whether the model has no part in it."""
        return not self.settings.strength and not self.settings.is_latent

    def enlarged(self) -> Image.Image:
        """Return the image at the size of the result."""
        network = self.upscalers.open(self.settings.upscaler, self.model.device)
        image, target = self.image, self.tiles.size
        if network is not None:
            values = to_tensor(image, image.size) / 2 + 0.5
            while values.shape[-1] < target[0] or values.shape[-2] < target[1]:
                values = network(values, step=self._step)
                if network.scale == 1:
                    break
            image = to_image(values * 2 - 1)
        return ImageOps.fit(image, target, _FILTERS.get(self.settings.upscaler, Image.Resampling.LANCZOS))

    def _step(self, done: int, tiles: int) -> None:
        if self.cancelled is not None and self.cancelled():
            raise CancelledError(f"cancelled while the image was enlarged, after {done} of {tiles} tiles")

    def requests(self) -> list[PreparedRequest]:
        """Return the requests of its tiles."""
        settings, config = self.settings, self.request.config
        scale, space = self.model.latent_scale, self.model.latent_space
        start = self._enlarged_latents() if settings.is_latent else None
        image = None if settings.is_latent else self.enlarged()
        noise = None
        if len(self.tiles.boxes) > 1:
            noise = torch.randn(space.shape(*self.tiles.size), generator=torch.Generator("cpu").manual_seed(self.seed))
        made = []
        for number, (left, top, right, bottom) in enumerate(self.tiles.boxes):
            part = config.model_copy(
                update={
                    "width": right - left, "height": bottom - top, "strength": settings.strength or 0.0, "count": 1,
                    "seed": (self.seed + number) % 2**64, "steps": settings.steps, "sampler": settings.sampler,
                    "schedule": settings.schedule, "upscale": None, "outpaint": None, "image_prompts": (),
                },
                check=False,
            )  # fmt: skip
            rows, columns = slice(top // scale, bottom // scale), slice(left // scale, right // scale)
            made.append(
                replace(
                    self.request, config=part, size=(right - left, bottom - top), mask=None, warnings=(),
                    init=None if image is None else image.crop((left, top, right, bottom)),
                    start=None if start is None else start[..., rows, columns],
                    noise=None if noise is None else noise[..., rows, columns], keeps_latents=False, parts=(),
                )
            )  # fmt: skip
        return made

    def _enlarged_latents(self) -> Tensor:
        """Return the latents of the first pass at the size of the result; what another shape leaves over is cropped."""
        assert self.latents is not None
        _, _, rows, columns = self.model.latent_space.shape(*self.tiles.size)
        high, wide = self.latents.shape[-2:]
        factor = max(rows / high, columns / wide)
        size = max(rows, round(high * factor)), max(columns, round(wide * factor))
        mode, antialias = LATENT_MODES[self.settings.upscaler]
        large = functional.interpolate(self.latents.float(), size, mode=mode, antialias=antialias)
        top, left = (size[0] - rows) // 2, (size[1] - columns) // 2
        return large[..., top : top + rows, left : left + columns].to(self.latents.dtype)


def complete_pass(
    model: Model, request: PreparedRequest, upscalers: UpscalerFinder
) -> tuple[UpscalePass, list[Problem]]:
    """Return the settings of a second pass with a value for each, and why it cannot be made."""
    config, settings = request.config, request.config.upscale
    assert settings is not None
    strength, wrong = settings.strength_for(model.size), list[Problem]()
    paints = strength > 0 or settings.is_latent
    own = model.family.own_pipeline
    if own and paints:
        reason = f"{model.family.pipeline} makes the images of this model and starts from noise alone; use strength 0"
        wrong.append(Problem("upscale", reason))
    if settings.is_latent and request.init is not None:
        reason = "there are no latents to enlarge, since the image is put together from pixels; use lanczos"
        wrong.append(Problem("upscale.upscaler", reason))
    try:
        upscalers.file(settings.upscaler)
    except ConfigError as error:
        wrong += [each if isinstance(each, Problem) else Problem("upscale", str(each)) for each in error.problems]
    size = settings.size_of(request.size if request.init is None else request.init.size, model.patch if paints else 1)
    if max(size) > 4096:
        wrong.append(Problem("upscale", f"the result would have {size[0]}x{size[1]} pixels; at most 4096 are possible"))
    tile = settings.tile
    if tile is None:
        tile = 2 * model.size if max(size) > 2 * model.size else 0
    if tile and (tile < 64 or tile % model.patch):
        wrong.append(Problem("upscale.tile", f"{tile}: expected a multiple of {model.patch} from 64 on, or 0"))
    return (
        settings.model_copy(
            update={
                "strength": strength, "steps": settings.steps or config.steps, "tile": tile,
                "sampler": settings.sampler or config.sampler, "schedule": settings.schedule or config.schedule,
            },
            check=False,
        ),
        wrong,
    )  # fmt: skip
