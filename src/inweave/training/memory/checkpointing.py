"""Computing again instead of keeping: time for memory.

off         every intermediate result is kept for the backward pass
selective   products with frozen weights and attention are kept; everything cheap, the adapters' own products
            included, is computed again
full        only the inputs of blocks are kept, everything inside is computed again
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

#: what selective keeps, and which argument of it is the weight, where it has one
_KEPT = {
    "mm": 1, "addmm": 2, "bmm": None, "baddbmm": None, "convolution": 1, "_scaled_dot_product_flash_attention": None,
    "_scaled_dot_product_efficient_attention": None, "_scaled_dot_product_cudnn_attention": None,
    "_scaled_dot_product_flash_attention_for_cpu": None,
}  # fmt: skip


def apply_checkpointing(networks: Mapping[str, nn.Module], mode: str) -> None:
    """Switch recomputation on in every network that offers it; dropout of the base stays as it is."""
    if mode == "off":
        return
    again: Any = partial(checkpoint, use_reentrant=False)
    if mode == "selective":
        again = partial(again, context_fn=partial(create_selective_checkpoint_contexts, _policy))
    network: Any
    for network in networks.values():
        if hasattr(network, "enable_gradient_checkpointing"):
            network.enable_gradient_checkpointing(again)
            continue
        for module in network.modules():  # transformers asks for training mode, which is also that of its dropout
            if any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__):
                module.forward = _recomputed(module.forward, again)


def _recomputed(forward: Any, again: Any) -> Any:
    def inner(*given: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*given, **named)
        # a cache of earlier tokens has no place in training, and a second pass would add to it again
        given = tuple(None if _is_cache(value) else value for value in given)
        named = {name: None if _is_cache(value) else value for name, value in named.items()}
        return again(forward, *given, **named)

    return inner


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length")


def _policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    name = operation.__name__.partition(".")[0] if hasattr(operation, "__name__") else str(operation)
    place = _KEPT.get(name)
    learns = (
        place is not None and arguments[place].requires_grad
    )  # of low rank: cheap, and as large as what it is added to
    return CheckpointPolicy.MUST_SAVE if name in _KEPT and not learns else CheckpointPolicy.PREFER_RECOMPUTE
