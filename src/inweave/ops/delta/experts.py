"""The product of a LoRA for every expert: [e,o,i] = sum_r up[o,r,e] * down[e,r,i], or [e,i,o] with the inputs first."""

from __future__ import annotations

import torch

from inweave.ops.delta.fit import misfit


def factors_of(
    up: torch.Tensor, down: torch.Tensor, experts: int, inputs_first: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (left, right) with product = left @ right for every expert."""
    if up.dim() != 2 or down.dim() != 2 or up.shape[1] != down.shape[0] or down.shape[0] % experts:
        raise misfit("lora", "the factors of experts do not fit together", tuple(up.shape), down)
    left = up.reshape(up.shape[0], -1, experts).permute(2, 0, 1)
    right = down.reshape(experts, -1, down.shape[1])
    return (right.transpose(1, 2), left.transpose(1, 2)) if inputs_first else (left, right)


def product(up: torch.Tensor, down: torch.Tensor, experts: int = 1, inputs_first: bool = False) -> torch.Tensor:
    """Return the product in the layout of the weight: a matrix if there is one expert."""
    left, right = factors_of(up, down, experts, inputs_first)
    result = torch.bmm(left, right)
    return result if experts > 1 else result[0]
