"""The bare parameters that take adapters, by PEFT's `target_parameters`, and the hosts that compute with them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from inweave.errors import ConfigError, TargetError
from inweave.layers.hosts import ParameterHost, host_problem, unhosted
from inweave.layers.layer import LoraLayer
from inweave.layers.match import nearest
from inweave.layers.sites import Site, ties


def is_hosted(site: Site) -> bool:
    """Return whether the layer of a bare parameter is here, which goes with its host."""
    return isinstance(site.module, LoraLayer) and any(isinstance(parent, ParameterHost) for parent, _ in site.parents)


def inner_module(site: Site) -> nn.Module:
    """Return the module here without its host."""
    return unhosted(site.module)


def named_parameters(all_sites: list[Site], names: Sequence[str]) -> list[tuple[Site, str]]:
    """Return the bare parameters that PEFT's `target_parameters` names: the whole name, or its end after a dot."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ConfigError("target_parameters: expected a list of names of parameters")
    known = {
        f"{name}.{leaf}": (site, leaf) for site in all_sites for name in site.names for leaf in site.module._parameters
    }
    hits: dict[tuple[int, str], tuple[Site, str]] = {}
    for name in names:
        matched = [spot for full, spot in known.items() if full == name or full.endswith(f".{name}")]
        if not matched:
            raise ConfigError(
                f"target_parameters {name!r} matches no parameter; the nearest are {', '.join(nearest(name, known))}"
            )
        hits |= {(id(site.module), leaf): (site, leaf) for site, leaf in matched}
    return list(hits.values())


def hosts_of(
    parameters: Sequence[tuple[Site, str]], all_sites: list[Site]
) -> tuple[list[tuple[Site, ParameterHost]], list[LoraLayer]]:
    """Return the modules with adapters on bare parameters and their hosts, not yet in the model, and the layers."""
    hosts: dict[int, tuple[Site, ParameterHost]] = {}
    tied, layers, problems = ties(all_sites), list[LoraLayer](), list[str]()
    for site, leaf in parameters:
        if reason := host_problem(site.module, leaf):
            problems.append(f"{site.names[0]}: {reason}")
            continue
        if others := tied.get(id(site.module)):
            problems.append(f"{site.names[0]}: its memory is also that of {', '.join(others)}")
            continue
        own = site.module if isinstance(site.module, ParameterHost) else None
        if id(site.module) not in hosts:
            hosts[id(site.module)] = site, own or ParameterHost(site.module, site.names[0])
        layers.append(hosts[id(site.module)][1].layer(leaf))
    if problems:
        raise TargetError("\n".join(problems))
    return list(hosts.values()), layers
