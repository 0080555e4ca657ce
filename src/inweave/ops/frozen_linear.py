"""A linear layer with a frozen weight, whose products are divided where that fills a GPU (`inweave.ops.products`).

y  = x W^T + b
dX = dY W

An operator, so that a compiled region calls it as it is; where no product is divided it is torch's own layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from inweave.ops.implementation import frozen
from inweave.ops.products import is_divided, multiply

#: a compiler decides by them alone, before it knows the GPU; the operator multiplies fewer rows, too, in one part
_MANY_ROWS = 1024


class FrozenLinear(nn.Linear):
    """A linear layer of a network that is not trained; `frozen_linear` in place of torch's function."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return frozen_linear(input, self.weight, self.bias)


def frozen_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`functional.linear`; a trained weight or bias has its gradient as always."""
    rows, (out, into) = x.shape[:-1].numel(), weight.shape
    if (
        not x.is_cuda
        or x.element_size() != 2
        or rows < _MANY_ROWS
        or not frozen(weight, bias)
        or any(tensor is not None and tensor.dtype != x.dtype for tensor in (weight, bias))
        or torch.is_autocast_enabled("cuda")
    ):
        return functional.linear(x, weight, bias)
    if not torch.compiler.is_compiling() and not (
        is_divided(rows, out, into, x.device) or is_divided(rows, into, out, x.device)
    ):
        return functional.linear(x, weight, bias)
    result: torch.Tensor = torch.ops.inweave.frozen_linear(x, weight, bias)
    return result


torch.library.define("inweave::frozen_linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
torch.library.define("inweave::frozen_linear_backward", "(Tensor grad_out, Tensor weight) -> Tensor")


@torch.library.impl("inweave::frozen_linear", "default")
def _forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return multiply(x.reshape(-1, x.shape[-1]), weight.T, bias).view(*x.shape[:-1], weight.shape[0])


@torch.library.impl("inweave::frozen_linear_backward", "default")
def _backward(grad_out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = grad_out.reshape(-1, grad_out.shape[-1])
    return multiply(rows, weight).view(*grad_out.shape[:-1], weight.shape[1])


def _forward_shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _backward_shape(grad_out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return grad_out.new_empty(*grad_out.shape[:-1], weight.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _gradients(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (weight,) = ctx.saved_tensors
    grad_x = torch.ops.inweave.frozen_linear_backward(grad_out, weight) if ctx.needs_input_grad[0] else None
    return grad_x, None, None


torch.library.register_fake("inweave::frozen_linear", _forward_shape)
torch.library.register_fake("inweave::frozen_linear_backward", _backward_shape)
torch.library.register_autograd("inweave::frozen_linear", _gradients, setup_context=_save)
