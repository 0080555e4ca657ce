"""Additions and multiplications of a published network, counted on the meta device, for the limits.

forward     all products and attention
step        forward and backward of a frozen base: the gradient of an input costs one forward pass, that of attention
            two and a half; weights get none
"""

from __future__ import annotations

from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from inweave.bench.models import published_blueprint
from inweave.models.blank import blank
from inweave.ops.tensors.peak import MetaAttention


def forward_operations(name: str, batch: int, size: int, dtype: torch.dtype) -> float:
    products, attention = _counts(name, size, dtype)
    return batch * float(products + attention)


def step_operations(name: str, batch: int, size: int, dtype: torch.dtype) -> float:
    products, attention = _counts(name, size, dtype)
    return batch * (2.0 * products + 3.5 * attention)


@cache
def _counts(name: str, size: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return (products, attention) of the denoiser for one image."""
    model = blank(published_blueprint(name), dtype)
    family = model.family
    latents = torch.empty(model.latent_space.shape(size, size), dtype=dtype, device="meta")
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), MetaAttention():
        text = family.encode(model, family.example_ids(model, 1, latents.device), None)
        inputs = family.batch_inputs(model, text, torch.empty(1, 6, device="meta"), latents.shape, 1.0)
        with counter:
            family.denoise(model, latents, torch.empty(1, device="meta"), inputs)
    by_operation = counter.get_flop_counts()["Global"]
    attention = sum(count for operation, count in by_operation.items() if "attention" in str(operation))
    return counter.get_total_flops() - attention, attention
