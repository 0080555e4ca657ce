"""The contract of a format of quantized weights: the tensors of a weight, and the layer that holds them.

    y  = x W^T + b         `QuantizedWeight.product`
    dx = dy W              `QuantizedWeight.gradient`; W has no gradient of its own

A layer is quantized in place: it remains the same object, with another class, so that references to it stay valid.
Reading `weight` returns the numbers that the forward pass multiplies with; it cannot be assigned.

A format is stable: `of(dequantized(float32))` has the same bits. So scales have 12 significant bits (`coarse`): their
products with numbers of up to 12 bits are exact in float32, and the largest of a row gives the scale back.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol, Self, cast

import torch
from torch import Tensor, nn

#: an activation as quantized rows: numbers (M, K) and scales (M, 1)
Rows = tuple[Tensor, Tensor]
#: a row whose numbers are all smaller becomes zero: its scale would not be a normal float32 number
SMALLEST = 2.0**-100


class QuantizedWeight(Protocol):
    """A weight (out, in): a `NamedTuple` of at most four matrices, each with one row per output.

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
        """Return dY W in new memory; ``rows``: dY, if `traced_gradient_rows` quantized it."""
        ...

    def traced_rows(self, x: Tensor) -> Rows | tuple[None, None]:
        """Return x as a compiled region quantizes it, in plain operations; (None, None) if only W is quantized."""
        ...

    def traced_gradient_rows(self, grad_out: Tensor) -> Rows | tuple[None, None]:
        """Return dY as a compiled region quantizes it for `gradient`; (None, None) if only W is quantized."""
        ...


class RowTensors:
    """`split` and `joined` of weights whose tensors are matrices with one row per output."""

    __slots__ = ()

    def split(self: Any, count: int) -> list[Any]:
        """Return views for ``count`` layers whose weights are rows of this one."""
        parts = (torch.split(tensor, tensor.shape[0] // count) for tensor in self)
        return [type(self)(*each) for each in zip(*parts, strict=True)]

    @classmethod
    def joined(cls, parts: Sequence[Any]) -> Any:
        """Return the weight that these are the `split` of, without copying; None if there is none."""
        count = len(parts)
        make: Any = cls
        for tensor in parts[0]:
            room = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize
            if room < count * tensor.nbytes:
                return None
        whole = make(*(t.as_strided((count * len(t), t.shape[1]), (t.shape[1], 1)) for t in parts[0]))
        same = (
            view.data_ptr() == own.data_ptr() and view.stride() == own.stride()
            for views, part in zip(whole.split(count), parts, strict=True)
            for view, own in zip(views, part, strict=True)
        )
        return whole if all(same) else None


class QuantizedLinear(nn.Linear):
    """A linear layer with a quantized weight; a format is a subclass. The tensors of the weight are buffers."""

    #: the class of the weight
    weights: ClassVar[Any]
    #: bytes of all tensors of the weight for each of its parameters
    bytes_per_parameter: ClassVar[float]
    #: bytes of temporary memory for each parameter while a product is computed
    scratch_per_parameter: ClassVar[float]
    #: precisions of training that the products support
    precisions: ClassVar[tuple[str, ...]] = ("bf16", "fp16", "fp32")
    #: whether products, not memory, are the reason: then only layers that see every token gain by it
    for_speed: ClassVar[bool] = False

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
    def quantize(
        cls, *linears: nn.Linear, device: torch.device | None = None, store: torch.device | None = None
    ) -> None:
        """Quantize the weights of layers in place.

        Args:
            linears: one layer, or several of one shape and input: these are quantized as one matrix, which
                `joint_weight` returns.
            device: where to compute, if the weights are on another device.
            store: where the quantized weights go, by default where the weights are.
        """
        weight = torch.cat([linear.weight.detach().to(device or linear.weight.device) for linear in linears])
        whole = cls.weights(*(tensor.to(store or linears[0].weight.device) for tensor in cls.weights.of(weight)))
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
        own, names = self._names()
        weight: QuantizedWeight = self.weights(*(own[name] for name in names))
        return weight

    def _names(self) -> tuple[dict[str, Any], Sequence[str]]:
        """Return the module's own dict with the tensors of the weight, among others, and their names in it."""
        names: Sequence[str] = self.weights._fields
        if names[0] in self._buffers:
            return self._buffers, names
        return self._parameters, [f"weight_{name}" for name in names]

    def become_parameters(self) -> None:
        """Hold the tensors of the weight as frozen parameters: FSDP shards those, and no buffers."""
        for name in self.weights._fields:
            tensor = cast("Tensor", self._buffers.pop(name))
            self._parameters[f"weight_{name}"] = nn.Parameter(tensor, requires_grad=False)

    @torch.no_grad()
    def write(self, weight: QuantizedWeight) -> None:
        """Copy the tensors of a weight of this format to those of the layer."""
        for own, new in zip(self.quantized, weight, strict=True):
            own.copy_(new)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move the layer; a conversion of its dtype changes `dtype` alone, never the tensors of the weight."""
        own, names = self._names()
        tensors: dict[str, Tensor] = {name: own.pop(name) for name in names}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        for name, tensor in tensors.items():
            device = fn(torch.empty(0, dtype=torch.uint8, device=tensor.device)).device
            blank = tensor.is_meta or device.type == "meta"
            own[name] = torch.empty_like(tensor, device=device) if blank else tensor.to(device)
        return self

    def forward(self, input: Tensor) -> Tensor:
        # a matrix inside: if an autograd function returned a view, it could not be added to in place
        result = self.quantized.linear(input.reshape(-1, self.in_features), self.bias)
        return result.view(*input.shape[:-1], self.out_features)


#: format -> its layer; `inweave.ops.quantized.registry` fills it
FORMATS: dict[str, type[QuantizedLinear]] = {}


def restore_weight(name: str, *tensors: Tensor | None) -> QuantizedWeight:
    """Return a weight from its format's name and its tensors, as operators take them: trailing ones may be None."""
    weight: QuantizedWeight = FORMATS[name].weights(*(tensor for tensor in tensors if tensor is not None))
    return weight


def joint_weight(linears: Sequence[nn.Module]) -> QuantizedWeight | None:
    """Return the weight that layers were quantized as, in this order; None if there is none, or they were moved."""
    kinds = {type(linear) for linear in linears}
    if len(kinds) > 1:
        return None
    kind: Any = kinds.pop()
    joined: QuantizedWeight | None = kind.weights.joined([linear.quantized for linear in linears])
    return joined


def weight_like(module: nn.Module) -> Tensor:
    """Return a module's weight, or for a quantized one a tensor of its shape and dtype without numbers."""
    if isinstance(module, QuantizedLinear):
        return torch.empty(module.out_features, module.in_features, dtype=module.dtype, device="meta")
    weight: Any = module.weight
    return weight  # type: ignore[no-any-return]


def coarse(scales: Tensor) -> Tensor:
    """Return positive float32 scales rounded to 12 significant bits."""
    return ((scales.view(torch.int32) + (1 << 11)) & ~((1 << 12) - 1)).view(torch.float32)


def relative_error(original: Tensor, weight: QuantizedWeight) -> float:
    """Return |W - W'| / |W| in Frobenius norms, of float32 as some devices have no float64."""
    wide = original.float()
    largest = wide.abs().amax().clamp_min(SMALLEST)  # 1 after the division, so that squares neither overflow nor vanish
    error, size = ((each / largest).norm() for each in (wide - weight.dequantized(torch.float32), wide))
    return float(error / size.clamp_min(SMALLEST))
