"""Which modules learn, and with what: presets, patterns and rules become adapters on live networks.

    targets   attention       the projections of attention
              attention-mlp   those and the feed-forward layers
              all             every linear layer and convolution inside the blocks
              names, regexes  a whole dotted name, its end after a dot, or a regular expression for all of it
    locon     adds the convolutions of the residual blocks to any of them
    rules     the first whose pattern is found in `<component>.<module>` gives its rank, alpha, learning rate, or leaves
              it out; with `start_from` ranks, alphas and modules are the adapter's, and rules give learning rates only
    start_from: what was asked for and the adapter is not, is an error; it brings its own kind, rank, alpha and modules

    rank      the rule's, else conv_rank for convolutions wider than 1x1, else rank
    alpha     the rule's; its rank where the rule names one; conv_alpha, or conv_rank, for those convolutions; else alpha

A target or a pattern that finds nothing is an error. All parameters are float32 masters, named
`<component>.<module>.<factor>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from inweave.adapter import Adapter, Entry, Tensor
from inweave.errors import ConfigError, TargetError
from inweave.exchange.convert import GENERIC, rewrite
from inweave.exchange.load import load
from inweave.layers import ALGORITHMS, AdapterSpec, attach, collect, geometry_of, inject, lora_layers
from inweave.layers.match import nearest
from inweave.models.families import FAMILIES
from inweave.ops.kinds import kind_of
from inweave.targets.index import ModelIndex
from inweave.targets.resolve import resolve
from inweave.targets.respell import respell
from inweave.training.adapters.summary import conflicts, shape_of
from inweave.training.config.presets import TARGETS
from inweave.training.config.schema import TrainConfig
from inweave.training.config.types import Rule

NAME = "trained"
N = TypeVar("N", int, float)
#: of text encoders and language models; those of denoisers are their families'
_TEXT_ATTENTION = (
    r"[qkv]_proj", "out_proj", "o_proj", r"SelfAttention\.[qkvo]", "c_attn", r"attn\.c_proj", "query_key_value",
    r"attention\.dense", "query", "key", "value",
)  # fmt: skip
_TEXT_MLP = (
    r"mlp\.fc[12]", r"DenseReluDense\.w[io](_\d)?", "gate_proj", "up_proj", "down_proj", "c_fc", r"mlp\.c_proj",
    r"mlp\.dense_\w+", r"fc[12]",
)  # fmt: skip


def _ends(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({'|'.join(dict.fromkeys(patterns))})")


_ATTENTION = _ends((*(each for family in FAMILIES for each in family.attention), *_TEXT_ATTENTION))
_MLP = _ends((*(each for family in FAMILIES for each in family.feed_forward), *_TEXT_MLP))
_BLOCKS = re.compile(r"(.*\.)?(down_blocks|mid_block|up_blocks|\w*transformer_blocks|layers|block|blocks|h)\..+")
_CONVOLUTIONS = re.compile(r"(.*\.)?(resnets\.\d+\.(conv\d|conv_shortcut)|(down|up)samplers\.\d+\.conv)")


@dataclass(frozen=True, slots=True)
class Trained:
    """The parameters that learn, and how much faster or slower than the rest each does."""

    parameters: dict[str, nn.Parameter]
    multipliers: dict[str, float]
    modules: int


def add_networks(networks: Mapping[str, nn.Module], config: TrainConfig, index: ModelIndex | None = None) -> Trained:
    """Put a fresh adapter on every network, or the one to go on from; ``index``: the base in the names files have."""
    fresh, wanted = dict(networks), set[str]()
    if config.start_from is not None:
        if "targets" in config.explicit_fields:
            wanted = {f"{part}.{name}" for part, network in networks.items() for name in meant(part, network, config)}
        fresh = _continue(networks, config, index)
    chosen = {component: meant(component, network, config) for component, network in fresh.items()}
    if fresh == dict(networks):
        _check_targets(networks, config)
    for component, network in fresh.items():
        _fresh(component, network, chosen[component], config)
    if not fresh and (problems := conflicts(shape_of(networks, NAME), config, wanted)):
        raise ConfigError(problems)  # where something is fresh, the settings are of that
    parameters: dict[str, nn.Parameter] = {}
    multipliers: dict[str, float] = {}
    modules: list[str] = []
    for component, network in networks.items():
        for module, layer in lora_layers(network).items():
            modules.append(f"{component}.{module}")
            rate = _rate(modules[-1], component, config)
            layer.train()
            for leaf, parameter in layer.adapters[NAME].named_parameters():
                name = f"{component}.{module}.{leaf}"
                parameter.requires_grad_(True)
                if parameter.dtype != torch.float32:
                    parameter.data = parameter.data.float()
                parameters[name] = parameter
                multipliers[name] = rate / config.learning_rate
    candidates = modules + [f"{component}.{name}" for component, names in chosen.items() for name in names]
    _check_rules(config.rules, list(dict.fromkeys(candidates)))
    if index is not None:
        _check_dialect(networks, parameters, config, index)
    return Trained(parameters, multipliers, len(modules))


def gathered(networks: Mapping[str, nn.Module]) -> Adapter:
    """What was learnt on all networks, as one adapter; keys say whose they are, since two CLIPs have the same modules."""
    entries: list[Entry] = []
    tensors: dict[str, Tensor] = {}
    for component, network in networks.items():
        part = collect(network, NAME, component=component)
        entries += [replace(entry, keys=tuple(f"{component}.{key}" for key in entry.keys)) for entry in part.entries]
        tensors |= {f"{component}.{key}": tensor for key, tensor in part.tensors.items()}
    return Adapter(entries=tuple(entries), tensors=tensors)


@torch.no_grad()
def _check_dialect(
    networks: Mapping[str, nn.Module], parameters: Mapping[str, nn.Parameter], config: TrainConfig, index: ModelIndex
) -> None:
    """Whether what will be learnt can be written: a dialect may join modules that then have no common factors."""
    if "model" in index.components and config.dialect not in GENERIC:
        raise ConfigError(f"dialect: {config.dialect} is for diffusion models; this one is written as {GENERIC[0]}")
    kept = {name: parameter.clone() for name, parameter in parameters.items()}
    draw = torch.Generator().manual_seed(0)
    try:
        for parameter in parameters.values():  # fresh ones hold zeros, which join where learnt numbers do not
            parameter.copy_(torch.rand(parameter.shape, generator=draw) + 0.5)
        lost = rewrite(gathered(networks), config.dialect, index).lost
    finally:
        for name, parameter in parameters.items():
            parameter.copy_(kept[name])
    if lost:
        raise ConfigError(
            f'dialect: {len(lost)} modules could not be written as "{config.dialect}", the first: {lost[0].reason}; '
            "another dialect, network or target may"
        )


def _fresh(component: str, network: nn.Module, names: list[str], config: TrainConfig) -> None:
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name in names:
        _, rule = _rule(f"{component}.{name}", config.rules)
        if rule is None or not rule.skip:
            ranks[name], alphas[name] = _size(network.get_submodule(name), rule, config)
    if not ranks:
        raise ConfigError(f"nothing of {component} is left to train: every module is skipped by a rule")
    usual = config.alpha if config.alpha is not None else float(config.rank)
    spec = AdapterSpec(
        network=config.network if config.network in ALGORITHMS else "lora",
        dora=config.network == "dora",
        rslora=config.rslora,
        dropout=config.dropout,
        rank_pattern=_patterns(ranks, config.rank),
        alpha_pattern=_patterns(alphas, usual),
        factor=config.lokr_factor if config.network == "lokr" else -1,
        seed=config.seed,
        dtype=torch.float32,
    )
    inject(network, config.rank, usual, list(ranks), name=NAME, spec=spec)


def _size(module: nn.Module, rule: Rule | None, config: TrainConfig) -> tuple[int, float]:
    """(rank, alpha) of a fresh adapter on a module."""
    convolution = geometry_of(module).wide
    rank = (rule.rank if rule else None) or (config.conv_rank if convolution else None) or config.rank
    alpha = rule.alpha if rule else None
    if alpha is None and not (rule and rule.rank):
        alpha = config.alpha
        if convolution and (config.conv_alpha or config.conv_rank):
            alpha = config.conv_alpha
    return rank, float(rank) if alpha is None else alpha


def _patterns(numbers: Mapping[str, N], usual: N) -> dict[str, N]:
    """One pattern a number, for the modules that have another than the usual one; names are whole."""
    groups: dict[N, list[str]] = {}
    for name, number in numbers.items():
        if number != usual:
            groups.setdefault(number, []).append(re.escape(name))
    return {rf"\A(?:{'|'.join(names)})": number for number, names in groups.items()}


def _continue(networks: Mapping[str, nn.Module], config: TrainConfig, index: ModelIndex | None) -> dict[str, nn.Module]:
    """Go on from a file of any dialect; returns the networks it holds nothing for."""
    path = str(config.start_from)
    if sized := [rule.pattern for rule in config.rules if rule.skip or rule.rank or rule.alpha]:
        raise ConfigError(
            [f"rules: {each!r} sets a rank, an alpha or skip, and start_from brings its own modules" for each in sized]
        )
    adapter = load(path)
    if index is not None:
        resolve(adapter, index)  # every tensor has a place, or the reason it has none
        respelling = respell(adapter, index, lambda component: "diffusers")
        if respelling.lost:
            told = [f"{finding.module}: {finding.reason}" for finding in respelling.lost[:5]]
            raise TargetError("\n  ".join([f"{path}: cannot be trained further as layers:", *told]))
        adapter = replace(adapter, entries=tuple(respelling.entries))
    known = {entry.ref.component for entry in adapter.entries}
    if not known - {"", "model"} and len(networks) == 1:
        known = set(networks)
        adapter = replace(adapter, entries=tuple(replace(e, ref=replace(e.ref, component="")) for e in adapter.entries))
    if beyond := sorted(known - networks.keys()):
        raise ConfigError(
            f"start_from: {path} also adapts {', '.join(beyond)}, which is not trained and would be lost; set "
            + " and ".join(sorted({"train_denoiser" if c == "unet" else "train_text_encoders" for c in beyond}))
            + " to true, or take that part out of the file first"
        )
    for component, network in networks.items():
        if component in known:
            attach(network, adapter, name=NAME, component=component, dropout=config.dropout, dtype=torch.float32)
    return {component: network for component, network in networks.items() if component not in known}


def meant(component: str, network: nn.Module, config: TrainConfig) -> list[str]:
    """The modules of a network that the configuration's targets mean, in the network's order."""
    names = _adaptable(network)
    if config.targets == "attention":
        chosen = {name for name in names if _ATTENTION.fullmatch(name)}
    elif config.targets == "attention-mlp":
        chosen = {name for name in names if _ATTENTION.fullmatch(name) or _MLP.fullmatch(name)}
    elif config.targets == "all":
        chosen = {name for name in names if _BLOCKS.fullmatch(name)}
    else:
        chosen = {name for entry in _entries(config) for name in names if _means(entry, name)}
    if config.network == "locon":
        chosen |= {name for name in names if _CONVOLUTIONS.fullmatch(name)}
    if not chosen:
        said = config.targets if isinstance(config.targets, str) else ", ".join(config.targets)
        raise ConfigError(f"targets: {said} means no module of {component} ({len(names)} could be)")
    return [name for name in names if name in chosen]


def _adaptable(network: nn.Module) -> list[str]:
    return [
        name for name, module in network.named_modules() if (kind := kind_of(module)) is not None and not kind.embedding
    ]


def _entries(config: TrainConfig) -> tuple[str, ...]:
    if config.targets in TARGETS:
        return ()
    return (config.targets,) if isinstance(config.targets, str) else config.targets


def _means(entry: str, name: str) -> bool:
    return name == entry or name.endswith(f".{entry}") or re.fullmatch(entry, name) is not None


def _check_targets(networks: Mapping[str, nn.Module], config: TrainConfig) -> None:
    """Every entry means a module somewhere; which network it was for, nobody knows."""
    names = [name for network in networks.values() for name in [*_adaptable(network), *lora_layers(network)]]
    unused = [entry for entry in _entries(config) if not any(_means(entry, name) for name in names)]
    if unused:
        raise ConfigError(
            [
                f"targets: {each!r} matches no module; the nearest are {', '.join(nearest(each, names))}"
                for each in unused
            ]
        )


def _check_rules(rules: tuple[Rule, ...], names: list[str]) -> None:
    problems = []
    for number, rule in enumerate(rules):
        found = [name for name in names if re.search(rule.pattern, name)]
        if not found:
            problems.append(f"rules: the pattern {rule.pattern!r} finds no module that is trained")
        elif all(_rule(name, rules)[0] < number for name in found):
            problems.append(f"rules: all that the pattern {rule.pattern!r} finds is taken by rules before it")
    if problems:
        raise ConfigError(problems)


def _rule(name: str, rules: tuple[Rule, ...]) -> tuple[int, Rule | None]:
    return next(((number, rule) for number, rule in enumerate(rules) if re.search(rule.pattern, name)), (-1, None))


def _rate(name: str, component: str, config: TrainConfig) -> float:
    _, rule = _rule(name, config.rules)
    if rule is not None and rule.learning_rate is not None:
        return rule.learning_rate
    if component.startswith("te") and config.text_encoder_learning_rate is not None:
        return config.text_encoder_learning_rate
    return config.learning_rate
