"""Projections of one input: queries, keys and values of an attention module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def project(attention: nn.Module, names: Sequence[str], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The outputs of these submodules for ``x``; they may be slices of one tensor, dense in the last axis."""
    return tuple(getattr(attention, name)(x) for name in names)
