"""LoRA, LoHa and LoKr layers on live modules: named adapters that are trained, switched, scaled, merged and removed.

    inject(model, 16, targets=["to_q", "to_v"])     new adapters; attach(model, "style.safetensors") for a loaded one
    activate(model, {"style": 0.8, "detail": 0.5})  with disabled(model): ...
    merge(model); unmerge(model)                    bit for bit
    adapter = collect(model); eject(model)          the original modules again
    register_layer(MyLinear, kind="linear")         support for custom layer classes

A `LoraLayer` wraps one module; the functions here apply an operation to every layer of a model.
"""

from inweave.layers.algorithms import algorithm_of, branch_named
from inweave.layers.collect import collect
from inweave.layers.eligible import geometry_of
from inweave.layers.from_adapter import model_index
from inweave.layers.inject import attach, eject, inject
from inweave.layers.layer import LoraLayer
from inweave.layers.spec import AdapterSpec
from inweave.layers.state import activate, delete, disabled, lora_layers, merge, set_strength, unmerge
from inweave.layers.training import ParameterCount, freeze, trainable, trainable_parameters
from inweave.ops.kinds import LayerKind, LinearKind, register_layer

__all__ = [
    "AdapterSpec", "LayerKind", "LinearKind", "LoraLayer", "ParameterCount", "activate", "algorithm_of", "attach",
    "branch_named", "collect", "delete", "disabled", "eject", "freeze", "geometry_of", "inject", "lora_layers", "merge",
    "model_index", "register_layer", "set_strength", "trainable", "trainable_parameters", "unmerge",
]  # fmt: skip
