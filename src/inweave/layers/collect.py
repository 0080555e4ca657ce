"""The adapters of a live model as an `Adapter`, ready to be saved in any dialect.

    entry: Ref(component, dotted module name), factors with the parameters' own bits

A shared module gives one entry, under its first name. The tensors are listed under PEFT's keys (LyCORIS' where PEFT
has none), so that reports can name them; a writer spells them its own way.
"""

from __future__ import annotations

from torch import nn

from inweave.adapter import Adapter, Entry, Factors, Lora, Ref, Tensor
from inweave.errors import ConfigError
from inweave.layers.factors import to_factors
from inweave.layers.state import lora_layers


def collect(model: nn.Module, name: str = "default", *, component: str = "") -> Adapter:
    """The adapter called ``name``; ``component``: which network of a pipeline the model is ("unet", "te1", ...)."""
    layers = lora_layers(model)
    entries: list[Entry] = []
    tensors: dict[str, Tensor] = {}
    for module, layer in layers.items():
        if name not in layer.adapters:
            continue
        factors = to_factors(layer.term(name), transposed=layer.transposed, embedding=layer.embedding)
        own = {f"base_model.model.{module}.{suffix}": tensor for suffix, tensor in _named(factors).items()}
        entries.append(Entry(Ref(component, module), "weight", factors, tuple(own), "peft"))
        tensors |= own
    if not entries:
        known = ", ".join(dict.fromkeys(other for layer in layers.values() for other in layer.adapters)) or "none"
        raise ConfigError(f"no adapter is named {name!r}; the model has {known}")
    return Adapter(entries=tuple(entries), tensors=tensors)


def _named(factors: Factors) -> dict[str, Tensor]:
    """The tensors of one module by the suffix they are known under."""
    found = factors.tensors()
    if isinstance(factors, Lora):
        names = {"down": "lora_A.weight", "up": "lora_B.weight", "mid": "lora_mid.weight"}
        if factors.embedding:
            names = {"down": "lora_embedding_A", "up": "lora_embedding_B"}
        named = {names[role]: tensor for role, tensor in found.items()}
    else:
        stem = {"loha": "hada", "lokr": "lokr"}[factors.kind]
        named = {f"{stem}_{role}": tensor for role, tensor in found.items()}
    if factors.magnitude is not None:
        named["lora_magnitude_vector" if isinstance(factors, Lora) else "dora_scale"] = factors.magnitude.tensor
    return named
