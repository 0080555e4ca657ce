"""Assign an adapter's factors to the modules of a live model, one set per parameter.

    resolve(adapter, names and shapes of the model)  ->  placements  ->  layers: [(site, factors)]
                                                                         whole values: [(site, parameter, factors)]

    source rows   this module gets some rows of a fused change: `Factors.rows`
    target rows   several parts make up one fused weight: `inweave.adapter.join`, zeros for missing parts
    swap          halves exchanged: `Factors.swapped`

Whether a weight is stored as (in, out) is determined from the module, since PEFT's `fan_in_fan_out` applies to the
whole model. Factors that cannot be layers are refused in one error that lists the modules; they can be merged instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import nn

from inweave.adapter import Adapter, Factors, join
from inweave.errors import ConfigError, TargetError
from inweave.layers.algorithms import obstacle
from inweave.layers.eligible import geometry_of, ineligible
from inweave.layers.hosts import ParameterHost, host_problem, unhosted
from inweave.layers.layer import LoraLayer
from inweave.layers.sites import Site, networks, sites
from inweave.layers.whole import obstacle as whole_obstacle
from inweave.ops.kinds import stored_transposed
from inweave.ops.kinds.wrappers import named_modules
from inweave.ops.quantized import QuantizedLayer
from inweave.targets.index import ModelIndex, component_from_names, index_from_names
from inweave.targets.links import Shape
from inweave.targets.plan import Placement
from inweave.targets.resolve import resolve

_LISTED = 5


@dataclass(frozen=True, slots=True)
class Assigned:
    """What the modules of a model receive from an adapter."""

    layers: list[tuple[Site, Factors]] = field(default_factory=list)
    wholes: list[tuple[Site, str, Factors]] = field(default_factory=list)
    parameters: list[tuple[Site, str, Factors]] = field(default_factory=list)


def model_index(model: nn.Module) -> ModelIndex:
    """Return the index of a live model's names that adapters are resolved against; adapters in it are left out."""
    return _index(model)[0]


def adapter_parts(
    model: object, adapter: Adapter, component: str | None
) -> list[tuple[nn.Module, Adapter, str | None]]:
    """Return (network, its part of the adapter, component) for every network of a model that the adapter changes."""
    by_component = networks(model)
    if isinstance(model, nn.Module):
        return [(model, adapter, component)]
    if component is not None:
        if component not in by_component:
            raise ConfigError(f"the model has no component {component!r}; it has {', '.join(by_component)}")
        return [(by_component[component], adapter, component)]
    shapes = {name: _shapes(network, logical=True)[0] for name, network in by_component.items()}
    index = ModelIndex({name: component_from_names(name, own) for name, own in shapes.items()}, in_order=True)
    keys: dict[str, set[str]] = {}
    for placement in resolve(adapter, index).placements:
        keys.setdefault(placement.component, set()).update(placement.keys)
    return [(by_component[name], _with_keys(adapter, own), None) for name, own in keys.items()]


def _with_keys(adapter: Adapter, keys: set[str]) -> Adapter:
    """Return the adapter with the entries that come from some keys."""
    entries = tuple(entry for entry in adapter if not keys.isdisjoint(entry.keys))
    used = {key for entry in entries for key in entry.keys}
    tensors = {key: tensor for key, tensor in adapter.tensors.items() if key in used}
    return replace(adapter, entries=entries, carried={}, tensors=tensors)


def factors_by_site(model: nn.Module, adapter: Adapter, all_sites: list[Site], component: str | None) -> Assigned:
    """Return the factors that each module of ``model`` receives from ``adapter``."""
    index, own = _index(model, logical=True)
    chosen = adapter if component is None else _of_component(adapter, component)
    try:
        plan = resolve(chosen, index)
    except TargetError as error:
        components = {entry.ref.component for entry in adapter}
        if component is None and len(components) > 1:
            names = ", ".join(sorted(name or "(unnamed)" for name in components))
            raise TargetError(f"{error}\nthe adapter holds {names}: choose one with component=...") from None
        raise
    by_name = {name: site for site in all_sites for name in site.names}
    received, seen = Assigned(), set[tuple[int, str]]()
    problems: list[str] = []
    for (_, tensor), placements in plan.by_tensor().items():
        name, _, leaf = own.get(tensor, tensor).rpartition(".")
        site = by_name.get(name)
        factors = _factors(placements, site, leaf, all_sites)
        if site is not None and (id(site), leaf) in seen:
            factors = "the same module receives factors under another of its names"
        if isinstance(factors, str) or site is None:
            problems.append(f"{own.get(tensor, tensor)}: {factors}")
            continue
        seen.add((id(site), leaf))
        if factors.takes_place:
            received.wholes.append((site, leaf, factors))
        else:
            spot = host_spot(site, leaf, all_sites)
            if spot:
                received.parameters.append((*spot, factors))
            else:
                received.layers.append((site, factors))
    if problems:
        more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
        total = len(problems) + len(seen)
        head = f"{len(problems)} of {total} weights cannot take this adapter as layers; merge it instead:"
        raise TargetError("\n  ".join([head, *problems[:_LISTED], *more]))
    return received


def host_spot(site: Site, leaf: str, all_sites: list[Site]) -> tuple[Site, str] | None:
    """Return (module, name of its layer) if a `ParameterHost` computes with a parameter, or None."""
    attention = next((p for p, _ in site.parents if isinstance(unhosted(p), nn.MultiheadAttention)), None)
    if attention is not None and leaf == "weight":
        return next((each, "out_proj") for each in all_sites if each.module is attention)
    if leaf in ("weight", "bias") or leaf not in site.module._parameters:
        return None
    return site, leaf


