"""What a module computes besides its own operation."""

from __future__ import annotations

from torch import nn


def is_unchanged(base: nn.Module) -> bool:
    """Return whether the module has no hooks and no overridden forward on the instance."""
    hooks = base._forward_hooks or base._forward_pre_hooks or base._backward_hooks or base._backward_pre_hooks
    return not hooks and "forward" not in base.__dict__ and "_conv_forward" not in base.__dict__
