"""Selection of the trained networks and modules: presets, names, patterns and rules.

    targets   attention       the projections of attention
              attention-mlp   those and the feed-forward layers
              all             every linear layer and convolution inside the blocks
              names, regexes  a whole dotted name, its end after a dot, or a regular expression for all of it
    locon     adds the convolutions of the residual blocks to any of them
    norms     with train_norm: those that match, or with a preset those inside the blocks
    rules     the first one whose pattern matches anywhere in `<component>.<module>` sets its rank, alpha or learning
              rate, or skips it

A target or a pattern that matches nothing is an error. Only names are needed, so everything can be checked on the meta
device before any weight is read (`check_selection`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import nn

from inweave.adapter.components import FOLDERS
from inweave.errors import ConfigError
from inweave.layers import lora_layers
from inweave.layers.match import nearest
from inweave.layers.norms import norm_names
from inweave.models.model import Model
from inweave.models.roles import attention_names, block_layers, feed_forward_names
from inweave.ops.kinds import kind_of
from inweave.patterns import Work, regex
from inweave.training.config.presets import TARGETS
from inweave.training.config.schema import TrainConfig
from inweave.training.config.types import Rule

DENOISER = "unet"  # the component, whichever class it has
_CONVOLUTIONS = re.compile(r"(.*\.)?(resnets\.\d+\.(conv\d|conv_shortcut)|(down|up)samplers\.\d+\.conv)")


def trained_networks(model: Model, config: TrainConfig) -> dict[str, nn.Module]:
    """Return the networks that get adapters, by component name; frozen encoders get none."""
    if model.inpaints:
        raise ConfigError(
            f"{model.name}: an inpainting model takes a mask and a masked image besides the latents, which training "
            "does not provide; train on the model it was made from (an adapter for that one fits this one too)"
        )
    if config.train_text_encoders and not model.family.trainable_encoders:
        raise ConfigError(
            f"train_text_encoders: the text encoder of {model.name} is too large to train; "
            "set train_text_encoders = false"
        )
    networks = {
        component: model.networks[folder]
        for folder, component in FOLDERS.items()
        if folder in model.networks and folder not in model.family.frozen_encoders
        and (config.train_denoiser if component.startswith("unet") else config.train_text_encoders)
    }  # fmt: skip
    if not networks:
        raise ConfigError("nothing to train: train_denoiser and train_text_encoders are both off")
    return networks


def select_modules(component: str, network: nn.Module, config: TrainConfig) -> list[str]:
    """Return the modules of a network that the configuration's targets select, in the network's order."""
    names = _adaptable(network)
    if config.targets == "attention":
        selected = {name for name in names if attention_names().fullmatch(name)}
    elif config.targets == "attention-mlp":
        selected = {name for name in names if attention_names().fullmatch(name) or feed_forward_names().fullmatch(name)}
    elif config.targets == "all":
        selected = {name for name in names if block_layers().fullmatch(name)}
    else:
        selected = {name for entry in _entries(config) for name in _matches(entry, names)}
    if config.network == "locon":
        selected |= {name for name in names if _CONVOLUTIONS.fullmatch(name)}
    if not selected:
        targets = config.targets if isinstance(config.targets, str) else ", ".join(config.targets)
        raise ConfigError(
            f"targets: {targets} matches none of the {len(names)} linear and convolution layers of {component}"
        )
    return [name for name in names if name in selected]


def select_norms(network: nn.Module, config: TrainConfig) -> list[str]:
    """Return the normalization layers of a network that are trained, in the network's order."""
    if not config.train_norm:
        return []
    names = norm_names(network)
    matched = {name for entry in _entries(config) for name in _matches(entry, names)}
    return [name for name in names if name in matched or (config.targets in TARGETS and block_layers().fullmatch(name))]


def check_targets(networks: Mapping[str, nn.Module], config: TrainConfig) -> None:
    """Raise ConfigError if an entry of `targets` matches no module of any network."""
    names = [name for network in networks.values() for name in [*_adaptable(network), *lora_layers(network)]]
    norms = [name for network in networks.values() for name in select_norms(network, config)]
    if config.train_norm and not norms:
        raise ConfigError(
            "train_norm: targets match no LayerNorm or GroupNorm with weights of this model; other normalization, such "
            "as RMSNorm, is not trained, nor is it by LyCORIS; set train_norm = false"
        )
    names += norms
    unused = [entry for entry in _entries(config) if not _matches(entry, names)]
    if unused:
        raise ConfigError(
            [
                f"targets: {entry!r} matches no module; the nearest are {', '.join(nearest(entry, names))}"
                for entry in unused
            ]
        )


def check_rules(rules: tuple[Rule, ...], names: list[str]) -> None:
    """Raise ConfigError if a rule matches no trained module, or only modules that earlier rules match."""
    problems = []
    firsts = {id(rule) for rule in first_rules(names, rules).values()}
    work = Work("rules")
    for rule in rules:
        if id(rule) in firsts:
            continue
        pattern = regex(rule.pattern, "rules")
        if any(pattern.search(name, work) for name in names):
            problems.append(f"rules: every module that the pattern {rule.pattern!r} matches belongs to an earlier rule")
        else:
            problems.append(f"rules: the pattern {rule.pattern!r} matches no trained module")
    if problems:
        raise ConfigError(problems)


def first_rules(names: Iterable[str], rules: tuple[Rule, ...]) -> dict[str, Rule | None]:
    """Return the first rule that matches each module, or None."""
    work = Work("rules")
    patterns = [(regex(rule.pattern, "rules"), rule) for rule in rules]
    return {name: next((rule for pattern, rule in patterns if pattern.search(name, work)), None) for name in names}


def check_selection(networks: Mapping[str, nn.Module], config: TrainConfig) -> None:
    """Raise ConfigError if targets or rules of a fresh adapter select nothing; the networks need no weights."""
    if config.start_from is not None:
        return  # the adapter defines its own modules
    selected = {component: select_modules(component, network, config) for component, network in networks.items()}
    check_targets(networks, config)
    for component, network in networks.items():
        selected[component] += select_norms(network, config)
    check_rules(config.rules, [f"{component}.{name}" for component, names in selected.items() for name in names])


def _adaptable(network: nn.Module) -> list[str]:
    return [
        name for name, module in network.named_modules() if (kind := kind_of(module)) is not None and not kind.embedding
    ]


def _entries(config: TrainConfig) -> tuple[str, ...]:
    if config.targets in TARGETS:
        return ()
    return (config.targets,) if isinstance(config.targets, str) else config.targets


def _matches(entry: str, names: Iterable[str]) -> list[str]:
    """Return the names that an entry of `targets` selects."""
    rule, work = regex(entry, "targets"), Work("targets")
    return [name for name in names if name == entry or name.endswith(f".{entry}") or rule.fullmatch(name, work)]
