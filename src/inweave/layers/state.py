"""Operations on a whole model: which adapters act, how strongly, merged or not.

Each function takes any module that contains LoRA layers (or is one) and does the same to all of them, or to none:
everything is checked before the first layer is touched, and a merge that fails is undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from inweave.adapter.strength_spec import finite_strength
from inweave.arguments import expect
from inweave.errors import AlreadyMerged, ConfigError, NotMerged
from inweave.layers.layer import LoraLayer
from inweave.layers.sites import sites


def lora_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Every LoRA layer by its (first) name; shared modules are listed once, see `LoraLayer.names`."""
    return {site.names[0]: site.module for site in sites(model) if isinstance(site.module, LoraLayer)}


def activate(model: nn.Module, names: str | Iterable[str] | Mapping[str, float]) -> None:
    """Make exactly these adapters active; their outputs add up.

    ``names``: one name, several, or {name: strength}; `[]` activates none.
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
    _require_known(layers, strengths)
    for layer in layers:
        for name, strength in strengths.items():
            if strength is not None and name in layer.adapters:
                layer.set_strength(name, strength)
        layer.activate([name for name in strengths if name in layer.adapters])


def set_strength(model: nn.Module, name: str, strength: float) -> None:
    """Set the strength of an adapter in every layer that has it; any finite number, 0 switches it off."""
    expect("name", name, str)
    finite_strength(strength)
    layers = _layers(model, "change a strength")
    _require_known(layers, [name])
    for layer in layers:
        if name in layer.adapters:
            layer.set_strength(name, strength)


def delete(model: nn.Module, name: str) -> None:
    """Remove an adapter and its parameters; the layers stay until `eject`."""
    expect("name", name, str)
    layers = _layers(model, "delete an adapter")
    _require_known(layers, [name])
    for layer in layers:
        if name in layer.adapters:
            layer.delete(name)


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """A context manager: inside it the model computes like the base, afterwards everything is as before.

    with inweave.disabled(model):
        base_output = model(x)
    """
    layers = _layers(model, "disable adapters")
    before = [layer.enabled for layer in layers]
    for layer in layers:
        layer.enable(False)
    try:
        yield
    finally:
        for layer, on in zip(layers, before, strict=True):
            layer.enable(on)


def merge(model: nn.Module) -> None:
    """Merge the active adapters into the weights at their strengths; the model then runs at the speed of the base.

    Raises `AlreadyMerged` if adapters are merged; `unmerge` restores the original weights.
    """
    layers = all_layers(model)
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


def unmerge(model: nn.Module) -> None:
    """Restore the bits that every weight had before `merge`. Raises `NotMerged` if nothing is merged."""
    merged = [layer for layer in all_layers(model) if layer.merged]
    if not merged:
        raise NotMerged("no layer of this model is merged")
    for layer in merged:
        layer.unmerge()


def all_layers(model: nn.Module) -> list[LoraLayer]:
    """Every LoRA layer; a model without any is an error."""
    layers = list(lora_layers(model).values())
    if not layers:
        raise ConfigError(f"this {type(model).__name__} has no LoRA layers; inject some first")
    return layers


def _layers(model: nn.Module, action: str) -> list[LoraLayer]:
    layers = all_layers(model)
    for layer in layers:
        layer.require_unmerged(action)
    return layers


def _require_known(layers: list[LoraLayer], names: Iterable[str]) -> None:
    known = dict.fromkeys(name for layer in layers for name in layer.adapters)
    unknown = [name for name in names if name not in known]
    if unknown:
        has = ", ".join(known) or "none"
        raise ConfigError([f"no adapter is named {name!r}; the model has {has}" for name in unknown])
