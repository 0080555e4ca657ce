"""Images to latents and back: the one place that knows how an autoencoder is used.

    image (batch, 3, height, width) in -1..1
      ──encode──► distribution ──sample, mode, or mean and deviation──► (x - shift) * factor = latents
    latents (batch, channels, height / scale, width / scale) ──► x = latents / factor + shift ──decode──► image

shift and factor are one number each (`shift_factor`, `scaling_factor`) or one per channel (`latents_mean`, 1 /
`latents_std`). An autoencoder for video takes and gives a frame axis; it is added and removed here, so latents have
four axes everywhere else.

FLUX.2's joins what its encoder gives into patches of 2x2, channel by channel, so that its latents have four times the
channels and half the sides. Their mean and variance are those of a batch norm (`bn`), which is among its weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

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
    patch: int = 1  # what the network gives per latent, along each side

    @staticmethod
    def of(config: Mapping[str, Any], norm: nn.BatchNorm2d | None = None) -> LatentSpace:
        """Read the configuration of diffusers' AutoencoderKL, or of a relative such as Qwen-Image's or FLUX.2's.

        Args:
            config: the autoencoder's configuration.
            norm: FLUX.2's batch norm; without it, or without its numbers, the latents' mean and variance are 0 and 1.

        Returns:
            The latents, checked.

        Raises:
            FormatError: no latents can have these numbers.
        """
        if "batch_norm_eps" in config:
            patch, other = config["patch_size"]
            if patch != other:
                raise FormatError(f"the autoencoder joins patches of {patch}x{other}; expected as many rows as columns")
            channels = config["latent_channels"] * patch * patch
            scale = patch * 2 ** (len(config["block_out_channels"]) - 1)
            mean: tuple[float, ...] = (0.0,)
            factor: tuple[float, ...] = (1.0,)
            if norm is not None and norm.running_mean is not None and not norm.running_mean.is_meta:
                mean, factor = _statistics(norm)
            space = LatentSpace(channels, scale, mean, factor, patch=patch)
        elif "latents_mean" in config and "z_dim" in config:
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
        hidden = self.join(hidden)
        return (hidden - _per_channel(self.shift, hidden)) * _per_channel(self.factor, hidden)

    def denormalize(self, latents: Tensor) -> Tensor:
        return self.separate(latents / _per_channel(self.factor, latents) + _per_channel(self.shift, latents))

    def join(self, hidden: Tensor) -> Tensor:
        """Return what the network gave with each patch as channels."""
        return hidden if self.patch == 1 else functional.pixel_unshuffle(hidden, self.patch)

    def separate(self, latents: Tensor) -> Tensor:
        """Undo `join`."""
        return latents if self.patch == 1 else functional.pixel_shuffle(latents, self.patch)


def latent_space(vae: Any) -> LatentSpace:
    """Return the latents of an autoencoder with its weights."""
    return LatentSpace.of(vae.config, getattr(vae, "bn", None))


def encode(vae: Any, image: Tensor, generator: torch.Generator | None) -> Tensor:
    """Latents sampled for a batch of images; without a generator the most likely ones."""
    space, distribution = latent_space(vae), _distribution(vae, image)
    hidden = distribution.mode() if generator is None else distribution.sample(generator)
    return space.normalize(_without_frames(hidden, space))


def encode_samples(vae: Any, image: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Return latents of one image, sampled once with each generator."""
    space, distribution = latent_space(vae), _distribution(vae, image)
    hidden = torch.cat([distribution.sample(generator) for generator in generators])
    return space.normalize(_without_frames(hidden, space))


def encode_distribution(vae: Any, image: Tensor) -> tuple[Tensor, Tensor]:
    """Return (mean, standard deviation) of the latents of a batch of images."""
    space, distribution = latent_space(vae), _distribution(vae, image)
    std = space.join(_without_frames(distribution.std, space))
    return space.normalize(_without_frames(distribution.mean, space)), std * _per_channel(space.factor, std)


def decode(vae: Any, latents: Tensor, warn: Callable[[str], object] | None = None) -> Tensor:
    """Return the images of latents; if memory runs out, decode overlapping tiles, half as large each time."""
    space = latent_space(vae)
    hidden = space.denormalize(latents.to(vae.dtype))
    pixels = space.scale // space.patch
    whole = side = max(hidden.shape[-2:])
    while True:
        try:
            with _tiled(vae, side if side < whole else None, pixels):
                image: Tensor = vae.decode(hidden[:, :, None] if space.frames else hidden, return_dict=False)[0]
            if side < whole and warn is not None:
                warn(
                    f"not enough memory to decode the image at once; it was decoded in tiles of {side * pixels} pixels"
                )
            return _without_frames(image, space)
        except torch.OutOfMemoryError:
            if side // 2 < SMALLEST_TILE:
                raise
        # outside of the handler: the error holds its frames, and they hold what was computed
        torch.cuda.empty_cache()
        side //= 2


def _distribution(vae: Any, image: Tensor) -> Any:
    image = _with_alpha(image.to(vae.device, vae.dtype), vae.config)
    encoded = vae.encode(image[:, :, None] if LatentSpace.of(vae.config).frames else image)
    return encoded.latent_dist if hasattr(encoded, "latent_dist") else _Exact(encoded.latent)


def _with_alpha(image: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Add an opaque alpha channel for an autoencoder of images with one."""
    if config.get("in_channels", 3) != 4 or image.shape[1] != 3:
        return image
    return torch.cat([image, torch.ones_like(image[:, :1])], 1)


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


def _statistics(norm: nn.BatchNorm2d) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return (mean, 1 / deviation) of every channel."""
    mean, variance = norm.running_mean, norm.running_var
    assert mean is not None and variance is not None, "it tracks both or none"
    deviation = torch.sqrt(variance.double() + norm.eps)
    return tuple(mean.double().tolist()), tuple((1 / deviation).tolist())


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
