"""Why a run cannot have the quantized weights that it asks for (`quantize`, `qat`)."""

from __future__ import annotations

import torch
from torch import nn

from inweave.models.quantization import format_problems, quantized_names
from inweave.ops.quantized import FORMATS, QuantizedLayer
from inweave.training.adapters.targets import DENOISER, select_modules
from inweave.training.config.schema import TrainConfig


def quantize_problems(denoiser: nn.Module, config: TrainConfig, device: torch.device) -> list[str]:
    """Return why a run cannot be quantized, or trained for it; the denoiser needs no weights."""
    rounded = [] if config.qat == "off" else _trained_problems(denoiser, config)
    if config.quantize == "off":
        return rounded
    keep = config.quantize == "keep"
    problems = [] if keep else format_problems(denoiser, config.quantize, device)
    if keep and not any(isinstance(module, QuantizedLayer) for module in denoiser.modules()):
        problems.append("no weight of the denoiser is quantized in its file; set int8 or another format to quantize it")
    if not keep and config.precision not in FORMATS[config.quantize].precisions:
        problems.append(
            f'precision = "{config.precision}": the products of 8-bit numbers are bf16; set precision = "bf16"'
        )
    if config.network == "dora":
        problems.append(
            'network = "dora": it needs the norms of the original weights, which are not kept; train a lora'
        )
    return [*(f'quantize = "{config.quantize}": {problem}' for problem in problems), *rounded]


def _trained_problems(denoiser: nn.Module, config: TrainConfig) -> list[str]:
    """Return why no trained weight can be rounded."""
    layers = quantized_names(denoiser, config.qat)
    if config.start_from is None and not layers & {*select_modules(DENOISER, denoiser, config)}:
        return [
            f'qat = "{config.qat}": quantizing to {config.qat} changes none of the layers that are trained; choose '
            "other targets, or leave it out"
        ]
    return []
