"""Operations on a whole model: activating, scaling, disabling, merging and deleting adapters.

Each function takes any module that contains LoRA layers (or is one) and changes all of its layers or none: everything
is checked before the first layer is touched, and a failed merge is undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from inweave.adapter.strength_spec import finite_strength
from inweave.arguments import expect
from inweave.errors import AlreadyMerged, ConfigError, NotMerged, TargetError
from inweave.layers.layer import LoraLayer
from inweave.layers.sites import networks, sites
from inweave.layers.whole import Wholes, all_wholes, switching
from inweave.ops.kinds.offloaded import elsewhere, offload_groups
from inweave.ops.tensors.subclasses import reshard


def lora_layers(model: object) -> dict[str, LoraLayer]:
    """Return every LoRA layer by its (first) name; shared modules are listed once, see `LoraLayer.names`."""
    return {site.names[0]: site.module for site in sites(model) if isinstance(site.module, LoraLayer)}


def activate(model: object, names: str | Iterable[str] | Mapping[str, float]) -> None:
    """Make exactly these adapters active; their outputs are summed. Those that are not require no gradients meanwhile.

    Args:
        model: a model with LoRA layers.
        names: one name, several, or {name: strength}; `[]` activates none.

    Raises:
        ConfigError: no adapter has one of these names, a strength is not a finite number, or there are no LoRA layers.
        MergeStateError: adapters are merged.
    """
    if not isinstance(names, Iterable):
        raise ConfigError(f"names: expected names of adapters, got {type(names).__name__}")
    names = names if isinstance(names, str | Mapping) else list(names)
    for each in [] if isinstance(names, str) else names:
        expect("names", each, str)
    layers = _layers(model, "switch adapters")
    strengths: dict[str, float | None]
    if isinstance(names, Mapping):
        strengths = {name: finite_strength(strength) for name, strength in names.items()}
    else:
        strengths = dict.fromkeys([names] if isinstance(names, str) else names)
    wholes = all_wholes(model)
    _require_known(layers, wholes, strengths)
    with switching(wholes):
        for each in wholes:
            each.strengths |= {n: s for n, s in strengths.items() if s is not None and n in each.values}
            each.active = tuple(name for name in strengths if name in each.values)
    for layer in layers:
        for name, strength in strengths.items():
            if strength is not None and name in layer.adapters:
                layer.set_strength(name, strength)
        layer.activate([name for name in strengths if name in layer.adapters])


def set_strength(model: object, name: str, strength: float) -> None:
    """Set the strength of an adapter in every layer that has it.

    Args:
        model: a model with LoRA layers.
        name: the adapter's name.
        strength: any finite number; 0 turns the adapter off.

    Raises:
        ConfigError: no adapter has this name, the strength is not a finite number, or there are no LoRA layers.
        MergeStateError: adapters are merged.
    """
    expect("name", name, str)
    finite_strength(strength)
    layers = _layers(model, "change a strength")
    wholes = all_wholes(model)
    _require_known(layers, wholes, [name])
    with switching(wholes):
        for each in wholes:
            each.strengths |= {name: float(strength)} if name in each.values else {}
    for layer in layers:
        if name in layer.adapters:
            layer.set_strength(name, strength)


def delete(model: object, name: str) -> None:
    """Remove an adapter and its parameters; the layers stay until `eject`."""
    expect("name", name, str)
    layers = _layers(model, "delete an adapter")
    wholes = all_wholes(model)
    _require_known(layers, wholes, [name])
    with switching(wholes):
        for each in wholes:
            each.forget(name)
    for layer in layers:
        if name in layer.adapters:
            layer.delete(name)


@contextmanager
def disabled(model: object) -> Iterator[None]:
    """Turn all adapters off inside a `with` block, and restore their state afterwards.

        with inweave.disabled(model):
            base_output = model(x)

    Args:
        model: a model with LoRA layers.

    Returns:
        A context manager.

    Raises:
        ConfigError: the model has no LoRA layers.
        MergeStateError: adapters are merged.
    """
    layers = _layers(model, "disable adapters")
    wholes = all_wholes(model)
    before, off = [layer.enabled for layer in layers], [each.off for each in wholes]
    with switching(wholes):
        for each in wholes:
            each.off = True
    for layer in layers:
        layer.enable(False)
    try:
        yield
    finally:
        for layer, on in zip(layers, before, strict=True):
            layer.enable(on)
        with switching(wholes):
            for each, was_off in zip(wholes, off, strict=True):
                each.off = was_off


def merge(model: object) -> None:
    """Merge the active adapters into the weights at their strengths; the model then runs at the speed of the base.

    `unmerge` restores the original weights. If a layer cannot be merged, all of them are restored.

    Args:
        model: a model with LoRA layers.

    Raises:
        AlreadyMerged: adapters are merged already.
        MergeStateError: adapters are disabled.
        TargetError: a merged weight would overflow its dtype, a custom layer does not match its registered kind, or a
            weight cannot be written: on disk, on the meta device, or quantized.
        ConfigError: the model has no LoRA layers.
    """
    layers = all_layers(model)
    require_in_place(model, layers)
    if merged := [layer for layer in layers if layer.merged]:
        raise AlreadyMerged(f"{len(merged)} of {len(layers)} layers are merged already, {merged[0].label} the first")
    try:
        for layer in layers:
            layer.merge()
    except BaseException:
        for layer in layers:
            if layer.merged:
                layer.unmerge()
        raise


def unmerge(model: object) -> None:
    """Restore every weight to its value before `merge`, bit for bit.

    Args:
        model: a model with merged LoRA layers.

    Raises:
        NotMerged: no layer is merged.
        TargetError: a weight is on disk or on the meta device.
        ConfigError: the model has no LoRA layers.
    """
    layers = all_layers(model)
    merged = [layer for layer in layers if layer.merged]
    if not merged:
        raise NotMerged("no layer of this model is merged")
    require_in_place(model, merged)
    for layer in merged:
        layer.unmerge()


def all_layers(model: object) -> list[LoraLayer]:
    """Return every LoRA layer; raise ConfigError if there are none."""
    layers = list(lora_layers(model).values())
    if not layers and not all_wholes(model):
        raise ConfigError(f"this {type(model).__name__} has no LoRA layers; inject some first")
    return layers


def require_in_place(model: object, layers: Iterable[LoraLayer]) -> None:
    """Raise TargetError if diffusers' group offloading has a weight or an adapter of these layers elsewhere.

    Parameters that FSDP gathered are put back first.
    """
    groups: dict[int, object] = {}
    for network in networks(model).values():
        reshard(network)
        groups |= offload_groups(network)
    for layer in layers if groups else ():
        for tensor in layer.parameters():
            if reason := elsewhere(groups.get(id(tensor)), tensor):
                raise TargetError(f"{layer.label}: {reason}")


def _layers(model: object, action: str) -> list[LoraLayer]:
    layers = all_layers(model)
    for layer in layers:
        layer.require_unmerged(action)
    return layers


def _require_known(layers: list[LoraLayer], wholes: list[Wholes], names: Iterable[str]) -> None:
    known = dict.fromkeys(name for layer in layers for name in layer.adapters)
    known |= dict.fromkeys(name for each in wholes for name in each.values)
    unknown = [name for name in names if name not in known]
    if unknown:
        has = ", ".join(known) or "none"
        raise ConfigError([f"no adapter is named {name!r}; the model has {has}" for name in unknown])
