"""The layer kinds: how each one applies a low-rank pair or a whole product, and which modules it can stand for.

    Linear      up(down(x)) = (x @ down^T) @ up^T                     W (out, in)
    Conv1D      the same; transformers' GPT-2 layer stores            W (in, out)
    Conv1..3d   down carries the layer's kernel, stride, padding, padding mode and dilation; up is 1x1
                with g groups, W (out, in/g, k...): down (rank, in/g, k...) is applied to each group of inputs,
                up (out, rank, 1...) takes for each group of outputs the results of its own group,
                so that delta = flat(up) @ flat(down) for any rank and any g
                (with up (out, rank/g, 1...) each group has rank rows of `down` of its own)
    Embedding   down^T[x] @ up^T                                      W (rows, features) = (in, out)

A whole product (out, into...) takes the weight's place: x @ product^T, or the convolution with the layer's own
stride, padding, padding mode, dilation and groups. An embedding takes none: to look up a few rows it would have to
be made for the whole table.

A module that overrides `forward` is tried on a small input once: only if it computes what its kind computes do
merged and unmerged agree. transformers' Conv1D is known by its structure; nothing is imported for it.
"""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from inweave.layers.layer import LoraLayer
from inweave.layers.lora import Pair

_CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_STANDARD = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)


class LoraLinear(LoraLayer):
    def low_rank(self, x: torch.Tensor, pair: Pair, dtype: torch.dtype) -> torch.Tensor:
        hidden = functional.linear(x, pair.effective_down().to(dtype))
        up = pair.up.to(dtype)
        if pair.blocks == 1:
            return functional.linear(hidden, up)
        hidden = hidden.reshape(*hidden.shape[:-1], pair.blocks, -1)
        return torch.einsum("...br,bor->...bo", hidden, up.reshape(pair.blocks, -1, up.shape[1])).flatten(-2)

    def through(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weight)


class LoraConv1D(LoraLinear):
    """On transformers' Conv1D: a Linear whose weight is stored (in, out)."""

    transposed: ClassVar[bool] = True


class LoraConv(LoraLayer):
    """On nn.Conv1d, nn.Conv2d and nn.Conv3d."""

    @property
    def groups(self) -> int:
        return cast("int", self.base.groups)

    def low_rank(self, x: torch.Tensor, pair: Pair, dtype: torch.dtype) -> torch.Tensor:
        down, up = pair.effective_down().to(dtype), pair.up.to(dtype)
        groups = self.groups
        if groups > 1 and pair.blocks == 1:
            down = torch.cat([down] * groups)
        base = cast("nn.Conv2d", self.base)
        hidden = base._conv_forward(x, down, None)
        return _CONVOLUTIONS[up.dim() - 2](hidden, up, groups=groups if groups > 1 else pair.blocks)

    def through(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = cast("nn.Conv2d", self.base)._conv_forward(x, weight, None)
        return made

    def along_outputs(self, vector: torch.Tensor) -> torch.Tensor:
        return vector.reshape(-1, *[1] * (self.weight.dim() - 2))


class LoraEmbedding(LoraLayer):
    """On nn.Embedding. There is no input vector, so nothing to drop: ``dropout`` has no effect here."""

    transposed: ClassVar[bool] = True
    embedding: ClassVar[bool] = True

    def low_rank(self, x: torch.Tensor, pair: Pair, dtype: torch.dtype) -> torch.Tensor:
        base = cast("nn.Embedding", self.base)
        rows = functional.embedding(x, pair.down.T, base.padding_idx, scale_grad_by_freq=base.scale_grad_by_freq)
        branch = functional.linear(rows.to(dtype), pair.up.to(dtype))
        return branch if (factor := embed_scale(base)) is None else branch * factor


def embed_scale(module: nn.Module) -> float | torch.Tensor | None:
    """Some models' embeddings multiply what they look up (Bart, Gemma)."""
    return cast("float | torch.Tensor | None", getattr(module, "embed_scale", None))


def is_conv1d_of_transformers(module: nn.Module) -> bool:
    if not any(kind.__name__ == "Conv1D" for kind in type(module).__mro__):
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and getattr(module, "nf", None) == weight.shape[1]


def kind_of(module: nn.Module) -> type[LoraLayer] | None:
    match module:
        case LoraLayer():
            return type(module)
        case nn.Linear():
            return LoraLinear
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            return LoraConv
        case nn.Embedding():
            return LoraEmbedding
    return LoraConv1D if is_conv1d_of_transformers(module) else None


def unfit(module: nn.Module) -> str | None:
    """Why a module cannot carry adapters, or None if it can."""
    kind = kind_of(module)
    if kind is None:
        return (
            f"{type(module).__name__} is no kind of layer that takes LoRA "
            "(Linear, Conv1d, Conv2d, Conv3d, Embedding, transformers' Conv1D)"
        )
    if isinstance(module, LoraLayer):
        return None
    weight = module._parameters.get("weight")
    if weight is None or module._modules:
        return "its weight is computed from other tensors (a weight norm or another parametrization)"
    if is_lazy(weight):
        return "its weight has no shape yet (a lazy module): run the model once first"
    if not weight.is_floating_point():
        return f"its weight is stored as {weight.dtype}, and only floating-point weights take LoRA"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "max_norm rewrites the embedding's rows whenever they are used"
    return None if type(module).forward in {kind.forward for kind in _STANDARD} else _otherwise(module, weight)


@torch.no_grad()
def _otherwise(module: nn.Module, weight: torch.Tensor) -> str | None:
    """Whether a module with a forward of its own computes something else than its kind."""
    if weight.is_meta:
        return None
    given, expected = _trial(module, weight)
    reason = f"{type(module).__name__} overrides forward and computes something else than its kind"
    try:
        got = type(module).forward(module, given)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return f"{reason} ({error})"
    if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
        return reason
    room = 0.02 * float(expected.abs().max())  # roundings of a 16-bit weight; a different function is further away
    return None if float((got - expected).abs().max()) <= room else reason


def _trial(module: nn.Module, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A small input, and what the kind makes of it."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(weight)

    bias = module._parameters.get("bias")
    if isinstance(module, nn.Embedding):
        rows = torch.arange(min(3, weight.shape[0]), device=weight.device)
        found = weight[rows]
        return rows, found if (factor := embed_scale(module)) is None else found * factor
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        pads = module.padding if isinstance(module.padding, tuple) else module.kernel_size
        sizes = [d * (k - 1) + 2 + p for k, d, p in zip(module.kernel_size, module.dilation, pads, strict=True)]
        given = noise(1, module.in_channels, *sizes)
        return given, module._conv_forward(given, weight, bias)
    matrix = weight if isinstance(module, nn.Linear) else weight.T
    given = noise(2, matrix.shape[1])
    return given, functional.linear(given, matrix, bias)
