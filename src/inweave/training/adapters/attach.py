"""Attach adapters to live networks: fresh ones, or the one to start from.

    rank            the rule's, else conv_rank for convolutions wider than 1x1, else rank
    alpha           the rule's, or the rule's rank if it has one; conv_alpha, or conv_rank, for those convolutions;
                    else alpha
    start_from      the adapter defines kind, ranks, alphas and modules; a setting that contradicts it is an error, and
                    rules may only set learning rates
    learning rate   the rule's, else text_encoder_learning_rate for text encoders, else learning_rate; the factors `up`
                    (B) train at loraplus_lr_ratio times that: Hayou et al., "LoRA+", arXiv 2402.12354

All parameters are fp32 master weights, named `<component>.<module>.<factor>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from inweave.adapter import Adapter, Entry, Tensor
from inweave.errors import ConfigError, TargetError
from inweave.exchange.convert import GENERIC, default_dialect, dialect_refusal, rewrite
from inweave.exchange.load import load
from inweave.layers import AdapterSpec, LoraLayer, algorithm_of, attach, collect, geometry_of, inject, lora_layers
from inweave.layers.norms import NormLayer, inject_norms
from inweave.layers.qat import Rounding, fake_quantize
from inweave.layers.spec import DROPOUTS
from inweave.layers.whole import all_wholes
from inweave.models.quantization import quantized_names
from inweave.targets.index import ModelIndex
from inweave.targets.resolve import resolve
from inweave.targets.respell import respell
from inweave.training.adapters.order import side_by_side
from inweave.training.adapters.summary import conflicts, shape_of
from inweave.training.adapters.targets import (
    DENOISER,
    check_rules,
    check_targets,
    first_rules,
    select_modules,
    select_norms,
)
from inweave.training.config.schema import TrainConfig
from inweave.training.config.types import Rule

NAME = "trained"
DIALECTS = ("kohya", "onetrainer", "diffusers", "peft")  # fallbacks for the setting, the most widely read first
N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class TrainableSet:
    """The trainable parameters, their learning-rate multipliers, and the dialect they will be written in."""

    parameters: dict[str, nn.Parameter]
    multipliers: dict[str, float]
    modules: int
    dialect: str = ""  # a dialect that can hold the adapter; empty if it was not determined
    notes: tuple[str, ...] = ()  # about the file that will be written
    rounding: Rounding | None = None  # of quantization-aware training


def attach_adapters(
    networks: Mapping[str, nn.Module], config: TrainConfig, index: ModelIndex | None = None
) -> TrainableSet:
    """Attach a fresh adapter to every network, or the one to start from; ``index``: the base with names as in files."""
    fresh, targeted = dict(networks), set[str]()
    if config.start_from is not None:
        if "targets" in config.explicit_fields:
            targeted = {
                f"{component}.{name}"
                for component, network in networks.items()
                for name in select_modules(component, network, config)
            }
        fresh = _start_from(networks, config, index)
    selected = {component: select_modules(component, network, config) for component, network in fresh.items()}
    norms = {component: select_norms(network, config) for component, network in fresh.items()}
    if fresh == dict(networks):
        check_targets(networks, config)
    for component, network in fresh.items():
        _attach_fresh(component, network, selected[component], norms[component], config)
        selected[component] += norms[component]
    if not any(lora_layers(network) for network in networks.values()):
        raise ConfigError(f"rules: nothing of {', '.join(networks)} is left to train, every module is skipped")
    if not fresh and (problems := conflicts(shape_of(networks, NAME), config, targeted)):
        raise ConfigError(problems)  # if some networks get fresh adapters, the settings describe those
    rounding = _round_merged(networks[DENOISER], config.qat) if config.qat != "off" else None
    parameters: dict[str, nn.Parameter] = {}
    multipliers: dict[str, float] = {}
    modules: list[str] = []
    for component, network in networks.items():
        layers = lora_layers(network)
        rules = first_rules([f"{component}.{module}" for module in layers], config.rules)
        for module, layer in layers.items():
            modules.append(f"{component}.{module}")
            rate = _learning_rate(rules[modules[-1]], component, config)
            layer.train()
            for leaf, parameter in layer.adapters[NAME].named_parameters():
                name = f"{component}.{module}.{leaf}"
                parameter.requires_grad_(True)
                if parameter.dtype != torch.float32:
                    parameter.data = parameter.data.float()
                parameters[name] = parameter
                multipliers[name] = rate / config.learning_rate
                if leaf == "up" and config.loraplus_lr_ratio is not None:
                    multipliers[name] *= config.loraplus_lr_ratio
    if config.loraplus_lr_ratio is not None and (kinds := _without_pairs(networks)):
        raise ConfigError(f"loraplus_lr_ratio: LoRA+ is for LoRA's two factors, and start_from has {', '.join(kinds)}")
    parameters = side_by_side(parameters)
    candidates = modules + [f"{component}.{name}" for component, names in selected.items() for name in names]
    check_rules(config.rules, list(dict.fromkeys(candidates)))
    if index is None:
        return TrainableSet(parameters, multipliers, len(modules), rounding=rounding)
    chosen = _choose_dialect(networks, parameters, config, index)
    return TrainableSet(parameters, multipliers, len(modules), *chosen, rounding=rounding)


def _round_merged(denoiser: nn.Module, format: str) -> Rounding:
    """Let the trained layers that a base in this format quantizes compute with the quantized sum."""
    names = quantized_names(denoiser, format)
    layers = [layer for name, layer in lora_layers(denoiser).items() if name in names and isinstance(layer, LoraLayer)]
    if not layers:
        raise ConfigError(f'qat = "{format}": quantizing to {format} changes none of the layers that are trained')
    return fake_quantize(layers, format)


def _without_pairs(networks: Mapping[str, nn.Module]) -> list[str]:
    """Return the kinds of attached adapters that are not a pair of factors."""
    layers = [layer for network in networks.values() for layer in lora_layers(network).values()]
    branches = [layer.branch(NAME) for layer in layers if not isinstance(layer, NormLayer)]
    return list(dict.fromkeys(branch.variant() for branch in branches if not branch.is_pair))


def collect_adapters(networks: Mapping[str, nn.Module]) -> Adapter:
    """Return the adapters of all networks as one; keys name the component, since two CLIPs have the same modules."""
    entries: list[Entry] = []
    tensors: dict[str, Tensor] = {}
    for component, network in networks.items():
        if not lora_layers(network):
            continue  # every module of it is skipped
        part = collect(network, NAME, component=component)
        entries += [replace(entry, keys=tuple(f"{component}.{key}" for key in entry.keys)) for entry in part.entries]
        tensors |= {f"{component}.{key}": tensor for key, tensor in part.tensors.items()}
    return Adapter(entries=tuple(entries), tensors=tensors)


def dialect_for(config: TrainConfig, index: ModelIndex) -> tuple[str, str]:
    """Return (a dialect that knows the names of this model, why it is not the usual one).

    Raises:
        ConfigError: the setting names a dialect that does not.
    """
    if "model" in index.components and config.dialect not in GENERIC:
        raise ConfigError(
            f"dialect: {config.dialect} is for diffusion models; a language model is saved as {GENERIC[0]}"
        )
    explicit = "dialect" in config.explicit_fields or "model" in index.components
    usual = config.dialect if explicit else TrainConfig.model_fields["dialect"].default
    if not (reason := dialect_refusal(usual, index)):
        return config.dialect, ""
    if explicit:
        raise ConfigError(f"dialect: {reason}")
    chosen = default_dialect(index, usual)
    return chosen, f'dialect "{chosen}" is used: {reason}'


@torch.no_grad()
def _choose_dialect(
    networks: Mapping[str, nn.Module], parameters: Mapping[str, nn.Parameter], config: TrainConfig, index: ModelIndex
) -> tuple[str, tuple[str, ...]]:
    """Return (the dialect to write, notes): the configured one, or by default one that can hold the adapter.

    kohya's names fuse the projections of transformers, for which LoHa and LoKr have no common factors. This is checked
    before the first step.
    """
    dialect, unnamed = dialect_for(config, index)
    original = {name: parameter.clone() for name, parameter in parameters.items()}
    generator = torch.Generator().manual_seed(0)
    try:
        for parameter in parameters.values():  # fresh ones are zeros, which can be fused even if trained values cannot
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
        adapter = collect_adapters(networks)
        written = rewrite(adapter, dialect, index)
        fallbacks = DIALECTS if written.lost and index.denoiser else ()
        others = [name for name in fallbacks if name != dialect and not dialect_refusal(name, index)]
        possible = {name: other for name in others if not (other := rewrite(adapter, name, index)).lost}
    finally:
        for name, parameter in parameters.items():
            parameter.copy_(original[name])
    if not written.lost:
        return dialect, tuple(filter(None, (unnamed, *written.notes)))
    reason = f'{len(written.lost)} modules cannot be written as "{dialect}", the first: {written.lost[0].reason}'
    if possible and "dialect" not in config.explicit_fields:
        chosen = next(iter(possible))
        return chosen, (f'dialect "{chosen}" is used: {reason}', *possible[chosen].notes)
    instead = " or ".join(f'"{name}"' for name in possible)
    advice = f"set dialect = {instead}" if possible else "choose another dialect, network or targets"
    raise ConfigError(f"dialect: {reason}; {advice}")


def _attach_fresh(component: str, network: nn.Module, names: list[str], norms: list[str], config: TrainConfig) -> None:
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    rules = first_rules([f"{component}.{name}" for name in [*names, *norms]], config.rules)
    for name in names:
        rule = rules[f"{component}.{name}"]
        if rule is None or not rule.skip:
            ranks[name], alphas[name] = _rank_and_alpha(network.get_submodule(name), rule, config)
    if not ranks:
        return  # for example, one of two text encoders
    default = config.alpha if config.alpha is not None else float(config.rank)
    spec = AdapterSpec(
        network=algorithm_of(config.network), dora=config.network == "dora", rslora=config.rslora,
        rank_pattern=_patterns(ranks, config.rank), alpha_pattern=_patterns(alphas, default),
        factor=config.lokr_factor, decompose_both=config.lokr_decompose_both, tucker=config.tucker, seed=config.seed,
        dtype=torch.float32, **_dropouts(config),
    )  # fmt: skip
    inject(network, config.rank, default, list(ranks), name=NAME, spec=spec)
    skipped = {name for name in norms if (rule := rules[f"{component}.{name}"]) is not None and rule.skip}
    inject_norms(network, set(norms) - skipped, NAME)


def _dropouts(config: TrainConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in DROPOUTS}


def _rank_and_alpha(module: nn.Module, rule: Rule | None, config: TrainConfig) -> tuple[int, float]:
    """Return (rank, alpha) of a fresh adapter on a module."""
    convolution = geometry_of(module).wide
    rank = (rule.rank if rule else None) or (config.conv_rank if convolution else None) or config.rank
    alpha = rule.alpha if rule else None
    if alpha is None and not (rule and rule.rank):
        alpha = config.alpha
        if convolution and (config.conv_alpha or config.conv_rank):
            alpha = config.conv_alpha
    return rank, float(rank) if alpha is None else alpha


def _patterns(values: Mapping[str, N], default: N) -> dict[str, N]:
    """Return one pattern per module that differs from the default, matching its whole name."""
    return {f"^{re.escape(name)}": value for name, value in values.items() if value != default}


def _start_from(
    networks: Mapping[str, nn.Module], config: TrainConfig, index: ModelIndex | None
) -> dict[str, nn.Module]:
    """Attach an adapter file of any dialect; return the networks that it does not adapt."""
    path = str(config.start_from)
    if sized := [rule.pattern for rule in config.rules if rule.skip or rule.rank or rule.alpha]:
        raise ConfigError(
            [f"rules: {each!r} sets rank, alpha or skip, but start_from brings its own modules" for each in sized]
        )
    adapter = load(path)
    if index is not None:
        resolve(adapter, index)  # raises if a tensor has no target
        renamed = respell(adapter, index, lambda component: "diffusers")
        if renamed.lost:
            reasons = [f"{finding.module}: {finding.reason}" for finding in renamed.lost[:5]]
            raise TargetError("\n  ".join([f"{path}: cannot be trained further:", *reasons]))
        adapter = replace(adapter, entries=tuple(renamed.entries))
    known = {entry.ref.component for entry in adapter.entries}
    if not known - {"", "model"} and len(networks) == 1:
        known = set(networks)
        adapter = replace(adapter, entries=tuple(replace(e, ref=replace(e.ref, component="")) for e in adapter.entries))
    if untrained := sorted(known - networks.keys()):
        raise ConfigError(
            f"start_from: {path} also adapts {', '.join(untrained)}, which is not trained and would be lost; set "
            + " and ".join(sorted({"train_denoiser" if c == "unet" else "train_text_encoders" for c in untrained}))
            + " to true, or remove that part from the file first"
        )
    for component, network in networks.items():
        if component in known:
            attach(
                network,
                adapter,
                name=NAME,
                component=component,
                dtype=torch.float32,
                trainable=True,
                **_dropouts(config),
            )
            if wholes := all_wholes(network):
                raise TargetError(
                    f"{path}: cannot be trained further: {wholes[0].label} has values of its own (a difference, a "
                    "bias or a whole module), and only factors, LayerNorm and GroupNorm are trained"
                )
    return {component: network for component, network in networks.items() if component not in known}


def _learning_rate(rule: Rule | None, component: str, config: TrainConfig) -> float:
    if rule is not None and rule.learning_rate is not None:
        return rule.learning_rate
    if component.startswith("te") and config.text_encoder_learning_rate is not None:
        return config.text_encoder_learning_rate
    return config.learning_rate
