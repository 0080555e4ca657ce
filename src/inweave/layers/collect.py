"""An adapter of a live model as an `Adapter`, ready to be saved in any dialect.

    entry: Ref(component, dotted module name), factors with the parameters' own bits

A shared module gives one entry, under its first name. The tensors are listed under PEFT's keys (LyCORIS' where PEFT
has none), so that reports can name them; each dialect writes its own.
"""

from __future__ import annotations

from torch import nn

from inweave.adapter import Adapter, Entry, Ref, Tensor
from inweave.errors import ConfigError
from inweave.layers.state import lora_layers


def collect(model: nn.Module, name: str = "default", *, component: str = "") -> Adapter:
    """The adapter called ``name`` as it is in the layers of ``model`` now, ready for `save`.

    ``component``: which network of a diffusion model this is ("unet", "te1", ...), for dialects that name it.
    """
    layers = lora_layers(model)
    entries: list[Entry] = []
    tensors: dict[str, Tensor] = {}
    for module, layer in layers.items():
        if name not in layer.adapters:
            continue
        factors, suffixes = layer.factors(name), layer.branch(name).suffixes(layer.kind.embedding)
        own = {f"base_model.model.{module}.{suffixes[role]}": tensor for role, tensor in factors.tensors().items()}
        if factors.magnitude is not None:
            own[f"base_model.model.{module}.{suffixes['magnitude']}"] = factors.magnitude.tensor
        entries.append(Entry(Ref(component, module), "weight", factors, tuple(own), "peft"))
        tensors |= own
    if not entries:
        known = ", ".join(dict.fromkeys(other for layer in layers.values() for other in layer.adapters)) or "none"
        raise ConfigError(f"no adapter is named {name!r}; the model has {known}")
    return Adapter(entries=tuple(entries), tensors=tensors)
