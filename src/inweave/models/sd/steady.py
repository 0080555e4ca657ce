"""Stable Diffusion's UNet between two swaps, while its weights do not change: what no step changes is computed once.

    with steady(unet):
        unet(latents, t, text)          for every step

    text        keys and values of a text, for all steps
    time        the embedding of one time, for all rows
    latents     rows that are copies, as guidance makes them, are one row until they read their texts
    weights     queries, keys and values as one product; 3x3 convolutions in the order that the processor's kernels read
    memory      channels last from the first convolution to the last one: transformers read pixels without a copy

The sums are the same, in another order: predictions differ by the rounding of float32. Modules get a subclass of their
own class inside the block, and nothing that was kept outlives it, so no weight of another block is ever used; a swap or
write between two calls begins anew. A layer with a hook, such as an adapter that is added to its rows, is called as a
module, and with all rows. Networks that are not faster so (`is_faster`) stay unchanged.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from inweave.models.sd.blocks import Attention, ImageTransformer, ResidualBlock, TransformerBlock
from inweave.models.sd.unet import UNet2DConditionModel, repeated
from inweave.ops.common.modules import is_unchanged
from inweave.weights.stack_state import writes_to

_MOST_TEXTS = 8  # whose keys and values are kept: prompts that change between steps take turns
_KEPT = ("packed", "joined", "texts")  # attributes that modules have inside the block
_reorder: Any = getattr(torch._C._nn, "mkldnn_reorder_conv2d_weight", None)


def is_faster(network: nn.Module) -> bool:
    """Return whether `steady` takes a network, and makes it faster here."""
    weight = next(network.parameters(), None)
    return (
        type(network) is UNet2DConditionModel
        and weight is not None
        and weight.device.type == "cpu"
        and weight.dtype is torch.float32
        and _reorder is not None
        and not torch.is_inference_mode_enabled()  # whose tensors count no writes
        and not any(each.is_inference() for each in network.parameters())
        and platform.machine().lower() in ("x86_64", "amd64")
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    )


@contextmanager
def steady(network: nn.Module) -> Iterator[None]:
    """Keep what no step changes inside the block, in which nothing may add hooks."""
    changed = list[tuple[nn.Module, type[nn.Module]]]()
    try:
        if is_faster(network):
            network.__dict__["has_hooks"] = not all(map(is_unchanged, network.modules()))
            network.__dict__["writes"] = _writes(network)
            for module in network.modules():
                if (kind := _STEADY.get(type(module))) is not None and _fits(module):
                    changed.append((module, type(module)))
                    module.__class__ = kind
        yield
    finally:
        for module, kind in changed:
            module.__class__ = kind
        if changed:
            _forget(network)
            for name in ("has_hooks", "writes"):
                network.__dict__.pop(name, None)


def _writes(network: nn.Module) -> list[int]:
    """Return how often Weavers began to write denoisers, and how often each weight was written by torch."""
    return [writes_to("unet"), *(weight._version for weight in network.parameters())]


def _forget(network: nn.Module) -> None:
    for module in network.modules():
        for name in _KEPT:
            module.__dict__.pop(name, None)


def _fits(module: nn.Module) -> bool:
    """Return whether a module computes what its class says, by layers that no hook changes where they are joined."""
    if isinstance(module, nn.Conv2d):
        plain = module.groups == 1 and module.padding_mode == "zeros" and module.kernel_size == (3, 3)
        return plain and "_conv_forward" not in module.__dict__ and "forward" not in module.__dict__
    if isinstance(module, Attention):
        layers = (module.to_q, module.to_k, module.to_v)
        return all(type(layer) is nn.Linear and is_unchanged(layer) and layer.bias is None for layer in layers)
    return "forward" not in module.__dict__


class SteadyConvolution(nn.Conv2d):
    computes_plainly = True  # by another kernel

    def forward(self, input: Tensor) -> Tensor:
        places: Any = self.padding, self.stride, self.dilation
        packed = self.__dict__.get("packed")  # no attribute of the module's tensors, into which adapters are merged
        if packed is None:
            plain = self.weight.detach().to_mkldnn()
            packed = self.__dict__["packed"] = _reorder(plain, *places, 1, list(input.shape))
        out: Tensor = torch.ops.mkldnn._convolution_pointwise(input, packed, self.bias, *places, 1, "none", [], "")
        return out


class SteadyAttention(Attention):
    def forward(self, x: Tensor, text: Tensor | None = None) -> Tensor:
        if text is None:
            if "joined" not in self.__dict__:
                self.__dict__["joined"] = torch.cat([self.to_q.weight, self.to_k.weight, self.to_v.weight])
            q, k, v = map(self._heads, functional.linear(x, self.__dict__["joined"]).chunk(3, -1))
        else:
            q, (k, v) = self._heads(self.to_q(x)), self._read(text)
        out: Tensor = self.to_out[0](functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return out

    def _read(self, text: Tensor) -> tuple[Tensor, Tensor]:
        texts: dict[int, tuple[Tensor, int, Tensor, Tensor]] = self.__dict__.setdefault("texts", {})
        entry, version = texts.get(id(text)), -1 if text.is_inference() else text._version
        if entry is None or entry[1] != version:
            if len(texts) >= _MOST_TEXTS:
                texts.clear()
            # with the text, so that no other one gets its id
            entry = texts[id(text)] = text, version, self._heads(self.to_k(text)), self._heads(self.to_v(text))
        return entry[2:]

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2)


class SteadyTransformerBlock(TransformerBlock):
    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        x = repeated(self.attn1(self.norm1(x)) + x, text)
        x = self.attn2(self.norm2(x), text) + x
        out: Tensor = self.ff(self.norm3(x)) + x
        return out


class SteadyResidualBlock(ResidualBlock):
    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        hidden = self.conv1(functional.silu(self.norm1(x)))
        if self.time_emb_proj is not None and time is not None:
            hidden = hidden + self.time_emb_proj(functional.silu(time))[:, :, None, None]
        hidden = self.conv2(functional.silu(self.norm2(hidden)))
        if self.conv_shortcut is not None:
            x = _pointwise(self.conv_shortcut, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        out: Tensor = x + hidden
        return out


class SteadyImageTransformer(ImageTransformer):
    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        tokens = _pointwise(self.proj_in, self.norm(x).permute(0, 2, 3, 1)).flatten(1, 2)
        for block in self.transformer_blocks:
            tokens = block(tokens, text)
        pixels = tokens.reshape(len(tokens), *x.shape[2:], -1)
        return _pointwise(self.proj_out, pixels).permute(0, 3, 1, 2) + repeated(x, text)


class SteadyUNet(UNet2DConditionModel):
    def forward(self, *inputs: Any, **more: Any) -> tuple[Tensor]:
        if (writes := _writes(self)) != self.__dict__["writes"]:
            self.__dict__["writes"] = writes
            _forget(self)
        return super().forward(*inputs, **more)

    def distinct(self, sample: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        if len(times) > 1:
            return super().distinct(sample, times)
        copies = 1
        while copies < len(sample) and torch.equal(sample[copies], sample[0]):
            copies += 1
        groups = sample.reshape(-1, copies, *sample.shape[1:]) if len(sample) % copies == 0 else sample[:, None]
        same = copies > 1 and not self.__dict__["has_hooks"] and torch.equal(groups, groups[:, :1].expand_as(groups))
        return groups[:, 0] if same else sample, times


def _pointwise(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Return a 1x1 convolution of pixels with their channels last, (..., height, width, channels)."""
    if is_unchanged(layer):
        return functional.linear(x, layer.weight.flatten(1), layer.bias)
    out: Tensor = layer(x.permute(0, 3, 1, 2))
    return out.permute(0, 2, 3, 1)


_STEADY: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: SteadyConvolution, Attention: SteadyAttention, TransformerBlock: SteadyTransformerBlock,
    ResidualBlock: SteadyResidualBlock, ImageTransformer: SteadyImageTransformer, UNet2DConditionModel: SteadyUNet,
}  # fmt: skip
