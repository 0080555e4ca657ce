"""Stable Diffusion's UNet: noise or velocity of latents at a time, guided by the states of a text.

down    per level: residual block and transformer, repeated; then half the sides
middle  residual block, transformer, residual block
up      per level: one repetition more, each with the output of its counterpart on the way down as more channels;
        then twice the sides
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from inweave.models.sd.blocks import Downsample, ImageTransformer, ResidualBlock, Upsample, time_frequencies
from inweave.models.sd.network import PlainNetwork, Recomputing

_MIDDLE, _DOWN, _UP = "UNetMidBlock2DCrossAttn", "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all levels have in common."""

    heads: int
    text_width: int
    groups: int
    eps: float
    time_width: int


class _Level(Recomputing):
    """The residual blocks and transformers of one size; ``widths``: of the input of each residual block."""

    def __init__(self, widths: Sequence[int], out: int, shared: _Shared) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(
            ImageTransformer(out, shared.heads, shared.text_width, shared.groups) for _ in widths
        )
        self.resnets = nn.ModuleList(
            ResidualBlock(width, out, shared.groups, shared.eps, shared.time_width) for width in widths
        )


class _Down(_Level):
    def __init__(self, widths: Sequence[int], out: int, shared: _Shared, padding: int | None) -> None:
        super().__init__(widths, out, shared)
        self.downsamplers = None if padding is None else nn.ModuleList([Downsample(out, padding)])

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> list[Tensor]:
        """Return the outputs that the way up reads, the last of which goes on down."""
        outputs = []
        for residual, attention in zip(self.resnets, self.attentions, strict=True):
            x = attention(self.run(residual, x, time), text)
            outputs.append(x)
        return outputs if self.downsamplers is None else [*outputs, self.downsamplers[0](x)]


class _Middle(_Level):
    def __init__(self, width: int, shared: _Shared) -> None:
        super().__init__([width], width, shared)
        self.resnets.append(ResidualBlock(width, width, shared.groups, shared.eps, shared.time_width))

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.attentions[0](self.resnets[0](x, time), text)
        out: Tensor = self.run(self.resnets[1], x, time)
        return out


class _Up(_Level):
    def __init__(self, widths: Sequence[int], out: int, shared: _Shared, *, last: bool) -> None:
        super().__init__(widths, out, shared)
        self.upsamplers = None if last else nn.ModuleList([Upsample(out)])

    def forward(self, x: Tensor, skips: list[Tensor], time: Tensor, text: Tensor, size: Sequence[int] | None) -> Tensor:
        for residual, attention in zip(self.resnets, self.attentions, strict=True):
            x = attention(self.run(residual, torch.cat([x, skips.pop()], dim=1), time), text)
        return x if self.upsamplers is None else self.upsamplers[0](x, size)


