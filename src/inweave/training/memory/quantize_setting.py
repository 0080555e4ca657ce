"""Why a run cannot have the quantized weights that it asks for (`quantize`)."""

from __future__ import annotations

import torch
from torch import nn

from inweave.models.quantization import format_problems
from inweave.ops.quantized import FORMATS
from inweave.training.config.schema import TrainConfig


def quantize_problems(denoiser: nn.Module, config: TrainConfig, device: torch.device) -> list[str]:
    """Return why a run cannot be quantized; the denoiser needs no weights."""
    if config.quantize == "off":
        return []
    problems = format_problems(denoiser, config.quantize, device)
    if config.precision not in FORMATS[config.quantize].precisions:
        problems.append(
            f'precision = "{config.precision}": the products of 8-bit numbers are bf16; set precision = "bf16"'
        )
    if config.network == "dora":
        problems.append(
            'network = "dora": it needs the norms of the original weights, which are not kept; train a lora'
        )
    return [f'quantize = "{config.quantize}": {problem}' for problem in problems]
