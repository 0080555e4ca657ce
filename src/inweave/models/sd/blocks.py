"""The blocks of Stable Diffusion's UNet and autoencoder, with the names of tensors that diffusers gives them.

residual    x + conv(silu(norm(conv(silu(norm(x))) + time)))      x through a 1x1 convolution if the width changes
attention   out(softmax(q k^T / sqrt(d)) v)                       queries of x; keys and values of x or of the text
transformer each token: x + self-attention, + attention to the text, + feed-forward, each of the normalized x
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from inweave.models.sd.network import Recomputing


class ResidualBlock(nn.Module):
    """Two convolutions around a skip connection; ``time_width``: of the time embedding that is added between them."""

    def __init__(self, width: int, out: int, groups: int, eps: float, time_width: int | None = None) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, width, eps)
        self.conv1 = nn.Conv2d(width, out, 3, padding=1)
        self.time_emb_proj = None if time_width is None else nn.Linear(time_width, out)
        self.norm2 = nn.GroupNorm(groups, out, eps)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.conv_shortcut = None if width == out else nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        hidden = self.conv1(functional.silu(self.norm1(x)))
        if self.time_emb_proj is not None and time is not None:
            hidden = hidden + self.time_emb_proj(functional.silu(time))[:, :, None, None]
        hidden = self.conv2(functional.silu(self.norm2(hidden)))
        out: Tensor = (x if self.conv_shortcut is None else self.conv_shortcut(x)) + hidden
        return out


class Downsample(nn.Module):
    """Half the sides by a convolution; ``padding`` 0 pads on the right and at the bottom alone."""

    def __init__(self, width: int, padding: int) -> None:
        super().__init__()
        self.padding = padding
        self.conv = nn.Conv2d(width, width, 3, stride=2, padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        padded = x if self.padding else functional.pad(x, (0, 1, 0, 1))
        half: Tensor = self.conv(padded)
        return half


class Upsample(nn.Module):
    """Twice the sides, or another size, by repeated pixels and a convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor, size: Sequence[int] | None = None) -> Tensor:
        if size is None:
            large = functional.interpolate(x, scale_factor=2.0, mode="nearest")
        else:
            large = functional.interpolate(x, size=list(size), mode="nearest")
        sharp: Tensor = self.conv(large)
        return sharp


class Attention(nn.Module):
    """Attention of tokens (batch, length, width) to themselves, or to a text of ``text_width``."""

    def __init__(self, width: int, heads: int, text_width: int | None = None, *, bias: bool = False) -> None:
        super().__init__()
        self.heads = heads
        read = width if text_width is None else text_width
        self.to_q = nn.Linear(width, width, bias=bias)
        self.to_k = nn.Linear(read, width, bias=bias)
        self.to_v = nn.Linear(read, width, bias=bias)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def forward(self, x: Tensor, text: Tensor | None = None) -> Tensor:
        read = x if text is None else text
        parts = (self.to_q(x), self.to_k(read), self.to_v(read))
        q, k, v = (part.view(len(x), -1, self.heads, part.shape[-1] // self.heads).transpose(1, 2) for part in parts)
        joined = (
            functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(x), -1, parts[0].shape[-1])
        )
        out: Tensor = self.to_out[0](joined)
        return out


class ImageAttention(Attention):
    """Attention of all pixels of an image (batch, width, height, width) to each other, with a skip connection."""

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__(width, 1, bias=True)
        self.group_norm = nn.GroupNorm(groups, width, eps)
        projections = [name for name in self._modules if name != "group_norm"]
        self._modules |= {name: self._modules.pop(name) for name in projections}  # in the library's order

    def forward(self, x: Tensor, text: Tensor | None = None) -> Tensor:
        tokens = self.group_norm(x.flatten(2)).transpose(1, 2)
        return super().forward(tokens).transpose(-1, -2).reshape(x.shape) + x


class GatedLinear(nn.Module):
    """One half of a linear layer's output, times the GELU of the other."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 2 * out)

    def forward(self, x: Tensor) -> Tensor:
        left, gate = self.proj(x).chunk(2, dim=-1)
        gated: Tensor = left * functional.gelu(gate)
        return gated


class FeedForward(nn.Module):
    """Four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # the place between the two is a dropout's, which counts in the names of tensors
        self.net = nn.ModuleList([GatedLinear(width, 4 * width), nn.Identity(), nn.Linear(4 * width, width)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net[2](self.net[0](x))
        return out


class TransformerBlock(nn.Module):
    """Attention of tokens to themselves, to the text, and a feed-forward layer."""

    def __init__(self, width: int, heads: int, text_width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn1 = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.attn2 = Attention(width, heads, text_width)
        self.norm3 = nn.LayerNorm(width)
        self.ff = FeedForward(width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        x = self.attn1(self.norm1(x)) + x
        x = self.attn2(self.norm2(x), text) + x
        out: Tensor = self.ff(self.norm3(x)) + x
        return out


class ImageTransformer(Recomputing):
    """A transformer block over the pixels of an image, with a skip connection around it."""

    def __init__(self, width: int, heads: int, text_width: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, width, 1e-6)
        self.proj_in = nn.Conv2d(width, width, 1)
        self.transformer_blocks = nn.ModuleList([TransformerBlock(width, heads, text_width)])
        self.proj_out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        batch, width, height, length = x.shape
        tokens = self.proj_in(self.norm(x)).permute(0, 2, 3, 1).reshape(batch, height * length, width)
        for block in self.transformer_blocks:
            tokens = self.run(block, tokens, text)
        image = tokens.reshape(batch, height, length, width).permute(0, 3, 1, 2).contiguous()
        out: Tensor = self.proj_out(image) + x
        return out


def time_frequencies(times: Tensor, width: int) -> Tensor:
    """Return the cosines and sines of times (batch,) at ``width / 2`` frequencies between 1 and 1/10,000."""
    half = width // 2
    exponents = -math.log(10_000) * torch.arange(half, dtype=torch.float32, device=times.device)
    angles = times[:, None].float() * torch.exp(exponents / half)[None, :]
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)
