"""The canonical data: tensors as they lie in files, one class per algorithm, and `Adapter`."""

from inweave.adapter.adapter import Adapter, Entry, Problem, Ref
from inweave.adapter.factors import Factors, Magnitude, Residual
from inweave.adapter.full import Full, TokenRows, Vera
from inweave.adapter.glora import Glora
from inweave.adapter.ia3 import Ia3
from inweave.adapter.loha import Loha
from inweave.adapter.lokr import Lokr
from inweave.adapter.lora import Lora
from inweave.adapter.oft import Boft, BoftIn, Oft, OftIn
from inweave.adapter.scale import scale
from inweave.adapter.tensor import Tensor, scalar, stacked

__all__ = [
    "Adapter", "Boft", "BoftIn", "Entry", "Factors", "Full", "Glora", "Ia3", "Loha", "Lokr", "Lora",
    "Magnitude", "Oft", "OftIn", "Problem", "Ref", "Residual", "Tensor", "TokenRows", "Vera",
    "scalar", "scale", "stacked",
]  # fmt: skip
