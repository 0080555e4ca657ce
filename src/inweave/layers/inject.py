"""Insert LoRA, LoHa or LoKr layers into a live model, and remove them again.

    inject(model, rank, alpha, targets)   new adapters on the targets (`inweave.layers.init`)
    attach(model, adapter)                a loaded adapter, placed by its names (`inweave.layers.from_adapter`)
    eject(model)                          the original modules, the same objects, back where they were

Everything is checked before the model is touched. The base is frozen, so that only the adapters' parameters require
gradients. `eject` restores the `requires_grad` of every parameter.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, Unpack

import torch
from torch import nn

from inweave.adapter import Adapter
from inweave.arguments import expect
from inweave.errors import ConfigError, MergeStateError, TargetError
from inweave.exchange.load import load
from inweave.formats.files import maps_of, refuse_truncated
from inweave.layers.algorithms import branch_named, dropout_problem, only_lora, to_branch
from inweave.layers.branch import Branch
from inweave.layers.eligible import ineligible, layer_kind
from inweave.layers.from_adapter import adapter_parts, factors_by_site
from inweave.layers.hosts import ParameterHost, refuse_branch
from inweave.layers.init import (
    Request,
    check_common,
    classification_head,
    fresh_branch,
    select_sites,
    unreachable_experts,
)
from inweave.layers.layer import LoraLayer
from inweave.layers.match import ALL_LINEAR, Targets
from inweave.layers.norms import put_norms, trained_norms
from inweave.layers.parameters import hosts_of, inner_module, is_hosted, named_parameters
from inweave.layers.sites import Site, keep_called, one_network, sites, ties
from inweave.layers.spec import DROPOUTS, AdapterSpec, SpecOptions
from inweave.layers.state import all_layers, delete
from inweave.layers.state import merge as merge_layers
from inweave.layers.training import freeze_base, thaw_base
from inweave.layers.training import trainable as train_whole
from inweave.layers.whole import all_wholes, remove_wholes, shared_by, switching, wholes_in, wholes_of
from inweave.ops.kinds.offloaded import is_hooked
from inweave.ops.kinds.pipelines import components_of
from inweave.ops.kinds.wrappers import peft_problem
from inweave.ops.tensors.subclasses import sharding_modules

Model = TypeVar("Model", bound=nn.Module)
Networks = TypeVar("Networks")
_DEFAULTS = AdapterSpec()


def inject(
    model: Model,
    rank: int = 16,
    alpha: float | None = None,
    targets: Targets = ALL_LINEAR,
    *,
    exclude: Targets = (),
    target_parameters: Sequence[str] = (),
    name: str = "default",
    spec: AdapterSpec = _DEFAULTS,
    allow_tied: bool = False,
    freeze: bool = True,
    **options: Unpack[SpecOptions],
) -> Model:
    """Add a new adapter to the target modules of a model.

    Args:
        model: any torch module.
        rank: the adapter's rank.
        alpha: the adapter is scaled by alpha / rank; None: by 1.
        targets: names of modules or the ends of their names, a regular expression, or "all-linear": every linear layer
            except the output layer and a classification head; such a head is trained and saved whole.
        exclude: modules to leave out of the targets, in the same forms (PEFT's exclude_modules).
        target_parameters: bare parameters by name or the end of it, as in PEFT: "experts.gate_up_proj" of a mixture of
            experts. With these, ``targets`` may be empty. A `torch.nn.MultiheadAttention` is a module, for ``targets``.
        name: the adapter's name.
        spec: the algorithm and its options: DoRA, rs-LoRA, dropout, seed, ...
        allow_tied: adapt a module whose weight another module also holds; only the named module changes, and a merge
            gives it a separate weight.
        freeze: stop training the base.
        options: single fields of the spec, which override ``spec``: ``inject(model, 16, dora=True)``.

    Returns:
        The model.

    Raises:
        ConfigError: an argument is invalid, a target matches nothing, or the name is taken; lists every problem.
        TargetError: a target cannot carry adapters.
        MergeStateError: adapters are merged into the model.
    """
    if isinstance(rank, Adapter | str | os.PathLike):
        raise ConfigError(
            f"rank must be a positive whole number, got {type(rank).__name__}; "
            "attach(model, adapter) adds an existing adapter"
        )
    if not isinstance(spec, AdapterSpec):
        raise ConfigError(f"spec: expected an AdapterSpec, got {type(spec).__name__}")
    expect("freeze", freeze, bool)
    expect("allow_tied", allow_tied, bool)
    spec = spec.with_options(**options)
    for pattern in ("rank_pattern", "alpha_pattern"):
        if not isinstance(table := getattr(spec, pattern), Mapping):
            raise ConfigError(f"{pattern}: expected {{regular expression: number}}, got {type(table).__name__}")
    one_network(model, "inject")
    _check_name(model, name)
    _refuse_sharded(model)
    all_sites = sites(model)
    request = Request.of(rank, alpha, spec)
    parameters = named_parameters(all_sites, target_parameters)
    chosen = select_sites(model, all_sites, targets, request, exclude, allow_none=bool(parameters))
    packed = [site for site in chosen if isinstance(inner_module(site), nn.MultiheadAttention)]
    parameters += [(site, leaf) for site in packed for leaf in ("in_proj", "out_proj")]
    layers = _wrap([site for site in chosen if site not in packed], all_sites, allow_tied, spec.network)
    hosts, others = hosts_of(parameters, all_sites)
    layers += others
    head = classification_head(model)
    if freeze and head is not None and (owned := all_wholes(head)):
        raise ConfigError(
            f"{owned[0].label} belongs to the adapter {', '.join(owned[0].values)}, and a new adapter would train it: "
            "eject that first, or use freeze=False"
        )
    attentions = {id(each): host.name for site, host in hosts if site in packed for each in host.layers()}
    branches = [fresh_branch(layer, request, attentions.get(id(layer), "")) for layer in layers]
    _add(model, all_sites, layers, name, branches, freeze, hosts)
    if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        if freeze and head is not None:
            owners = {id(part) for part in head.modules() if part._parameters}
            train_whole(model, [site.names[0] for site in all_sites if id(site.module) in owners])
        adapted = {label for _, host in hosts for layer in host.layers() for label in layer.names}
        if experts := [name for name in unreachable_experts(model) if name not in adapted]:
            warnings.warn(
                f"'all-linear' skips {len(experts)} fused expert weights, which are parameters, not layers "
                f"({', '.join(experts[:3])}{', ...' if len(experts) > 3 else ''}); target_parameters adapts them",
                stacklevel=2,
            )
    return model


def attach(
    model: Networks,
    adapter: Adapter | str | os.PathLike[str],
    *,
    name: str = "default",
    component: str | None = None,
    dropout: float = 0.0,
    hidden_dropout: float = 0.0,
    rank_dropout: float = 0.0,
    module_dropout: float = 0.0,
    output_dropout: float = 0.0,
    dtype: torch.dtype | None = None,
    allow_tied: bool = False,
    freeze: bool = True,
    trainable: bool = False,
) -> Networks:
    """Add an existing adapter to a model as layers, with its own targets, algorithms, ranks and scales.

    Heads, biases, norms and token rows that it holds take the place of the model's while it is active.

    Args:
        model: any torch module, or a diffusers pipeline: each network gets its part.
        adapter: a loaded adapter, or the path of its file.
        name: the name of the adapter in the model.
        component: the network to use of an adapter for several: "unet", "te1", ...
        dropout: dropout of the adapter's input in training.
        hidden_dropout: dropout of the values between the two factors of a LoRA.
        rank_dropout: dropout of whole ranks of each row.
        module_dropout: probability of leaving the adapter of a module out for an example.
        output_dropout: probability of leaving out an output of a LoRA for an example.
        dtype: dtype of the parameters; None: the dtype stored in the adapter.
        allow_tied: as in `inject`.
        freeze: as in `inject`.
        trainable: train the adapter further; otherwise its parameters require no gradients.

    Returns:
        The model.

    Raises:
        ConfigError: an argument is invalid, or the name is taken.
        FormatError: the file cannot be read.
        TargetError: the adapter does not fit the model, or a weight cannot take it as a layer.
        MergeStateError: adapters are merged into the model.
    """
    _check_name(model, name)
    expect("component", component, str, type(None))
    expect("freeze", freeze, bool)
    expect("allow_tied", allow_tied, bool)
    expect("trainable", trainable, bool)
    if trainable:
        _refuse_sharded(model)
    rates = dict(zip(DROPOUTS, (dropout, hidden_dropout, rank_dropout, module_dropout, output_dropout), strict=True))
    if problems := check_common(rates, dtype):
        raise ConfigError(problems)
    loaded = adapter if isinstance(adapter, Adapter) else load(adapter)
    refuse_truncated(maps_of(loaded.tensors.values()), "the adapter's file")
    options = _Attached(name, rates, dtype, allow_tied, freeze, trainable)
    for put in [_prepared(*part, options) for part in adapter_parts(model, loaded, component)]:
        put()
    return model


@dataclass(frozen=True, slots=True)
class _Attached:
    name: str
    rates: dict[str, float]
    dtype: torch.dtype | None
    allow_tied: bool
    freeze: bool
    trainable: bool


def _prepared(model: nn.Module, adapter: Adapter, component: str | None, options: _Attached) -> Callable[[], object]:
    """Check everything and return the function that puts the adapter into the model."""
    all_sites = sites(model)
    assigned = factors_by_site(model, adapter, all_sites, component)
    layers = _wrap([site for site, _ in assigned.layers], all_sites, options.allow_tied)
    hosts, hosted = hosts_of([(site, leaf) for site, leaf, _ in assigned.parameters], all_sites)
    layers += hosted
    received = [factors for _, factors in assigned.layers] + [factors for *_, factors in assigned.parameters]
    norms, others = trained_norms(assigned.wholes if options.trainable else [], all_sites, options.dtype)
    others = others if options.trainable else assigned.wholes
    wholes = shared_by(others, all_sites, options.allow_tied)
    branches = [
        to_branch(factors, layer.geometry, dtype=options.dtype, device=layer.device, **options.rates)
        for layer, factors in zip(layers, received, strict=True)
    ]
    _check_hidden_dropout(layers, branches)

    def put() -> None:
        by_id = {id(site.module): wholes_of(site.module, site.names[0]) for site, *_ in wholes}
        with switching(by_id.values()):
            if options.freeze:
                freeze_base(model)
            for site, leaf, factors, is_copy in wholes:
                by_id[id(site.module)].add(options.name, leaf, factors, is_copy=is_copy)
            for module_wholes in by_id.values():
                module_wholes.require_gradients(options.name, options.trainable)
        for branch in branches:
            branch.requires_grad_(options.trainable)
        _add(model, all_sites, layers, options.name, branches, options.freeze, hosts)
        put_norms(norms, all_sites, options.name)

    return put


def eject(model: Networks, name: str | None = None, *, merge: bool = False, keep_merged: bool = False) -> Networks:
    """Remove adapters and put the original modules back.

    Args:
        model: a model with LoRA layers, or a pipeline of such.
        name: remove only this adapter; layers with other adapters stay, and the base stays frozen. None: all adapters.
        merge: merge the active adapters into the weights first, and leave them there: PEFT's merge_and_unload.
        keep_merged: leave merged adapters in the weights permanently.

    Returns:
        The model, or the original module if ``model`` is itself a LoRA layer.

    Raises:
        ConfigError: the model has no LoRA layers, or no adapter of this name.
        MergeStateError: adapters are merged; call `unmerge` first, or pass ``keep_merged``. Or layers are offloaded.
    """
    if stuck := next((layer for layer in all_layers(model) if is_hooked(layer)), None):
        raise MergeStateError(
            f"{stuck.label}: offloading put a hook on this layer, without which its weight is not loaded; remove the "
            "hooks before ejecting (accelerate.hooks.remove_hook_from_submodules(model), pipe.remove_all_hooks())"
        )
    expect("merge", merge, bool)
    if name is not None:
        if merge:
            raise ConfigError("merge=True merges every active adapter: activate those to keep, and give no name")
        delete(model, name)
        for site in sites(model):
            if isinstance(site.module, LoraLayer | ParameterHost) and site.parents and not is_hosted(site):
                own = site.module.layers() if isinstance(site.module, ParameterHost) else [site.module]
                if not any(each.adapters for each in own):
                    site.replace(site.module.base)
        return model
    expect("keep_merged", keep_merged, bool)
    layers = all_layers(model)
    if merge and not any(layer.merged for layer in layers):
        merge_layers(model)
    merged = [layer for layer in layers if layer.merged]
    if merged and not merge and not keep_merged:
        raise MergeStateError(
            f"{len(merged)} layers are merged, {merged[0].label} the first: unmerge before ejecting, "
            "or use keep_merged=True to leave the merged weights in place"
        )
    for site in sites(model):
        if isinstance(site.module, LoraLayer | ParameterHost) and not is_hosted(site):
            site.replace(site.module.base)
    remove_wholes(model, keep=merge or bool(merged))
    thaw_base(model)
    return model.base if isinstance(model, LoraLayer) else model  # type: ignore[return-value]


def _refuse_sharded(model: object) -> None:
    if any(sharding_modules(network) for network in components_of(model).values()):
        raise TargetError(
            "the model is sharded, and gradients of a new adapter would not be summed; add adapters, then fully_shard"
        )


def _check_name(model: object, name: str) -> None:
    if not isinstance(name, str) or not name or "." in name or hasattr(nn.ModuleDict, name):
        raise ConfigError(f"{name!r} cannot be an adapter's name: use a word without dots")
    all_sites = sites(model)
    if problem := next(filter(None, map(peft_problem, components_of(model).values())), ""):
        raise TargetError(problem)
    for site in all_sites:
        if isinstance(site.module, LoraLayer):
            site.module.require_unmerged("add an adapter")
        wholes = wholes_in(site.module)
        if (isinstance(site.module, LoraLayer) and name in site.module.adapters) or (wholes and name in wholes.values):
            raise ConfigError(
                f"an adapter {name!r} is already injected (on {' = '.join(site.names)}); "
                "eject it first, or give the new one another name"
            )


def _wrap(chosen: list[Site], all_sites: list[Site], allow_tied: bool, network: str = "lora") -> list[LoraLayer]:
    """Return the layer of each site, not yet in the model; raise TargetError for all modules that cannot have one."""
    tied, problems = ties(all_sites), []
    targets = {id(site.module) for site in chosen}
    for site in chosen:
        kind, label = layer_kind(site.module), " = ".join(site.names)
        if reason := ineligible(site.module) or site.unused():
            problems.append(f"{label}: {reason}")
        elif kind is not None and kind.embedding and not branch_named(network).takes_embeddings:
            problems.append(f"{label}: {only_lora(network)}")
        elif any(id(child) in targets for child in site.module.modules() if child is not site.module):
            problems.append(f"{label}: modules inside it are targets too; target either it or them")
        elif (others := tied.get(id(site.module))) and not allow_tied:
            problems.append(
                f"{label}: its weight is also that of {', '.join(others)}, which would not be adapted; leave it out, "
                "or use allow_tied=True"
            )
    if problems:
        raise TargetError("\n".join(problems))
    return [_layer(site, tied=id(site.module) in tied) for site in chosen]


def _layer(site: Site, *, tied: bool) -> LoraLayer:
    if isinstance(site.module, LoraLayer):
        return site.module
    kind = layer_kind(site.module)
    assert kind is not None
    return LoraLayer(site.module, kind, site.names, tied=tied)


def _check_hidden_dropout(layers: Sequence[LoraLayer], branches: Sequence[Branch]) -> None:
    """Raise ConfigError if a branch has a dropout that its algorithm or its layer's kind does not define."""
    problems = []
    for layer, branch in zip(layers, branches, strict=True):
        rates = {name: getattr(branch, name) for name in DROPOUTS}
        reason = dropout_problem(branch.network(), branch.magnitude is not None, rates)
        if branch.drops_between and not layer.kind.in_two_steps:
            reason = f"{type(layer.kind).__name__} applies the product of both factors at once; use dropout"
        if reason is not None:
            problems.append(f"{layer.label}: {reason}")
    if problems:
        raise ConfigError(problems[:5])


def _add(
    model: Model,
    all_sites: list[Site],
    layers: Sequence[LoraLayer],
    name: str,
    branches: list[Branch],
    freeze: bool,
    hosts: Sequence[tuple[Site, ParameterHost]],
) -> Model:
    """Put the layers into the model and add one branch to each."""
    _check_hidden_dropout(layers, branches)
    inner = {id(layer) for _, host in hosts for layer in host.layers()}
    pairs = zip(layers, branches, strict=True)
    if wrong := [problem for each, b in pairs if id(each) in inner and (problem := refuse_branch(each, b))]:
        raise ConfigError(wrong[:5])
    if freeze:
        freeze_base(model)
    by_module = {id(site.module): site for site in all_sites}
    by_module |= {id(layer): site for site, host in hosts for layer in host.layers()}
    for site, host in hosts:
        if site.module is not host:
            site.replace(host)
    for layer, branch in zip(layers, branches, strict=True):
        if id(layer) not in by_module:
            by_module[id(layer.base)].replace(layer)
        layer.add(name, branch)
    keep_called(all_sites)
    return model
