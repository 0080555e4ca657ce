"""The formats of quantized weights by name: the values of the `quantize` setting besides "off"."""

from __future__ import annotations

from torch import Tensor

from inweave.ops.quantized.base import QuantizedLinear, QuantizedWeight
from inweave.ops.quantized.fp8 import Fp8Linear

FORMATS: dict[str, type[QuantizedLinear]] = {"fp8": Fp8Linear}


def restore_weight(name: str, *tensors: Tensor | None) -> QuantizedWeight:
    """Return a weight from its format's name and its tensors, as operators take them: trailing ones may be None."""
    weight: QuantizedWeight = FORMATS[name].weights(*(tensor for tensor in tensors if tensor is not None))
    return weight
