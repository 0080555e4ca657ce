"""The contract of a format of quantized weights: the tensors of a weight, and the layer that holds them.

    y  = x W^T + b         `QuantizedWeight.product`
    dx = dy W              `QuantizedWeight.gradient`; W has no gradient of its own

A layer is quantized in place: it remains the same object, with another class, so that references to it stay valid.
Reading `weight` returns the numbers that the forward pass multiplies with; it cannot be assigned.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

#: an activation as quantized rows: numbers (M, K) and scales (M, 1)
Rows = tuple[Tensor, Tensor]


class QuantizedWeight(Protocol):
    """A weight (out, in): a `NamedTuple` of at most four tensors, of which the first has one row per output.

    Methods rather than properties: a compiler traces methods of a `NamedTuple`.
    """

    def __iter__(self) -> Iterator[Tensor]: ...

    def __getitem__(self, index: Any, /) -> Any: ...

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """Quantize a matrix."""
        ...

    def split(self, count: int) -> Sequence[Self]:
        """Return views for each of ``count`` layers whose weights are equal numbers of rows of this one."""
        ...

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self | None:
        """Return the weight that these are the `split` of, in this order, without copying; None if there is none."""
        ...

    def format(self) -> str:
        """Return the format's name in the registry."""
        ...

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return (out, in) as the forward pass uses it."""
        ...

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + b of a matrix x, with a gradient for x and a trained bias."""
        ...

    def product(self, x: Tensor, bias: Tensor | None, rows: Rows | None) -> Tensor:
        """Return x W^T + b in new memory, without a gradient; ``rows``: x, if `traced_rows` quantized it."""
        ...

    def gradient(self, grad_out: Tensor, rows: Rows | None) -> Tensor:
        """Return dY W in new memory; ``rows``: dY, if `traced_rows` quantized it."""
        ...

    def traced_rows(self, x: Tensor) -> Rows | tuple[None, None]:
        """Return x as a compiled region quantizes it, in plain operations; (None, None) if only W is quantized."""
        ...


class QuantizedLinear(nn.Linear):
    """A linear layer with a quantized weight; a format is a subclass. The tensors of the weight are buffers."""

    #: the class of the weight
    weights: ClassVar[Any]
    #: bytes of all tensors of the weight for each of its parameters
    bytes_per_parameter: ClassVar[float]

    dtype: torch.dtype  # of the original weight

    @classmethod
    @abstractmethod
    def fits(cls, module: nn.Module) -> bool:
        """Return whether a layer can be quantized, and gains by it."""

    @classmethod
    @abstractmethod
    def device_problems(cls, device: torch.device) -> list[str]:
        """Return why a device cannot compute with the format; empty if it can."""

    @classmethod
    @torch.no_grad()
    def quantize(cls, *linears: nn.Linear, device: torch.device | None = None) -> None:
        """Quantize the weights of layers in place.

        Args:
            linears: one layer, or several of one shape and input: these are quantized as one matrix, which
                `joint_weight` returns.
            device: where to compute, if the weights are on another device.
        """
        weight = torch.cat([linear.weight.detach().to(device or linear.weight.device) for linear in linears])
        whole = cls.weights(*(tensor.to(linears[0].weight.device) for tensor in cls.weights.of(weight)))
        for linear, quantized in zip(linears, whole.split(len(linears)), strict=True):
            dtype = linear.weight.dtype
            del linear._parameters["weight"]
            linear.__class__ = cls
            linear.dtype = dtype  # type: ignore[assignment]
            for name, tensor in quantized._asdict().items():
                linear.register_buffer(name, tensor)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.quantized.dequantized(self.dtype)

    @property
    def quantized(self) -> QuantizedWeight:
        """The tensors of the weight."""
        weight: QuantizedWeight = self.weights(*(self._buffers[name] for name in self.weights._fields))
        return weight

    def forward(self, input: Tensor) -> Tensor:
        # a matrix inside: if an autograd function returned a view, it could not be added to in place
        result = self.quantized.linear(input.reshape(-1, self.in_features), self.bias)
        return result.view(*input.shape[:-1], self.out_features)


def joint_weight(linears: Sequence[nn.Module]) -> QuantizedWeight | None:
    """Return the weight that layers were quantized as, in this order; None if there is none, or they were moved."""
    kinds = {type(linear) for linear in linears}
    if len(kinds) > 1:
        return None
    kind: Any = kinds.pop()
    joined: QuantizedWeight | None = kind.weights.joined([linear.quantized for linear in linears])
    return joined
