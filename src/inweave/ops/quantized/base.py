"""The contract of a format of quantized weights: the tensors of a weight, and the layers that hold them.

    y  = x W^T + b         `QuantizedWeight.product`
    dx = dy W              `QuantizedWeight.gradient`; W has no gradient of its own

The weight of a convolution is the matrix of its outputs by everything that one of them reads (`convolution`).

A layer is quantized in place: it remains the same object, with another class, so that references to it stay valid.
Reading `weight` returns the numbers that the forward pass multiplies with; it cannot be assigned.

A format is stable: `of(dequantized(float32))` has the same bits. So scales have 12 significant bits (`coarse`): their
products with numbers of up to 12 bits are exact in float32, and the largest of a row gives the scale back.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, ClassVar, Protocol, Self, cast

import torch
from torch import Tensor, nn

from inweave.errors import TargetError

#: an activation as quantized rows: numbers (M, K) and scales (M, 1)
Rows = tuple[Tensor, Tensor]
#: a row whose numbers are all smaller becomes zero: its scale would not be a normal float32 number
SMALLEST = 2.0**-100
#: numbers of a matrix that are quantized at a time: few in host memory, many for a GPU, which is idle between two
PIECE, GPU_PIECE = 1 << 20, 1 << 24


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
    """`split`, `joined` and `part` of weights whose tensors are matrices with one row per output."""

    __slots__ = ()

    def part(self: Any, start: int, length: int) -> Any:
        """Return some rows as a weight of their own, views of this one."""
        return type(self)(*(tensor[start : start + length] for tensor in self))

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


class QuantizedLayer(nn.Module):
    """A layer with a quantized weight, whose tensors are buffers."""

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
    _dtypes: Sequence[torch.dtype] | None = None  # of the tensors, where the module holds some as another one

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, as adapters see it."""

    @classmethod
    def hold(cls, layer: nn.Module, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        """Give a plain layer a quantized weight in place of its own, and this class."""
        tensors: Any = weight
        del layer._parameters["weight"]
        layer.__class__ = cls
        layer.dtype = dtype  # type: ignore[assignment]
        layer.put(tensors)  # type: ignore[operator]

    @property
    def weight(self) -> Tensor:
        return self.quantized.dequantized(self.dtype).view(self.shape)

    @property
    def quantized(self) -> QuantizedWeight:
        """The tensors of the weight."""
        own, names = self._names()
        dtypes = self._dtypes or [own[name].dtype for name in names]
        pairs = zip(names, dtypes, strict=True)
        weight: QuantizedWeight = self.weights(
            *(own[name] if own[name].dtype == dtype else own[name].view(dtype) for name, dtype in pairs)
        )
        return weight

    @property
    def stored_tensors(self) -> list[Tensor]:
        """The tensors as the module holds them: shards, once FSDP has split them."""
        own, names = self._names()
        return [own[name] for name in names]

    def _names(self) -> tuple[dict[str, Any], Sequence[str]]:
        """Return the module's own dict with the tensors of the weight, among others, and their names in it."""
        names: Sequence[str] = self.weights._fields
        if names[0] in self._buffers:
            return self._buffers, names
        return self._parameters, [f"weight_{name}" for name in names]

    def put(self, weight: QuantizedWeight) -> None:
        """Let the layer have the tensors of a weight of its format, in place of its own.

        Detached: a view keeps the tensor that it is a view of, even after its `data` was replaced (streaming).
        """
        for name, tensor in zip(self.weights._fields, weight, strict=True):
            self.register_buffer(name, tensor.detach())

    def become_parameters(self) -> None:
        """Hold the tensors of the weight as frozen parameters: FSDP shards those, and no buffers.

        Bytes that are integers are held as the 8-bit floats with the same bits: before torch 2.13, FSDP creates every
        parameter as one that could require a gradient, which integers cannot.
        """
        self._dtypes = [tensor.dtype for tensor in self.stored_tensors]
        for name in self.weights._fields:
            tensor = cast("Tensor", self._buffers.pop(name))
            if tensor.itemsize == 1 and not tensor.is_floating_point():
                tensor = tensor.view(torch.float8_e4m3fn)
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


class QuantizedLinear(QuantizedLayer, nn.Linear):  # type: ignore[override]
    """A linear layer with a quantized weight; a format is a subclass."""

    #: the class of a convolution with such a weight; None: convolutions stay plain
    convolution: ClassVar[type[QuantizedLayer] | None] = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.out_features, self.in_features

    @classmethod
    @abstractmethod
    def fits(cls, module: nn.Module) -> bool:
        """Return whether a layer can be quantized, and gains by it."""

    @classmethod
    @abstractmethod
    def device_problems(cls, device: torch.device) -> list[str]:
        """Return why a device cannot compute with the format; empty if it can."""

    @classmethod
    def layer_for(cls, module: nn.Module) -> type[QuantizedLayer]:
        """Return the class that a linear layer or a convolution gets."""
        return cls if isinstance(module, nn.Linear) or cls.convolution is None else cls.convolution

    @classmethod
    @torch.no_grad()
    def quantize(
        cls, *layers: nn.Linear | nn.Conv2d, device: torch.device | None = None, store: torch.device | None = None
    ) -> float:
        """Quantize the weights of layers in place; return the relative error of the first one's, where it is computed.

        Args:
            layers: one layer, or several of one shape and input: these are quantized as one matrix, which
                `joint_weight` returns.
            device: where to compute, if the weights are on another device.
            store: where the quantized weights go, by default where the weights are.
        """
        place = store or layers[0].weight.device
        parts = [layer.weight.detach().flatten(1).to(device or layer.weight.device) for layer in layers]
        if parts[0].is_meta and place.type == "meta":
            whole, error = _blank_weight(cls.weights, sum(map(len, parts)), parts[0].shape[1], parts[0].dtype), 0.0
        else:
            whole, error = _quantized_in_pieces(cls.weights, parts, place)
        for layer, quantized in zip(layers, whole.split(len(layers)), strict=True):
            cls.layer_for(layer).hold(layer, quantized, layer.weight.dtype)
        return error

    def forward(self, input: Tensor) -> Tensor:
        # a matrix inside: if an autograd function returned a view, it could not be added to in place
        result = self.quantized.linear(input.reshape(-1, self.in_features), self.bias)
        return result.view(*input.shape[:-1], self.out_features)


#: format -> its layer, for the formats that weights can be quantized to; `inweave.ops.quantized.registry` fills both
FORMATS: dict[str, type[QuantizedLinear]] = {}
#: the same for weights that files store quantized by other libraries, and that are held like that
PACKED_FORMATS: dict[str, type[QuantizedLinear]] = {}


def format_of(name: str) -> type[QuantizedLinear]:
    """Return the layer of a format by name."""
    return FORMATS[name] if name in FORMATS else PACKED_FORMATS[name]


def _quantized_in_pieces(weights: Any, parts: Sequence[Tensor], place: torch.device) -> tuple[Any, float]:
    """Quantize matrices of one shape as one, some rows at a time: the numbers in between never exist for all of it.

    Returns:
        The weight on ``place``, and the relative error of the first matrix.
    """
    (rows, columns), at = parts[0].shape, 0
    count = max(1, (PIECE if parts[0].device.type == "cpu" else GPU_PIECE) // max(columns, 1))
    whole: list[Tensor] = []
    squares, sizes = 0.0, 0.0
    for number, part in enumerate(parts):
        for start in range(0, rows, count):
            piece = part[start : start + count]
            quantized = weights.of(piece)
            if not whole:
                whole = [torch.empty(rows * len(parts), t.shape[1], dtype=t.dtype, device=place) for t in quantized]
            for target, tensor in zip(whole, quantized, strict=True):
                target[at : at + len(piece)] = tensor
            at += len(piece)
            if number == 0:
                error, size = _norms(piece, quantized)
                squares, sizes = squares + error**2, sizes + size**2
    return weights(*whole), math.sqrt(squares / sizes) if sizes else 0.0


def _blank_weight(weights: Any, rows: int, columns: int, dtype: torch.dtype) -> Any:
    """Return new tensors on the meta device, as quantizing a matrix of this size would make them."""
    return weights(*map(torch.empty_like, _weight_of_size(weights, rows, columns, dtype)))


@cache
def _weight_of_size(weights: Any, rows: int, columns: int, dtype: torch.dtype) -> Any:
    # the arithmetic of a format is hundreds of operations, and a network has thousands of layers in a few sizes
    return weights.of(torch.empty(rows, columns, dtype=dtype, device="meta"))


def restore_weight(name: str, *tensors: Tensor | None) -> QuantizedWeight:
    """Return a weight from its format's name and its tensors, as operators take them: trailing ones may be None."""
    weight: QuantizedWeight = format_of(name).weights(*(tensor for tensor in tensors if tensor is not None))
    return weight


def has_encoder(weight: QuantizedWeight) -> bool:
    """Return whether `requantized` can put other numbers into the layout of a weight."""
    return bool(getattr(weight, "encodes", True))


def requantized(weight: QuantizedWeight, matrix: Tensor, label: str) -> QuantizedWeight:
    """Return other numbers in the layout of a weight, with new scales; raise TargetError if it has no encoder."""
    if not has_encoder(weight):
        raise TargetError(
            f"{label}: stored as {weight.format()}, to which inweave does not quantize a sum; leave the adapter "
            "unmerged, or load the model unpacked"
        )
    result: QuantizedWeight = getattr(weight, "like", type(weight).of)(matrix)
    return result


def matrix_of(module: nn.Module) -> tuple[int, int]:
    """Return outputs and inputs of a plain linear layer or convolution without groups; (0, 0) for any other module."""
    if isinstance(module, QuantizedLayer):
        return 0, 0
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if type(module) is not nn.Conv2d or module.groups > 1 or module.padding_mode != "zeros":
        return 0, 0
    whole = 0 if isinstance(module.padding, str) else module.in_channels
    return module.out_channels, whole * math.prod(module.kernel_size)


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
    if isinstance(module, QuantizedLayer):
        return torch.empty(module.shape, dtype=module.dtype, device="meta")
    weight: Any = module.weight
    return weight  # type: ignore[no-any-return]


def coarse(scales: Tensor) -> Tensor:
    """Return positive float32 scales rounded to 12 significant bits."""
    return ((scales.view(torch.int32) + (1 << 11)) & ~((1 << 12) - 1)).view(torch.float32)


def relative_error(original: Tensor, weight: QuantizedWeight) -> float:
    """Return |W - W'| / |W| in Frobenius norms, of float32 as some devices have no float64."""
    error, size = _norms(original, weight)
    return error / size if size else 0.0


def _norms(original: Tensor, weight: QuantizedWeight) -> tuple[float, float]:
    """Return |W - W'| and |W|."""
    wide = original.float()
    largest = wide.abs().amax().clamp_min(SMALLEST)  # 1 after the division, so that squares neither overflow nor vanish
    rest = wide - weight.dequantized(torch.float32)
    error, size = (float((each / largest).norm()) * float(largest) for each in (rest, wide))
    return error, size
