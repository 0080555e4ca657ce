"""LoRA, LoHa and LoKr layers on live modules: named adapters that are trained, switched, weighted, merged and taken out.

    inject(model, 16, targets=["to_q", "to_v"])     or  inject(model, adapter)
    activate(model, {"style": 0.8, "detail": 0.5})  with disabled(model): ...
    merge(model); unmerge(model)                    bit for bit
    adapter = collect(model); eject(model)          the original modules again

A layer knows one module (`LoraLayer`); the functions here do the same to every layer of a model.
"""

from inweave.layers.collect import collect
from inweave.layers.from_adapter import model_index
from inweave.layers.inject import eject, inject
from inweave.layers.layer import LoraLayer
from inweave.layers.state import activate, delete, disabled, lora_layers, merge, set_strength, unmerge
from inweave.layers.training import freeze, trainable

__all__ = [
    "LoraLayer", "activate", "collect", "delete", "disabled", "eject", "freeze", "inject", "lora_layers", "merge",
    "model_index", "set_strength", "trainable", "unmerge",
]  # fmt: skip
