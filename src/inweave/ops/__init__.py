"""Mathematics and kernels: one folder per operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inweave.ops.linear import lora_backward, lora_linear

__all__ = ["lora_backward", "lora_linear"]


def __getattr__(name: str) -> Any:
    """Import the LoRA operation on first use: most modules of this package do not need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from inweave.ops import linear

    return getattr(linear, name)
