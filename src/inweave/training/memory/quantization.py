"""The denoiser's frozen weights in 8-bit floating point (`quantize = "fp8"`).

    which      the linear layers of attention and feed-forward parts, which see every token, if both sides are large
               enough (`inweave.ops.quantized`); with and without an adapter
    when       after adapters are attached: their factors start from, and stay in, full precision
    memory     the two fp8 copies of a weight have the bytes of one in 16 bits, so plans do not change

The adapter is relative to the original weights, and files do not change. The run itself, with its samples and
validation, computes with the quantized weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from inweave.ops.quantized import FORMATS
from inweave.training.adapters.order import projections
from inweave.training.adapters.targets import token_layers
from inweave.training.config.schema import TrainConfig


def quantize_problems(denoiser: nn.Module, config: TrainConfig, device: torch.device) -> list[str]:
    """Return why a run cannot be quantized; the denoiser needs no weights."""
    if config.quantize == "off":
        return []
    format = FORMATS[config.quantize]
    problems = format.device_problems(device)
    if config.precision != "bf16":
        problems.append(
            f'precision = "{config.precision}": the products of 8-bit numbers are bf16; set precision = "bf16"'
        )
    if config.network == "dora":
        problems.append(
            'network = "dora": it needs the norms of the original weights, which are not kept; train a lora'
        )
    if not any(map(format.fits, token_layers(denoiser).values())):
        problems.append(f"no linear layer of {type(denoiser).__name__} is large enough to be faster; leave it out")
    return [f'quantize = "{config.quantize}": {problem}' for problem in problems]


def quantize_denoiser(model: Any, format: str, device: torch.device) -> str:
    """Quantize a loaded model's denoiser in place; returns a note for the log."""
    kind = FORMATS[format]
    model.release_weaver()  # it holds the original weights
    layers = {name: layer for name, layer in token_layers(model.denoiser).items() if isinstance(layer, nn.Linear)}
    chosen = {name: layer for name, layer in layers.items() if kind.fits(layer)}
    for names in projections(chosen):
        group = [chosen[name] for name in names]
        if len({(layer.weight.shape, layer.weight.dtype, layer.weight.device) for layer in group}) == 1:
            kind.quantize(*group, device=device)
        else:
            for layer in group:
                kind.quantize(layer, device=device)
    rest = "" if len(chosen) == len(layers) else "; the others are small"
    count = f"{len(chosen)} of the {len(layers)} linear layers that see every token"
    return f"{count} are multiplied in 8 bits ({format}){rest}"
