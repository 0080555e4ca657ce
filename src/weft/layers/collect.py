"""The adapters of a live model as an `Adapter`, ready to be saved in any dialect.

    entry: Ref(component, dotted module name), factors with the parameters' own bits

A shared module gives one entry, under its first name. The tensors are listed under PEFT's keys, so that reports
can name them; a writer spells them its own way.
"""

from __future__ import annotations

from torch import nn

from weft.adapter import Adapter, Entry, Ref, Tensor
from weft.errors import ConfigError
from weft.layers.factors import to_factors
from weft.layers.state import lora_layers


def collect(model: nn.Module, name: str = "default", *, component: str = "") -> Adapter:
    """The adapter called ``name``; ``component``: which network of a pipeline the model is ("unet", "te1", ...)."""
    layers = lora_layers(model)
    entries: list[Entry] = []
    tensors: dict[str, Tensor] = {}
    for module, layer in layers.items():
        if name not in layer.adapters:
            continue
        factors = to_factors(layer.pair(name), transposed=layer.transposed, embedding=layer.embedding)
        suffixes = ("lora_embedding_A", "lora_embedding_B") if layer.embedding else ("lora_A.weight", "lora_B.weight")
        own = {suffixes[0]: factors.down, suffixes[1]: factors.up}
        if factors.mid is not None:
            own["lora_mid.weight"] = factors.mid
        if factors.magnitude is not None:
            own["lora_magnitude_vector"] = factors.magnitude.tensor
        own = {f"base_model.model.{module}.{suffix}": tensor for suffix, tensor in own.items()}
        entries.append(Entry(Ref(component, module), "weight", factors, tuple(own), "peft"))
        tensors |= own
    if not entries:
        known = ", ".join(dict.fromkeys(other for layer in layers.values() for other in layer.adapters)) or "none"
        raise ConfigError(f"no adapter is named {name!r}; the model has {known}")
    return Adapter(entries=tuple(entries), tensors=tensors)
