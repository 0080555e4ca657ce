"""Images to latents and back: the one place that knows how an autoencoder is used.

    image (batch, 3, height, width) in -1..1
      ──encode──► distribution ──sample, mode, or mean and deviation──► (x - shift) * factor = latents
    latents (batch, channels, height / scale, width / scale) ──► x = latents / factor + shift ──decode──► image

shift and factor are one number each (`shift_factor`, `scaling_factor`) or one per channel (`latents_mean`, 1 /
`latents_std`). An autoencoder for video takes and gives a frame axis; it is added and removed here, so latents have
four axes everywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inweave.errors import FormatError

SMALLEST_TILE = 16  # latents per side: a smaller tile sees too little of the image
_OVERLAP = 4  # the share of a tile that the next one repeats


@dataclass(frozen=True, slots=True)
class LatentSpace:
    """The latents of an autoencoder, from its configuration."""

    channels: int
    scale: int  # pixels per latent, along each side
    shift: tuple[float, ...] = (0.0,)  # one number, or one per channel
    factor: tuple[float, ...] = (1.0,)
    frames: bool = False  # whether the network has a frame axis

    @staticmethod
    def of(config: Mapping[str, Any]) -> LatentSpace:
        """Read the configuration of diffusers' AutoencoderKL, or of a video autoencoder such as Qwen-Image's."""
        if "latents_mean" in config and "z_dim" in config:
            factor = tuple((1.0 / torch.tensor(config["latents_std"])).tolist())
            scale = 2 ** len(config["temperal_downsample"]) * (config.get("patch_size") or 1)  # spelled so in the files
            space = LatentSpace(config["z_dim"], scale, tuple(config["latents_mean"]), factor, frames=True)
        elif "encoder_block_out_channels" in config:  # AutoencoderDC, which has no distribution
            scale = 2 ** (len(config["encoder_block_out_channels"]) - 1)
            space = LatentSpace(config["latent_channels"], scale, factor=(config["scaling_factor"],))
        else:
            scale = 2 ** (len(config["block_out_channels"]) - 1)
            shift = config.get("shift_factor") or 0.0
            space = LatentSpace(config["latent_channels"], scale, (shift,), (config["scaling_factor"],))
        space.check()
        return space

    def check(self) -> None:
        """Refuse numbers that no latents can have."""
        numbers = (*self.shift, *self.factor)
        lengths = {len(self.shift), len(self.factor)}
        if not all(math.isfinite(number) for number in numbers) or 0.0 in self.factor:
            raise FormatError("the autoencoder's shift and factor of latents should be finite, and the factor not 0")
        if not lengths <= {1, self.channels} or self.channels < 1:
            raise FormatError(f"the autoencoder has {self.channels} channels, and means for {max(lengths)}")

    def shape(self, width: int, height: int, batch: int = 1) -> tuple[int, int, int, int]:
        """Return the shape of latents for images of this size in pixels."""
        return batch, self.channels, height // self.scale, width // self.scale

    def normalize(self, hidden: Tensor) -> Tensor:
        return (hidden - _per_channel(self.shift, hidden)) * _per_channel(self.factor, hidden)

    def denormalize(self, latents: Tensor) -> Tensor:
        return latents / _per_channel(self.factor, latents) + _per_channel(self.shift, latents)


def encode(vae: Any, image: Tensor, generator: torch.Generator | None) -> Tensor:
    """Latents sampled for a batch of images; without a generator the most likely ones."""
    space, distribution = LatentSpace.of(vae.config), _distribution(vae, image)
    hidden = distribution.mode() if generator is None else distribution.sample(generator)
    return space.normalize(_without_frames(hidden, space))


def encode_distribution(vae: Any, image: Tensor) -> tuple[Tensor, Tensor]:
    """Return (mean, standard deviation) of the latents of a batch of images."""
    space, distribution = LatentSpace.of(vae.config), _distribution(vae, image)
    std = _without_frames(distribution.std, space)
    return space.normalize(_without_frames(distribution.mean, space)), std * _per_channel(space.factor, std)


def decode(vae: Any, latents: Tensor, warn: Callable[[str], object] | None = None) -> Tensor:
    """Return the images of latents; if memory runs out, decode overlapping tiles, half as large each time."""
    space = LatentSpace.of(vae.config)
    hidden = space.denormalize(latents.to(vae.dtype))
    whole = side = max(hidden.shape[-2:])
    while True:
        try:
            with _tiled(vae, side if side < whole else None, space.scale):
                image: Tensor = vae.decode(hidden[:, :, None] if space.frames else hidden, return_dict=False)[0]
            if side < whole and warn is not None:
                warn(
                    "not enough memory to decode the image at once; it was decoded in tiles of "
                    f"{side * space.scale} pixels"
                )
            return _without_frames(image, space)
        except torch.OutOfMemoryError:
            if side // 2 < SMALLEST_TILE:
                raise
        # outside of the handler: the error holds its frames, and they hold what was computed
        torch.cuda.empty_cache()
        side //= 2


def _distribution(vae: Any, image: Tensor) -> Any:
    image = image.to(vae.device, vae.dtype)
    encoded = vae.encode(image[:, :, None] if LatentSpace.of(vae.config).frames else image)
    return encoded.latent_dist if hasattr(encoded, "latent_dist") else _Exact(encoded.latent)


@dataclass(frozen=True, slots=True)
class _Exact:
    """The latents of an autoencoder without a distribution, as one."""

    mean: Tensor

    @property
    def std(self) -> Tensor:
        return torch.zeros_like(self.mean)

    def mode(self) -> Tensor:
        return self.mean

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        return self.mean


def _without_frames(tensor: Tensor, space: LatentSpace) -> Tensor:
    return tensor[:, :, 0] if space.frames else tensor


def _per_channel(values: tuple[float, ...], like: Tensor) -> float | Tensor:
    """Return a plain number if all channels share it."""
    if len(values) == 1:
        return values[0]
    return torch.tensor(values, dtype=like.dtype, device=like.device).view(1, -1, 1, 1)


@contextmanager
def _tiled(vae: Any, side: int | None, scale: int) -> Iterator[None]:
    """Tiles of ``side`` latents inside the block; None: the image as one."""
    if side is None:
        yield
        return
    pixels = side * scale
    if hasattr(vae, "tile_latent_min_size"):
        tiles = {"tile_latent_min_size": side, "tile_sample_min_size": pixels}
    else:
        stride = pixels - pixels // _OVERLAP
        tiles = {"tile_sample_min_height": pixels, "tile_sample_min_width": pixels}
        tiles |= {"tile_sample_stride_height": stride, "tile_sample_stride_width": stride}
    tiles["use_tiling"] = True
    before = {name: getattr(vae, name) for name in tiles}
    vars(vae).update(tiles)
    try:
        yield
    finally:
        vars(vae).update(before)
