"""The algorithms that can be layers: one class each, found by name or by the factors of a file.

To add one: its data in `inweave.adapter`, its formula in `inweave.ops.delta`, its `Branch` here.
"""

from __future__ import annotations

import torch

from inweave.adapter import Factors, Tensor
from inweave.layers.branch import Branch, Geometry
from inweave.layers.loha import LohaBranch
from inweave.layers.lokr import LokrBranch
from inweave.layers.lora import LoraBranch
from inweave.ops.tensors.decode import TORCH, decode

#: by the name that `AdapterSpec.network` has
ALGORITHMS: dict[str, type[Branch]] = {each.network(): each for each in (LoraBranch, LohaBranch, LokrBranch)}
_BY_FACTORS = {each.factors_type: each for each in ALGORITHMS.values()}
_TRAINABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def obstacle(factors: Factors, geometry: Geometry) -> str | None:
    """Why these factors cannot be a layer, or None if they can."""
    branch = _BY_FACTORS.get(type(factors))
    if branch is None:
        return f"{factors.algorithm} cannot be a layer, only {', '.join(ALGORITHMS)} can"
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
    return f"an embedding takes LoRA only, not {network}"


def hidden_dropout_problem(network: str, dora: bool) -> str | None:
    """Why an algorithm has no dropout between its factors, or None if it has."""
    if network != LoraBranch.network():
        return f"{network} multiplies its factors first, so nothing is between them that could be dropped; use dropout"
    return "DoRA is not defined with a dropout between its factors; use dropout" if dora else None


def to_branch(
    factors: Factors,
    geometry: Geometry,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    dropout: float = 0.0,
    hidden_dropout: float = 0.0,
    rank_dropout: float = 0.0,
) -> Branch:
    """Owned parameters with these numbers, in ``dtype`` or in the dtype they are stored in; see `obstacle`."""

    def read(tensor: Tensor) -> torch.Tensor:
        own = stored if (stored := TORCH[tensor.dtype]) in _TRAINABLE else torch.float32
        return decode(tensor, dtype=dtype or own, device=device).clone()

    magnitude = factors.magnitude
    return _BY_FACTORS[type(factors)].from_factors(
        factors,
        geometry,
        read,
        magnitude=None if magnitude is None else read(magnitude.tensor).reshape(geometry.out),
        alpha=factors.alpha,
        rslora=factors.rslora,
        dropout=dropout,
        hidden_dropout=hidden_dropout,
        rank_dropout=rank_dropout,
        stored_alpha=factors.stored_alpha,
        stored_scale=factors.stored_scale,
    )
