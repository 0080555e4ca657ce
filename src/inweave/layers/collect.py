"""Read an adapter of a live model into an `Adapter`, ready to be saved in any dialect.

    entry: Ref(component, dotted module name), factors bit-identical to the parameters

    and for each module that `trainable` chose: Ref(component, module), each of its parameters whole,
    replacing the base's

A shared module gives one entry, under its first name. Tensors are listed under PEFT's keys (LyCORIS' where PEFT has
none) so that reports can name them; each dialect writes its own keys.
"""

from __future__ import annotations

from torch import nn

from inweave.adapter import Adapter, Entry, Full, Ref, Tensor
from inweave.arguments import expect
from inweave.errors import ConfigError, TargetError
from inweave.layers.layer import LoraLayer
from inweave.layers.sites import Site, sites
from inweave.layers.state import lora_layers
from inweave.layers.training import trained_leaves
from inweave.ops.tensors.decode import encode


def collect(model: nn.Module, name: str = "default", *, component: str = "") -> Adapter:
    """Return the current values of an adapter in the layers of a model, ready for `save`.

    Modules that `trainable` chose are included whole; `save` refuses them if the dialect cannot hold them.

    Args:
        model: a model with LoRA layers.
        name: the adapter's name.
        component: the network of a diffusion model that this is ("unet", "te1", ...), for dialects that name it.

    Returns:
        The adapter, bit-identical to the parameters.

    Raises:
        ConfigError: no adapter has this name.
        TargetError: a trained module cannot be stored in an adapter file.
    """
    expect("name", name, str)
    expect("component", component, str)
    layers = lora_layers(model)
    entries: list[Entry] = []
    tensors: dict[str, Tensor] = {}
    for module, layer in layers.items():
        if name not in layer.adapters:
            continue
        factors = layer.factors(name)
        suffixes = factors.report_suffixes()
        own = {f"base_model.model.{module}.{suffixes[role]}": tensor for role, tensor in factors.tensors().items()}
        if factors.magnitude is not None:
            own[f"base_model.model.{module}.{suffixes['magnitude']}"] = factors.magnitude.tensor
        entries.append(Entry(Ref(component, module), "weight", factors, tuple(own), "peft"))
        tensors |= own
    for site in sites(model):
        for leaf, value in _whole_module(site).items():
            inside = isinstance(site.module, LoraLayer)
            key = f"base_model.model.{site.names[0]}.{'base_layer.' if inside else ''}{leaf}"
            tensors[key] = encode(value)
            whole = Full(value=tensors[key], mode="set", inside=inside)
            entries.append(Entry(Ref(component, site.names[0]), leaf, whole, (key,), "peft"))
    if not entries:
        known = ", ".join(dict.fromkeys(other for layer in layers.values() for other in layer.adapters)) or "none"
        raise ConfigError(f"no adapter is named {name!r}; the model has {known}")
    return Adapter(entries=tuple(entries), tensors=tensors)


def _whole_module(site: Site) -> dict[str, nn.Parameter]:
    """Return every parameter of a module of which `trainable` chose some, as PEFT saves and loads whole modules.

    For a layer with adapters, only the chosen ones: the rest belong to the base.
    """
    module, leaves = site.module, trained_leaves(site.module)
    if not leaves:
        return {}
    label = site.names[0] or type(module).__name__
    if odd := sorted(leaves - {"weight", "bias"}) or (module._modules and not isinstance(module, LoraLayer)):
        what = odd[0] if isinstance(odd, list) else "a weight of a module with modules inside"
        raise TargetError(
            f"{label}: {what} was made trainable, and adapter files hold the weights and biases of whole layers only; "
            "save the model itself"
        )
    if not isinstance(module, LoraLayer):
        leaves = set(module._parameters)
        buffers = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        if buffers:
            raise TargetError(
                f"{label}: it was made trainable, but also has {', '.join(buffers)}, which no adapter file holds; "
                "freeze it from the start, or save the model itself"
            )
    return {leaf: value for leaf, value in module._parameters.items() if leaf in leaves and value is not None}
