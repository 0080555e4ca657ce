"""Stable Diffusion's autoencoder: images to distributions of latents, and latents to images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from inweave.models.sd.blocks import Downsample, ImageAttention, ResidualBlock, Upsample
from inweave.models.sd.network import PlainNetwork

_EPS = 1e-6
_OVERLAP = 0.25  # the share of a tile that the next one repeats
_DOWN, _UP = "DownEncoderBlock2D", "UpDecoderBlock2D"


class _Level(nn.Module):
    """Residual blocks of one size, then half or twice the sides."""

    def __init__(self, widths: Sequence[int], out: int, groups: int, resample: nn.Module | None, name: str) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(ResidualBlock(width, out, groups, _EPS) for width in widths)
        if resample is not None:
            self.add_module(name, nn.ModuleList([resample]))
        self._steps = ["resnets", *([] if resample is None else [name])]

    def forward(self, x: Tensor) -> Tensor:
        for name in self._steps:
            for module in getattr(self, name):
                x = module(x)
        return x


class _Middle(nn.Module):
    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([ImageAttention(width, groups, _EPS)])
        self.resnets = nn.ModuleList(ResidualBlock(width, width, groups, _EPS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.resnets[1](self.attentions[0](self.resnets[0](x)))
        return out


class _Half(nn.Module):
    """The encoder or the decoder: their first and last layers, and the middle between the smallest sides."""

    def __init__(
        self,
        channels: int,
        first: int,
        last: int,
        out: int,
        middle: int,
        groups: int,
        blocks: tuple[str, nn.ModuleList],
    ) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(channels, first, 3, padding=1)
        self.add_module(*blocks)  # in the library's order
        self.mid_block = _Middle(middle, groups)
        self.conv_norm_out = nn.GroupNorm(groups, last, _EPS)
        self.conv_out = nn.Conv2d(last, out, 3, padding=1)

    def end(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv_out(functional.silu(self.conv_norm_out(x)))
        return out


class _Encoder(_Half):
    def __init__(self, channels: int, latents: int, widths: Sequence[int], layers: int, groups: int) -> None:
        blocks = nn.ModuleList()
        for level, width in enumerate(widths):
            inputs = [widths[max(level - 1, 0)], *[width] * (layers - 1)]
            half = Downsample(width, 0) if level < len(widths) - 1 else None
            blocks.append(_Level(inputs, width, groups, half, "downsamplers"))
        super().__init__(channels, widths[0], widths[-1], 2 * latents, widths[-1], groups, ("down_blocks", blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in cast("nn.ModuleList", self.down_blocks):
            x = block(x)
        return self.end(self.mid_block(x))


class _Decoder(_Half):
    def __init__(self, latents: int, channels: int, widths: Sequence[int], layers: int, groups: int) -> None:
        blocks = nn.ModuleList()
        before = widths[-1]
        for level, width in reversed(list(enumerate(widths))):
            twice = Upsample(width) if level else None
            blocks.append(_Level([before, *[width] * layers], width, groups, twice, "upsamplers"))
            before = width
        super().__init__(latents, widths[-1], widths[0], channels, widths[-1], groups, ("up_blocks", blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid_block(self.conv_in(x))
        for block in cast("nn.ModuleList", self.up_blocks):
            x = block(x)
        return self.end(x)


class Gaussian:
    """A normal distribution of latents, from the encoder's means and logarithms of variances."""

    def __init__(self, parameters: Tensor) -> None:
        self.mean, logarithm = parameters.chunk(2, dim=1)
        self.std = torch.exp(0.5 * logarithm.clamp(-30.0, 20.0))

    def mode(self) -> Tensor:
        return self.mean

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        device = self.mean.device if generator is None else generator.device
        noise = torch.randn(self.mean.shape, generator=generator, device=device, dtype=self.mean.dtype)
        return self.mean + self.std * noise.to(self.mean.device)


