"""Tiny upscalers with random weights, under the names that files in use have."""

from __future__ import annotations

import torch
from torch import Tensor


def compact(scale: int = 2, channels: int = 8, layers: int = 3) -> dict[str, Tensor]:
    """Return a compact network (SRVGGNet): convolutions and PReLUs in turn."""
    random = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for number in range(layers):
        if number % 2:
            tensors[f"body.{number}.weight"] = torch.rand(channels, generator=random) / 4
            continue
        out = 3 * scale**2 if number == layers - 1 else channels
        tensors |= _conv(f"body.{number}", channels if number else 3, out, random)
    return tensors


def esrgan(spelling: str, channels: int = 8, growth: int = 4, blocks: int = 2, ups: int = 2) -> dict[str, Tensor]:
    """Return ESRGAN's network under the names of BasicSR, of the first release, or of the one before."""
    random = torch.Generator().manual_seed(2)
    tensors = _conv("conv_first", 3, channels, random)
    for block in range(blocks):
        for dense in (1, 2, 3):
            for conv in range(1, 6):
                inputs, out = channels + (conv - 1) * growth, channels if conv == 5 else growth
                tensors |= _conv(f"body.{block}.rdb{dense}.conv{conv}", inputs, out, random)
    for name in ("conv_body", *(f"conv_up{number + 1}" for number in range(ups)), "conv_hr"):
        tensors |= _conv(name, channels, channels, random)
    tensors |= _conv("conv_last", channels, 3, random)
    return {_spelled(name, spelling, blocks, ups): tensor for name, tensor in tensors.items()}


def _conv(name: str, inputs: int, out: int, random: torch.Generator) -> dict[str, Tensor]:
    weight = torch.randn(out, inputs, 3, 3, generator=random) / (3 * inputs**0.5)
    return {f"{name}.weight": weight, f"{name}.bias": torch.randn(out, generator=random) / 10}


def _spelled(name: str, spelling: str, blocks: int, ups: int) -> str:
    module, _, kind = name.rpartition(".")
    parts = module.split(".")
    if spelling == "trunk":
        if parts[0] == "body":
            return f"RRDB_trunk.{parts[1]}.RDB{parts[2][-1]}.{parts[3]}.{kind}"
        names = {"conv_body": "trunk_conv", "conv_hr": "HRconv"} | {f"conv_up{n}": f"upconv{n}" for n in (1, 2)}
        return f"{names.get(module, module)}.{kind}"
    if spelling == "esrgan":
        if parts[0] == "body":
            return f"model.1.sub.{parts[1]}.RDB{parts[2][-1]}.{parts[3]}.0.{kind}"
        names = {"conv_first": "model.0", "conv_body": f"model.1.sub.{blocks}"}
        names |= {f"conv_up{number}": f"model.{3 * number}" for number in range(1, ups + 1)}
        names |= {"conv_hr": f"model.{3 * ups + 2}", "conv_last": f"model.{3 * ups + 4}"}
        return f"{names[module]}.{kind}"
    return name
