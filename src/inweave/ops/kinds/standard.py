"""The standard kinds: how each one applies a low-rank pair or a whole change.

    Linear      up(down(x)) = (x @ down^T) @ up^T                     W (out, in), or (in, out) if transposed
    Conv1..3d   down carries the layer's kernel, stride, padding, padding mode and dilation; up is 1x1
                with g groups, W (out, in/g, k...): down (rank, in/g, k...) is applied to each group of inputs,
                up (out, rank, 1...) uses for each group of outputs the results of its own group,
                so that delta = flat(up) @ flat(down) for any rank and any g
                (with up (out, rank/g, 1...) each group has rank rows of `down` of its own)
    Embedding   down^T[x] @ up^T                                      W (rows, features) = (in, out)

A whole change (out, into...) replaces the weight: x @ D^T, or the convolution with the layer's own stride, padding,
padding mode, dilation and groups. An embedding takes low-rank pairs only: otherwise, looking up a few rows would
require the change of the whole table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from inweave.ops.kinds.base import LayerKind, OnHidden, noise

_CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
STANDARD_FORWARDS = frozenset(
    kind.forward for kind in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
)  # fmt: skip


@dataclass(frozen=True)
class LinearKind(LayerKind):
    """The kind of a linear layer: y = x W^T + b.

    Args:
        transposed: the weight is stored as (in, out) instead of (out, in).
    """

    linear: ClassVar[bool] = True

    def apply(self, module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x, weight)

    def apply_low_rank(
        self,
        module: nn.Module,
        x: Tensor,
        down: Tensor,
        up: Tensor,
        blocks: int,
        dtype: torch.dtype,
        on_hidden: OnHidden | None = None,
    ) -> Tensor:
        hidden = functional.linear(x, down.to(dtype))
        if on_hidden is not None:
            hidden = on_hidden(hidden, -1)
        up = up.to(dtype)
        if blocks == 1:
            return functional.linear(hidden, up)
        hidden = hidden.reshape(*hidden.shape[:-1], blocks, -1)
        return torch.einsum("...br,bor->...bo", hidden, up.reshape(blocks, -1, up.shape[1])).flatten(-2)

    def example(self, module: nn.Module, weight: Tensor) -> Tensor:
        return noise(weight, 2, *self.shape(weight)[1])


@dataclass(frozen=True)
class ConvKind(LayerKind):
    """The kind of nn.Conv1d, nn.Conv2d, nn.Conv3d and their subclasses."""

    def groups(self, module: nn.Module) -> int:
        return cast("int", module.groups)

    def apply(self, module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
        result: Tensor = cast("nn.Conv2d", module)._conv_forward(x, weight, None)
        return result

    def apply_low_rank(
        self,
        module: nn.Module,
        x: Tensor,
        down: Tensor,
        up: Tensor,
        blocks: int,
        dtype: torch.dtype,
        on_hidden: OnHidden | None = None,
    ) -> Tensor:
        down, up = down.to(dtype), up.to(dtype)
        groups = self.groups(module)
        if groups > 1 and blocks == 1:
            down = torch.cat([down] * groups)
        hidden = cast("nn.Conv2d", module)._conv_forward(x, down, None)
        if on_hidden is not None:
            hidden = on_hidden(hidden, 1 - up.dim())
        return _CONVOLUTIONS[up.dim() - 2](hidden, up, groups=groups if groups > 1 else blocks)

    def along_outputs(self, module: nn.Module, vector: Tensor) -> Tensor:
        return vector.reshape(-1, *[1] * len(cast("nn.Conv2d", module).kernel_size))

    def example(self, module: nn.Module, weight: Tensor) -> Tensor:
        conv = cast("nn.Conv2d", module)
        pads = conv.padding if isinstance(conv.padding, tuple) else conv.kernel_size
        sizes = [d * (k - 1) + 2 + p for k, d, p in zip(conv.kernel_size, conv.dilation, pads, strict=True)]
        return noise(weight, 1, conv.in_channels, *sizes)


@dataclass(frozen=True)
class EmbeddingKind(LayerKind):
    """The kind of nn.Embedding. Its inputs are not vectors, so dropout of inputs has no effect."""

    transposed: bool = True
    embedding: ClassVar[bool] = True

    def apply(self, module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
        rows = functional.embedding(x, weight.T)
        return rows if (factor := embed_scale(module)) is None else rows * factor

    def apply_low_rank(
        self,
        module: nn.Module,
        x: Tensor,
        down: Tensor,
        up: Tensor,
        blocks: int,
        dtype: torch.dtype,
        on_hidden: OnHidden | None = None,
    ) -> Tensor:
        padding, by_frequency = getattr(module, "padding_idx", None), getattr(module, "scale_grad_by_freq", False)
        rows = functional.embedding(x, down.T, padding, scale_grad_by_freq=by_frequency)
        rows = rows.to(dtype)
        if on_hidden is not None:
            rows = on_hidden(rows, -1)
        change = functional.linear(rows, up.to(dtype))
        return change if (factor := embed_scale(module)) is None else change * factor

    def obstacle(self, module: nn.Module, weight: Tensor) -> str | None:
        if getattr(module, "max_norm", None) is not None:
            return "max_norm rewrites the embedding's rows whenever they are used"
        return None

    def example(self, module: nn.Module, weight: Tensor) -> Tensor:
        return torch.arange(min(3, weight.shape[0]), device=weight.device)


def embed_scale(module: nn.Module) -> float | Tensor | None:
    """Return the factor by which some models multiply their embeddings (Bart, Gemma), or None."""
    return cast("float | Tensor | None", getattr(module, "embed_scale", None))