def _factors(placements: list[Placement], site: Site | None, leaf: str, all_sites: list[Site]) -> Factors | str:
    """Return the factors for a module, or the reason why it cannot take them."""
    if site is None:
        return "the model has no such module"
    is_whole = placements[0].factors.takes_place
    spot = None if is_whole else host_spot(site, leaf, all_sites)
    if not is_whole and spot is None and leaf != "weight":
        return "only the weights of modules take LoRA"
    reason = host_problem(spot[0].module, spot[1]) if spot else ineligible(site.module) or site.unused()
    if not is_whole and reason:
        return reason
    creates = placements[0].creates
    parts: list[tuple[Placement, Factors]] = []
    for placement in placements:
        part = _part(placement)
        if isinstance(part, str):
            return part
        parts.append((placement, part))
    factors = parts[0][1]
    if len(parts) > 1 or placements[0].target is not None:
        joined = _joined(parts)
        if joined is None:
            return (
                f"its {len(parts)} parts have no common pair or product "
                "(different algorithms, factors or scales, or a magnitude on some rows only)"
            )
        factors = joined
    if is_whole:
        return whole_obstacle(site.module, leaf, factors, creates=creates) or factors
    if spot:
        return obstacle(factors, ParameterHost(unhosted(spot[0].module), "").layer(spot[1]).geometry) or factors
    return obstacle(factors, geometry_of(site.module)) or factors


def _part(placement: Placement) -> Factors | str:
    """Return the factors of one placement's rows, or the reason why there are none."""
    factors: Factors | None = placement.factors
    if placement.widen is not None or (placement.creates and not placement.factors.takes_place):
        return "it creates or widens a weight"
    if placement.transpose or placement.whole:
        return "its rows cannot be separated from those of other weights"
    if placement.source is not None:
        factors = placement.factors.rows(*placement.source)
        if factors is None:
            return f"{placement.factors.kind} cannot be cut to rows {placement.source}"
    if placement.swap and factors is not None:
        factors = factors.swapped()
    return factors if factors is not None else f"the halves of {placement.factors.kind} cannot be exchanged"


def _joined(parts: list[tuple[Placement, Factors]]) -> Factors | None:
    """Return one set of factors for a fused weight; rows without a part are unchanged."""
    slots: list[Factors | None] = []
    sizes: list[int] = []
    end, total = 0, parts[0][0].shape[0]
    for placement, factors in sorted(parts, key=lambda part: part[0].rows().start):
        rows = placement.rows()
        if rows.start > end:
            slots.append(None)
            sizes.append(rows.start - end)
        slots.append(factors)
        sizes.append(len(rows))
        end = rows.stop
    if end < total:
        slots.append(None)
        sizes.append(total - end)
    made = join(slots, sizes)
    return None if made is None else made[0]


def _of_component(adapter: Adapter, component: str) -> Adapter:
    """Return the adapter with the entries of one network; "te1" also takes those of an unnumbered "te"."""
    names = {component, ""} | ({"te"} if component.startswith("te") else set())
    entries = tuple(entry for entry in adapter if entry.ref.component in names)
    if not entries:
        has = ", ".join(sorted({entry.ref.component or "(unnamed)" for entry in adapter}))
        raise ConfigError(f"the adapter has nothing for component {component!r}; it has {has}")
    return _with_keys(replace(adapter, entries=entries), {key for entry in entries for key in entry.keys})


def _index(model: nn.Module, *, logical: bool = False) -> tuple[ModelIndex, dict[str, str]]:
    """Return the index, and {name in the index: name in the model} for names that differ; see `_shapes`."""
    shapes, own = _shapes(model, logical=logical)
    return replace(index_from_names(shapes), in_order=True), own


def _shapes(model: nn.Module, *, logical: bool) -> tuple[dict[str, Shape], dict[str, str]]:
    """Return {name in files: shape}, and {name in files: name in the model} for names that differ.

    ``logical``: weights that a registered module stores as (in, out) get the shape (out, in), as files expect it.
    """
    hidden = tuple(
        f"{name}.adapters." for site in sites(model) if isinstance(site.module, LoraLayer) for name in site.names
    )
    shapes: dict[str, Shape] = {}
    for path, module in named_modules(model):  # a state dict has other names where quantization splits weights
        absent = module._non_persistent_buffers_set
        base = module.base if isinstance(module, LoraLayer) else module
        if isinstance(base, QuantizedLayer):
            absent = absent | set(base.weights._fields)
            shapes[f"{path}.weight" if path else "weight"] = base.shape
        for leaf, value in (*module._parameters.items(), *module._buffers.items()):
            name = f"{path}.{leaf}" if path else leaf
            if value is not None and leaf not in absent and not (hidden and name.startswith(hidden)):
                shapes[name] = tuple(value.shape)
    if logical:
        shapes |= {name: shapes[name][::-1] for name in _transposed_weights(model) if name in shapes}
    if "embeddings.token_embedding.weight" in shapes and not any(name.startswith("text_model.") for name in shapes):
        own = {f"text_model.{name}": name for name in shapes}  # CLIP has this prefix in files, but not in memory
        return {disk: shapes[name] for disk, name in own.items()}, own
    return shapes, {}


def _transposed_weights(model: nn.Module) -> list[str]:
    """Return the names of weights that registered modules, with or without adapters, store as (in, out)."""
    modules = ((site, site.module.base if isinstance(site.module, LoraLayer) else site.module) for site in sites(model))
    return [f"{name}.weight" for site, module in modules if stored_transposed(module) for name in site.names]
