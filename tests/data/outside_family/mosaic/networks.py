"""The denoiser: every latent is a token, and two blocks of attention mix them with the text."""

from __future__ import annotations

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return y


class Block(nn.Module):
    def __init__(self, width: int, text_width: int) -> None:
        super().__init__()
        self.to_q, self.to_out = nn.Linear(width, width), nn.Linear(width, width)
        self.to_k, self.to_v = nn.Linear(text_width, width), nn.Linear(text_width, width)
        self.ff = FeedForward(width)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        mixed = nn.functional.scaled_dot_product_attention(self.to_q(x), self.to_k(text), self.to_v(text))
        x = x + self.to_out(mixed)
        return x + self.ff(x)


class MosaicTransformer(ModelMixin, ConfigMixin):  # type: ignore[misc]
    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, in_channels: int = 4, width: int = 16, text_width: int = 16, num_layers: int = 2) -> None:
        super().__init__()
        self.tiles = nn.Linear(in_channels + 1, width)
        self.blocks = nn.ModuleList(Block(width, text_width) for _ in range(num_layers))
        self.proj_out = nn.Linear(width, in_channels)

    def forward(self, latents: torch.Tensor, time: torch.Tensor, encoder_hidden_states: torch.Tensor) -> torch.Tensor:
        tokens = latents.flatten(2).transpose(1, 2)
        times = time.to(tokens.dtype)[:, None, None].expand(-1, tokens.shape[1], 1)
        x = self.tiles(torch.cat([tokens, times], -1))
        for block in self.blocks:
            x = block(x, encoder_hidden_states)
        y: torch.Tensor = self.proj_out(x)
        return y.transpose(1, 2).reshape(latents.shape)
