"""The canonical data: tensors as they lie in files, one class an algorithm, and `Adapter`."""

from weft.adapter.adapter import Adapter, Entry, Problem, Ref, Weighted, algorithm
from weft.adapter.factors import Factors, Magnitude, Residual
from weft.adapter.full import Full, Vera
from weft.adapter.glora import Glora
from weft.adapter.ia3 import Ia3
from weft.adapter.loha import Loha
from weft.adapter.lokr import Lokr
from weft.adapter.lora import Lora
from weft.adapter.oft import Boft, BoftIn, Oft, OftIn
from weft.adapter.scale import scale
from weft.adapter.tensor import Tensor, scalar, stacked

__all__ = [
    "Adapter", "Boft", "BoftIn", "Entry", "Factors", "Full", "Glora", "Ia3", "Loha", "Lokr", "Lora",
    "Magnitude", "Oft", "OftIn", "Problem", "Ref", "Residual", "Tensor", "Vera", "Weighted",
    "algorithm", "scalar", "scale", "stacked",
]  # fmt: skip
