"""The algorithms that can be layers: one `Branch` class each, named by `Factors.layer` and imported on first use."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from inweave.adapter import ALGORITHMS, Factors, Tensor, imported, load_algorithms
from inweave.errors import ConfigError
from inweave.layers.branch import Branch, Geometry
from inweave.ops.tensors.decode import TORCH, decode

_TRAINABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def networks() -> list[str]:
    """Return the names of the algorithms that can be layers, the values of `AdapterSpec.network`."""
    load_algorithms()
    return [kind for kind, algorithm in ALGORITHMS.items() if algorithm.layer and not algorithm.of_parameter]


def branch_named(network: str) -> type[Branch]:
    """Return the class of an algorithm's branches; raise ConfigError if none has this name."""
    if network not in ALGORITHMS and network not in networks():
        raise ConfigError(f"network must be one of {', '.join(networks())}, got {network!r}")
    branch: type[Branch] = imported(ALGORITHMS[network].layer)
    return branch


def parameter_branch() -> type[Branch]:
    """Return the class of branches on bare parameters."""
    return branch_named(next(kind for kind, algorithm in ALGORITHMS.items() if algorithm.of_parameter))


def algorithm_of(setting: str) -> str:
    """Return the algorithm that a value of the training setting `network` stands for: "dora" is a LoRA."""
    return next((name for name in networks() if setting in branch_named(name).variants), setting)


def obstacle(factors: Factors, geometry: Geometry) -> str | None:
    """Return why these factors cannot be a layer, or None if they can."""
    if not factors.layer:
        return f"{factors.algorithm} cannot be a layer, only {', '.join(networks())} can"
    branch = branch_named(factors.kind)
    if factors.of_parameter != bool(geometry.experts):
        return "a LoRA of a bare parameter and the weight of a layer do not go together"
    if geometry.embedding and not branch.takes_embeddings:
        return only_lora(branch.network())
    if factors.residual is not None:
        return "it has a sparse residual"
    if factors.widen is not None:
        return "it widens the weight"
    if factors.magnitude is not None and factors.magnitude.axis == "in":
        return "its DoRA magnitude is along the inputs"
    if factors.magnitude is not None and factors.magnitude.tensor.numel != geometry.out:
        return f"its DoRA magnitude has {factors.magnitude.tensor.numel} numbers for {geometry.out} outputs"
    return branch.obstacle(factors, geometry)


def only_lora(network: str) -> str:
    """Return the message for an algorithm that does not support embeddings."""
    return f"an embedding takes LoRA only, not {network}"


def dropout_problem(network: str, dora: bool, rates: Mapping[str, float]) -> str | None:
    """Return which of an algorithm's dropouts it cannot have, and why; None if it can have all."""
    if rates["hidden_dropout"] and not branch_named(network).is_pair:
        why = f"{network} multiplies its factors first, so there are no values between them to drop; use dropout"
        return f"hidden_dropout: {why}"
    if rates["output_dropout"] and not branch_named(network).is_pair:
        return f"output_dropout: {network} has it under the name of rank_dropout, as LyCORIS; use that"
    if dora and (names := [name for name in ("hidden_dropout", "rank_dropout") if rates[name]]):
        return f"{', '.join(names)}: DoRA is not defined with a dropout between its factors; use dropout"
    return None


def to_branch(
    factors: Factors,
    geometry: Geometry,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    dropout: float = 0.0,
    hidden_dropout: float = 0.0,
    rank_dropout: float = 0.0,
    module_dropout: float = 0.0,
    output_dropout: float = 0.0,
) -> Branch:
    """Return a branch whose parameters are copies of these factors, in ``dtype`` or their stored dtype."""

    def read(tensor: Tensor) -> torch.Tensor:
        own = stored if (stored := TORCH[tensor.dtype]) in _TRAINABLE else torch.float32
        return decode(tensor, dtype=dtype or own, device=device).clone()

    magnitude = factors.magnitude
    return branch_named(factors.kind).from_factors(
        factors,
        geometry,
        read,
        magnitude=None if magnitude is None else read(magnitude.tensor).reshape(geometry.out),
        alpha=factors.alpha,
        rslora=factors.rslora,
        dropout=dropout,
        hidden_dropout=hidden_dropout,
        rank_dropout=rank_dropout,
        module_dropout=module_dropout,
        output_dropout=output_dropout,
        stored_alpha=factors.stored_alpha,
        stored_scale=factors.stored_scale,
    )
