"""Read an adapter of a live model into an `Adapter`, ready to be saved in any dialect.

    entry: Ref(component, dotted module name), factors bit-identical to the parameters

    and for each module that `trainable` chose: Ref(component, module), each of its parameters whole,
    replacing the base's; and the whole values of an adapter that was attached, as in its file

A shared module gives one entry, under its first name. Tensors are listed under PEFT's keys (LyCORIS' where PEFT has
none) so that reports can name them; each dialect writes its own keys.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from inweave.adapter import Adapter, Entry, Factors, Full, Ref, Tensor
from inweave.arguments import expect
from inweave.errors import ConfigError, TargetError
from inweave.formats.dialects.base import BASE_MODEL, TASK_TYPE
from inweave.layers.layer import LoraLayer
from inweave.layers.norms import NormLayer
from inweave.layers.sites import Site, networks, sites
from inweave.layers.state import lora_layers, require_in_place
from inweave.layers.training import trained_leaves
from inweave.layers.whole import all_wholes, wholes_in
from inweave.ops.kinds.offloaded import numbers
from inweave.ops.tensors.decode import encode

#: the end of the name of a class of transformers -> the task that PEFT knows it by
TASKS = {
    "ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
}  # fmt: skip
#: tasks for which PEFT expects the head in the file, under one of these names
HEADS = {"SEQ_CLS": ("classifier", "score"), "TOKEN_CLS": ("classifier", "score")}


def collect(model: object, name: str = "default", *, component: str = "") -> Adapter:
    """Return the current values of an adapter in the layers of a model, ready for `save`.

    Modules that `trainable` chose are included whole; `save` refuses them if the dialect cannot hold them.

    Args:
        model: a model with LoRA layers, or a pipeline of such.
        name: the adapter's name.
        component: the network of a diffusion model that this is ("unet", "te1", ...), for dialects that name it.

    Returns:
        The adapter, bit-identical to the parameters.

    Raises:
        ConfigError: no adapter has this name.
        TargetError: a trained module cannot be stored in an adapter file, or a parameter is on disk.
    """
    expect("name", name, str)
    expect("component", component, str)
    if not isinstance(model, nn.Module):
        return _of_pipeline(model, name, component)
    layers = lora_layers(model)
    require_in_place(model, layers.values())
    entries: list[Entry] = []
    tensors: dict[str, Tensor] = {}
    for module, layer in layers.items():
        if name not in layer.adapters:
            continue
        if isinstance(layer, NormLayer):
            _put_whole(layer.changes(name), Ref(component, module), entries, tensors)
            continue
        factors = layer.factors(name)
        suffixes = factors.report_suffixes()
        own = {f"base_model.model.{module}.{suffixes[role]}": tensor for role, tensor in factors.tensors().items()}
        if factors.magnitude is not None:
            own[f"base_model.model.{module}.{suffixes['magnitude']}"] = factors.magnitude.tensor
        entries.append(Entry(Ref(component, module), "weight", factors, tuple(own), "peft"))
        tensors |= own
    for site in sites(model):
        values = _whole_module(site) | _whole_values(site, name)
        _put_whole(values, Ref(component, site.names[0]), entries, tensors)
    if not entries:
        known = ", ".join(adapter_names(model)) or "none"
        raise ConfigError(f"no adapter is named {name!r}; the model has {known}")
    return Adapter(entries=tuple(entries), tensors=tensors, metadata=_origin(model, entries))


def _put_whole(values: dict[str, Factors], ref: Ref, entries: list[Entry], tensors: dict[str, Tensor]) -> None:
    """Add the entry of each whole value of a module, by parameter."""
    for leaf, whole in values.items():
        own = {f"base_model.model.{ref.name}.{_suffix(leaf, whole)}": next(iter(whole.tensors().values()))}
        if whole.magnitude is not None:
            own[f"base_model.model.{ref.name}.dora_scale"] = whole.magnitude.tensor
        entries.append(Entry(ref, leaf, whole, tuple(own), "peft"))
        tensors |= own


def _origin(model: nn.Module, entries: list[Entry]) -> dict[str, str]:
    """Return what a PEFT folder says about a model of transformers: its name, and the task of its class."""
    name, config = getattr(model, "name_or_path", None), getattr(model, "config", None)
    if not isinstance(name, str) or not hasattr(config, "model_type"):
        return {}
    encodes = bool(getattr(config, "is_encoder_decoder", False))
    endings = {**TASKS, **({"ForConditionalGeneration": "SEQ_2_SEQ_LM"} if encodes else {})}
    task = next((task for ending, task in endings.items() if type(model).__name__.endswith(ending)), None)
    stored = {entry.ref.name for entry in entries if isinstance(entry.factors, Full) and entry.param == "weight"}
    if task in HEADS and stored.isdisjoint(HEADS[task]):
        task = None
    return {key: value for key, value in ((BASE_MODEL, name), (TASK_TYPE, task)) if value}


def _of_pipeline(model: object, name: str, component: str) -> Adapter:
    """Return the adapter of every network that has it, in one; keys name the component."""
    entries: list[Entry] = []
    tensors: dict[str, Tensor] = {}
    for own, network in networks(model).items():
        if component in ("", own) and name in adapter_names(network):
            part = collect(network, name, component=own)
            entries += [replace(entry, keys=tuple(f"{own}.{key}" for key in entry.keys)) for entry in part.entries]
            tensors |= {f"{own}.{key}": tensor for key, tensor in part.tensors.items()}
    if not entries:
        known = ", ".join(adapter_names(model)) or "none"
        raise ConfigError(f"no adapter is named {name!r}; the model has {known}")
    return Adapter(entries=tuple(entries), tensors=tensors)


def adapter_names(model: object) -> list[str]:
    """Return the names of all adapters of a model, each once."""
    names = [name for layer in lora_layers(model).values() for name in layer.adapters]
    return list(dict.fromkeys([*names, *(name for wholes in all_wholes(model) for name in wholes.values)]))


def _suffix(leaf: str, factors: Factors) -> str:
    """Return the suffix of a whole value in reports."""
    if isinstance(factors, Full) and factors.mode == "set":
        return f"base_layer.{leaf}" if factors.inside else leaf
    if isinstance(factors, Full):
        return "lora_B.bias" if factors.bias_rank is not None else "diff_b" if leaf == "bias" else "diff"
    return "token_adapter.trainable_tokens_delta"


def _whole_values(site: Site, name: str) -> dict[str, Factors]:
    """Return the whole values of an adapter that was attached."""
    wholes = wholes_in(site.module)
    return {} if wholes is None else wholes.current(name)


def _whole_module(site: Site) -> dict[str, Factors]:
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
    wholes, inside = wholes_in(module), isinstance(module, LoraLayer)
    result: dict[str, Factors] = {}
    for leaf, visible in module._parameters.items():
        value = visible if wholes is None else wholes.base.get(leaf, visible)
        if leaf in leaves and value is not None:
            present = numbers(module, leaf) if value is visible else value
            result[leaf] = Full(value=encode(value if present is None else present), mode="set", inside=inside)
    return result
