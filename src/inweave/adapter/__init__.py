"""The canonical data: tensors as files store them, one class per algorithm, and `Adapter`."""

from inweave.adapter.adapter import Adapter, Entry, KeyProblem, Ref
from inweave.adapter.contract import Blocks, Form, Parts
from inweave.adapter.experts import ExpertLora
from inweave.adapter.factors import Factors, join
from inweave.adapter.full import Full, TokenRows
from inweave.adapter.glora import Glora
from inweave.adapter.ia3 import Ia3
from inweave.adapter.loha import Loha
from inweave.adapter.lokr import Lokr
from inweave.adapter.lora import Lora
from inweave.adapter.magnitude import Magnitude
from inweave.adapter.oft import Boft, BoftIn, Oft, OftIn
from inweave.adapter.registry import ALGORITHMS, imported, load_algorithms, register_algorithm
from inweave.adapter.residual import Residual
from inweave.adapter.scale import scale
from inweave.adapter.tensor import Tensor, scalar, stacked
from inweave.adapter.vera import Vera

__all__ = [
    "ALGORITHMS",
    "Adapter",
    "Blocks",
    "Boft",
    "BoftIn",
    "Entry",
    "ExpertLora",
    "Factors",
    "Form",
    "Full",
    "Glora",
    "Ia3",
    "KeyProblem",
    "Loha",
    "Lokr",
    "Lora",
    "Magnitude",
    "Oft",
    "OftIn",
    "Parts",
    "Ref",
    "Residual",
    "Tensor",
    "TokenRows",
    "Vera",
    "imported",
    "join",
    "load_algorithms",
    "register_algorithm",
    "scalar",
    "scale",
    "stacked",
]  # fmt: skip