class _TimeEmbedding(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(width, out)
        self.linear_2 = nn.Linear(out, out)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_2(functional.silu(self.linear_1(x)))
        return out


class UNet2DConditionModel(PlainNetwork):
    """diffusers' class of this name, for the settings that are not `fixed`."""

    fixed: ClassVar[Mapping[str, Any]] = {
        "act_fn": "silu", "addition_embed_type": None, "addition_time_embed_dim": None, "attention_type": "default",
        "center_input_sample": False, "class_embed_type": None, "class_embeddings_concat": False, "conv_in_kernel": 3,
        "conv_out_kernel": 3, "cross_attention_norm": None, "dropout": 0.0, "dual_cross_attention": False,
        "encoder_hid_dim": None, "encoder_hid_dim_type": None, "flip_sin_to_cos": True, "freq_shift": 0,
        "mid_block_only_cross_attention": None, "mid_block_scale_factor": 1, "mid_block_type": _MIDDLE,
        "num_attention_heads": None, "num_class_embeds": None, "only_cross_attention": False,
        "resnet_out_scale_factor": 1.0, "resnet_skip_time_act": False, "resnet_time_scale_shift": "default",
        "reverse_transformer_layers_per_block": None, "time_cond_proj_dim": None, "time_embedding_act_fn": None,
        "time_embedding_dim": None, "time_embedding_type": "positional", "timestep_post_act": None,
        "transformer_layers_per_block": 1, "upcast_attention": False, "use_linear_projection": False,
    }  # fmt: skip
    unused: ClassVar[frozenset[str]] = frozenset(
        {"addition_embed_type_num_heads", "projection_class_embeddings_input_dim"}
    )

    def __init__(
        self,
        sample_size: int,
        in_channels: int,
        out_channels: int,
        block_out_channels: tuple[int],
        down_block_types: tuple[str],
        up_block_types: tuple[str],
        layers_per_block: int,
        attention_head_dim: int,  # the number of heads: diffusers' name for it is wrong
        cross_attention_dim: int,
        norm_num_groups: int,
        norm_eps: float,
        downsample_padding: int,
    ) -> None:
        super().__init__()
        widths, last = list(block_out_channels), len(block_out_channels) - 1
        time_width = 4 * widths[0]
        shared = _Shared(attention_head_dim, cross_attention_dim, norm_num_groups, norm_eps, time_width)
        self.conv_in = nn.Conv2d(in_channels, widths[0], 3, padding=1)
        self.time_embedding = _TimeEmbedding(widths[0], time_width)
        self.down_blocks = nn.ModuleList()
        self._skips_per_level = layers_per_block + 1
        skips = [widths[0]]
        for level, width in enumerate(widths):
            inputs = [skips[-1], *[width] * (layers_per_block - 1)]
            self.down_blocks.append(_Down(inputs, width, shared, None if level == last else downsample_padding))
            skips += [width] * (layers_per_block + (level != last))
        self.up_blocks = nn.ModuleList()
        before = widths[-1]
        for level, width in reversed(list(enumerate(widths))):
            inputs = [first + skips.pop() for first in (before, *[width] * layers_per_block)]
            self.up_blocks.append(_Up(inputs, width, shared, last=level == 0))
            before = width
        self.mid_block = _Middle(widths[-1], shared)  # the library's order, which saved states of a run have
        self.conv_norm_out = nn.GroupNorm(norm_num_groups, widths[0], norm_eps)
        self.conv_out = nn.Conv2d(widths[0], out_channels, 3, padding=1)

    @classmethod
    def fits(cls, config: Mapping[str, Any]) -> bool:
        return {*config["down_block_types"]} == {_DOWN} and {*config["up_block_types"]} == {_UP}

    def distinct(self, sample: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows to begin with, and the times to embed: all of them, and one for each row."""
        return sample, times.expand(len(sample))

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        added_cond_kwargs: None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """Return the prediction for latents at a time, or at one time each, alone in a tuple."""
        latents, times = self.distinct(sample, timestep.reshape(-1).to(sample.device))
        time = self.time_embedding(time_frequencies(times, self.conv_in.out_channels).to(sample.dtype))
        levels = len(self.up_blocks)
        uneven = any(side % 2 ** (levels - 1) for side in sample.shape[-2:])
        skips: list[Tensor] = [self.conv_in(latents)]
        for down in self.down_blocks:
            skips += down(skips[-1], time, encoder_hidden_states)
        skips[0] = repeated(skips[0], sample)
        x = self.mid_block(skips[-1], time, encoder_hidden_states)
        for up in self.up_blocks:
            later = skips[: -self._skips_per_level]
            x = up(x, skips, time, encoder_hidden_states, later[-1].shape[2:] if uneven and later else None)
            skips = later
        return (self.conv_out(functional.silu(self.conv_norm_out(x))),)


def repeated(x: Tensor, like: Tensor) -> Tensor:
    """Return rows as many times in a row as another tensor has them."""
    return x if len(x) == len(like) else x.repeat_interleave(len(like) // len(x), 0)