@dataclass(frozen=True, slots=True)
class Encoded:
    """What the encoder gives."""

    latent_dist: Gaussian


class AutoencoderKL(PlainNetwork):
    """diffusers' class of this name, for the settings that are not `fixed`."""

    fixed: ClassVar[Mapping[str, Any]] = {
        "act_fn": "silu", "latents_mean": None, "latents_std": None, "mid_block_add_attention": True,
        "shift_factor": None, "use_post_quant_conv": True, "use_quant_conv": True,
    }  # fmt: skip

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        latent_channels: int,
        block_out_channels: tuple[int],
        down_block_types: tuple[str],
        up_block_types: tuple[str],
        layers_per_block: int,
        norm_num_groups: int,
        sample_size: int,
        scaling_factor: float,
        force_upcast: bool,
    ) -> None:
        super().__init__()
        shared = list(block_out_channels), layers_per_block, norm_num_groups
        self.encoder = _Encoder(in_channels, latent_channels, *shared)
        self.decoder = _Decoder(latent_channels, out_channels, *shared)
        self.quant_conv = nn.Conv2d(2 * latent_channels, 2 * latent_channels, 1)
        self.post_quant_conv = nn.Conv2d(latent_channels, latent_channels, 1)
        self.use_tiling = False  # decode overlapping tiles, of these sides in latents and in pixels
        self.tile_sample_min_size = sample_size
        self.tile_latent_min_size = sample_size // 2 ** (len(block_out_channels) - 1)

    @classmethod
    def fits(cls, config: Mapping[str, Any]) -> bool:
        return {*config["down_block_types"]} == {_DOWN} and {*config["up_block_types"]} == {_UP}

    def encode(self, image: Tensor) -> Encoded:
        """Return the distribution of the latents of images (batch, channels, height, width)."""
        return Encoded(Gaussian(self.quant_conv(self.encoder(image))))

    def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """Return the images of latents, alone in a tuple."""
        if self.use_tiling and max(latents.shape[-2:]) > self.tile_latent_min_size:
            return (self._decode_tiles(latents),)
        return (self.decoder(self.post_quant_conv(latents)),)

    def _decode_tiles(self, latents: Tensor) -> Tensor:
        side, stride = self.tile_latent_min_size, int(self.tile_latent_min_size * (1 - _OVERLAP))
        faded = int(self.tile_sample_min_size * _OVERLAP)
        inner = self.tile_sample_min_size - faded
        above: list[Tensor] = []
        rows = []
        for top in range(0, latents.shape[2], stride):
            tiles: list[Tensor] = []
            for left in range(0, latents.shape[3], stride):
                tile = latents[:, :, top : top + side, left : left + side]
                tile = self.decoder(self.post_quant_conv(tile))
                if above:
                    tile = _fade(above[len(tiles)], tile, faded, 2)
                tiles.append(_fade(tiles[-1], tile, faded, 3) if tiles else tile)
            rows.append(torch.cat([tile[:, :, :inner, :inner] for tile in tiles], dim=3))
            above = tiles
        return torch.cat(rows, dim=2)


def _fade(before: Tensor, tile: Tensor, length: int, dim: int) -> Tensor:
    """Return a tile whose first ``length`` rows or columns fade in over the last ones of the tile before it."""
    length = min(before.shape[dim], tile.shape[dim], length)
    rising = torch.arange(length, dtype=torch.float64) / length
    end = _scaled(before.narrow(dim, before.shape[dim] - length, length), 1 - rising, dim)
    start = _scaled(tile.narrow(dim, 0, length), rising, dim)
    return torch.cat([end + start, tile.narrow(dim, length, tile.shape[dim] - length)], dim)


def _scaled(values: Tensor, weights: Tensor, dim: int) -> Tensor:
    shape = [-1 if axis == dim else 1 for axis in range(values.dim())]
    return (values.float() * weights.to(values.device, torch.float32).view(shape)).to(values.dtype)
