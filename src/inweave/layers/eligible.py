"""Checks whether modules can carry adapters, with the reason if one cannot.

A module that overrides `forward` is run once on a small input, unless its class is registered: merged and unmerged
adapters agree only if it computes the same function as its kind. A registered class is trusted here, and tested before
its first merge.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from inweave.layers.branch import Geometry
from inweave.layers.layer import LoraLayer
from inweave.layers.norms import NormLayer
from inweave.ops.kinds import STANDARD_FORWARDS, LayerKind, departure, kind_of, registered_kind
from inweave.ops.quantized import QuantizedLayer, weight_like

_KINDS = "Linear, Conv1d, Conv2d, Conv3d, Embedding, transformers' Conv1D"


def layer_kind(module: nn.Module) -> LayerKind | None:
    """Return the kind of a module, or of the module that a LoRA layer wraps; None for what takes no factors."""
    if isinstance(module, NormLayer):
        return None
    return module.kind if isinstance(module, LoraLayer) else kind_of(module)


def geometry_of(module: nn.Module) -> Geometry:
    """Return the geometry of an eligible module, with or without adapters."""
    if isinstance(module, LoraLayer):
        return module.geometry
    kind = kind_of(module)
    assert kind is not None
    return Geometry(*kind.shape(weight_like(module)), kind.groups(module), kind.embedding)


def ineligible(module: nn.Module) -> str | None:
    """Return why a module cannot carry adapters, or None if it can."""
    if isinstance(module, LoraLayer | QuantizedLayer) and not isinstance(module, NormLayer):
        return None
    kind, own = kind_of(module), type(module.base if isinstance(module, NormLayer) else module).__name__
    if kind is None:
        return (
            f"{own} is not a layer that takes LoRA ({_KINDS}); "
            f"inweave.register_layer({own}, kind=...) adds support for a class"
        )
    registered = registered_kind(module) is not None
    weight = module._parameters.get("weight")
    if registered and weight is None and "parametrizations" not in module._modules:
        return f"{own} is registered, but has no parameter called weight"
    if weight is None or "parametrizations" in module._modules or (module._modules and not registered):
        return "its weight is computed from other tensors (a weight norm or another parametrization)"
    if is_lazy(weight):
        return "its weight has no shape yet (a lazy module): run the model once first"
    if not weight.is_floating_point():
        return f"its weight is stored as {weight.dtype}, and only floating-point weights take LoRA"
    if weight.dim() < 2:
        return f"its weight has {weight.dim()} axes, and an adapter needs two or more"
    if any(isinstance(child, LoraLayer) for child in module.modules()):
        return "modules inside it already carry adapters"
    if reason := kind.obstacle(module, weight):
        return reason
    if registered or type(module).forward in STANDARD_FORWARDS or (reason := departure(module, kind)) is None:
        return None
    return (
        f"{own} overrides forward and computes something else than its kind ({reason}); if a change of its weight only "
        f"adds to its output, declare that with inweave.register_layer({own}, kind=...)"
    )
