"""Feed-forward parts whose activation is the GELU with tanh.

GELU            one kernel each way (`ops.activation`)
FeedForward     compiled, two frozen fp8 layers with GELU between them are one operation (`ops.fp8.feed_forward`);
                with adapters, hooks, dropout or other layers, diffusers' own path, with the GELU above

Eager code runs the layers one by one: gradient checkpointing would recompute the whole operation, with the second
product, which is not needed.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from torch import Tensor, nn

from inweave.models.fitting import accepts, has
from inweave.ops.activation import tanh_gelu
from inweave.ops.common.gradients import are_frozen
from inweave.ops.common.modules import is_unchanged
from inweave.ops.fp8 import frozen_feed_forward, select
from inweave.ops.quantized.fp8 import Fp8Linear


class FusedGELU(GELU):
    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.approximate != "tanh":
            return super().forward(hidden_states)
        return tanh_gelu(self.proj(hidden_states))


class FusedFeedForward(FeedForward):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        parts: Any = tuple(self.net)
        if not args and not kwargs and tuple(map(type, parts[:2])) == (FusedGELU, nn.Dropout) and len(parts) == 3:
            activation, dropout, last = parts
            drops = (dropout.p > 0 and dropout.training) or not is_unchanged(dropout)
            if (
                not drops
                and activation.approximate == "tanh"
                and is_frozen_in_8_bits(activation.proj, activation, last)
            ):
                return frozen_feed_forward(hidden_states, activation.proj, last)
        return super().forward(hidden_states, *args, **kwargs)


def is_frozen_in_8_bits(first: nn.Module, activation: nn.Module, second: nn.Module) -> bool:
    """Return whether two layers are frozen, in 8 bits and compiled, and no hook sees the tensor between them."""
    return (
        select.is_traced()
        and isinstance(first, Fp8Linear)
        and isinstance(second, Fp8Linear)
        and are_frozen(first.bias, second.bias)
        and all(map(is_unchanged, (first, activation, second)))
    )


def gelu_fits(module: GELU) -> bool:
    """Return whether `FusedGELU` computes what this module does."""
    return accepts(GELU.forward, "hidden_states") and has(module, approximate="tanh") and hasattr(module, "proj")


def feed_forward_fits(module: FeedForward) -> bool:
    """Return whether `FusedFeedForward` computes what this module does."""
    parts = [type(part) for part in module.net]
    return (
        accepts(FeedForward.forward, "hidden_states", "args", "kwargs")
        and len(parts) == 3
        and parts[0] in (GELU, FusedGELU)
        and parts[1] is nn.Dropout
    )
