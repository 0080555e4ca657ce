"""Quantization-aware training: a layer computes with the weight that merging into a quantized base will give.

    V  = W + sum over the live adapters of  strength * change        in float32, as `LoraLayer.merge` computes it
    y  = x Q(V)^T + b        dx = dy Q(V)                            Q: quantized and dequantized (`ops.quantized`)

Rounding is trained through as if Q were the identity (straight-through): dV = dy^T x, so factors get the gradients of
the layer's own formula for a constant x, and no matrix of the weight's size is needed for them. Q(V) is computed again
in the backward pass, so that one such weight exists at a time. Inputs are not rounded, also not for fp8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from inweave.errors import ConfigError
from inweave.layers.branch import Branch
from inweave.layers.layer import LoraLayer
from inweave.ops.common.gradients import first_derivative_only
from inweave.ops.common.modules import is_unchanged
from inweave.ops.common.precision import without_autocast
from inweave.ops.common.transient import transient
from inweave.ops.kinds import LayerKind, LinearKind
from inweave.ops.quantized import FORMATS, QuantizedLayer
from inweave.ops.tensors.subclasses import whole

Acting = tuple[tuple[Branch, float], ...]


class Rounding:
    """Whether layers round; while ``active`` is False, they compute as if they had not been changed."""

    def __init__(self) -> None:
        self.active = True


def fake_quantize(layers: Iterable[LoraLayer], format: str) -> Rounding:
    """Let layers compute with the quantized sum of weight and adapters from now on, also outside of training.

    Args:
        layers: layers of torch's own classes, whose base is not quantized, or quantized in this format.
        format: a format of `inweave.ops.quantized`.

    Returns:
        What switches all of them off and on.

    Raises:
        ConfigError: a layer cannot be quantized in this format or has hooks, or its adapter has a dropout.
    """
    chosen, kind = list(layers), FORMATS[format]
    problems = []
    for layer in chosen:
        own = layer.base.quantized.format() if isinstance(layer.base, QuantizedLayer) else ""
        if not (own == format if own else kind.fits(layer.base)):
            problems.append(f"{layer.label}: {type(layer.base).__name__} is not a layer that {format} quantizes")
        if not is_unchanged(layer.base):
            problems.append(f"{layer.label}: has hooks, or a LoRA beside its weight, which qat would leave out")
        problems += [
            f"{layer.label}: adapter {name!r} has a dropout, and what is dropped cannot be merged; set it to 0"
            for name in layer.adapters
            if layer.branch(name).drops
        ]
    if problems:
        raise ConfigError(problems[:5])
    rounding = Rounding()
    for layer in chosen:
        layer.operation = QuantizationAware(layer, format, rounding)
    return rounding


class QuantizationAware:
    """The operation of one layer."""

    def __init__(self, layer: LoraLayer, format: str, rounding: Rounding | None = None) -> None:
        self.layer, self.format = layer, format
        self._rounding, self._plain = rounding or Rounding(), layer.operation

    def output(self, x: Tensor, acting: Acting, training: bool) -> Tensor | None:
        """Return the layer's output; None to take the general path. At least one adapter acts."""
        if not self._rounding.active:  # without gradients, the plain operation would keep a plan for later
            unrounded = self._plain if torch.is_grad_enabled() else None
            return None if unrounded is None else unrounded.output(x, acting, training)
        layer = self.layer
        changes: list[Tensor] = []
        factors: list[float] = []
        if torch.is_grad_enabled():
            constant = plain = x.detach()
            if any(branch.magnitude is not None for branch, _ in acting):
                with torch.no_grad():
                    plain = layer.base(constant)
            for branch, strength in acting:
                changes.append(branch(layer._change, constant, plain))
                factors.append(strength if branch.magnitude is not None else strength * branch.scale)
        weight = partial(self.weight, acting)
        bias = layer._parameters.get("bias")
        y: Tensor = _Product.apply(x, bias, weight, layer.kind, layer.base, factors, *changes)  # type: ignore[no-untyped-call]
        return y

    @torch.no_grad()
    @without_autocast
    @transient()
    def weight(self, acting: Acting, dtype: torch.dtype) -> Tensor:
        """Return Q(V)."""
        layer, kind = self.layer, FORMATS[self.format].weights
        base = layer.base
        own = base.quantized.dequantized(torch.float32) if isinstance(base, QuantizedLayer) else whole(layer.weight)
        rows = layer.rows(own).float()
        total = rows.clone()
        for branch, strength in acting:
            total += strength * branch(_change, rows)
        stored: Tensor = kind.of(total).dequantized(dtype)
        return stored.reshape(layer.out, *layer.into)


def _change(branch: Branch, rows: Tensor) -> Tensor:
    """Return what an adapter adds to the weight at strength 1, as `inweave.ops.delta.change` computes it."""
    added: Tensor = branch.scale * branch.product()
    if branch.magnitude is None:
        return added
    changed = rows + added
    norm: Tensor = torch.linalg.vector_norm(changed, dim=1, keepdim=True)
    return changed / norm.clamp_min(torch.finfo(norm.dtype).tiny) * branch.magnitude.float().unsqueeze(1) - rows


class _Product(torch.autograd.Function):
    """The product with a weight that is computed when needed; each change gets the gradient of the output."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        weight: Callable[[torch.dtype], Tensor],
        kind: LayerKind,
        base: nn.Module,
        factors: list[float],
        *changes: Tensor,
    ) -> Tensor:
        ctx.weight, ctx.kind, ctx.base, ctx.factors = weight, kind, base, factors
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.bias_axes = None if bias is None else kind.along_outputs(base, bias).dim()
        if type(kind) is LinearKind:
            return functional.linear(x, weight(x.dtype), None if bias is None else bias.to(x.dtype))
        y: Tensor = kind.apply(base, x, weight(x.dtype))
        return y if bias is None else y + kind.along_outputs(base, bias)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        of_x, of_bias = ctx.needs_input_grad[:2]
        dx = _input_gradient(ctx, dy).to(ctx.dtype) if of_x else None
        summed = None
        if of_bias:
            axis = dy.dim() - ctx.bias_axes
            summed = dy.sum([each for each in range(dy.dim()) if each != axis])
        return dx, summed, None, None, None, None, *(dy if each == 1 else dy * each for each in ctx.factors)


def _input_gradient(ctx: Any, dy: Tensor) -> Tensor:
    if type(ctx.kind) is LinearKind:
        return torch.matmul(dy, ctx.weight(dy.dtype))
    # the function is linear in x, so its gradient does not depend on x
    with torch.enable_grad():
        x = dy.new_zeros(ctx.shape).requires_grad_()
        y = ctx.kind.apply(ctx.base, x, ctx.weight(dy.dtype))
    return torch.autograd.grad(y, x, dy)[0]
