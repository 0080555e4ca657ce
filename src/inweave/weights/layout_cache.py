"""A plan serves every file of the same layout.

Trainers write the same names, shapes and dtypes again and again. If a file's layout and the metadata that
can change its meaning equal those of a file resolved before, it reuses that plan with its own tensors:
the places are the same, alphas are read again. Only plain LoRA entries qualify; anything else is resolved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from inweave.adapter import Adapter, Lora, Tensor
from inweave.formats.files import Container
from inweave.targets.plan import Placement, Plan

#: metadata that changes how a file is read
_MEANINGFUL = (
    "lora_adapter_metadata",
    "ss_network_args",
    "ss_network_dim",
    "unet",
    "inweave.alpha",
    "inweave.candle_alpha",
)

Layout = tuple[object, ...]


def layout_of(container: Container) -> Layout:
    """Return everything about a file that decides where its tensors go, without any of their values."""
    names = tuple((name, tensor.dtype, tensor.shape) for name, tensor in container.tensors.items())
    meaning = tuple(container.metadata.get(key) for key in _MEANINGFUL)
    return names, meaning, json.dumps(container.config, sort_keys=True, default=str) if container.config else ""


def is_template(plan: Plan) -> bool:
    """Return whether every placement's factors are unmodified tensors of the file."""
    own = {id(tensor) for tensor in plan.adapter.tensors.values()}
    return all(
        type(placement.factors) is Lora
        and not placement.whole
        and placement.factors.residual is None
        and placement.factors.magnitude is None
        and placement.factors.stored_scale is None
        and placement.factors.mid is None
        and id(placement.factors.down) in own
        and id(placement.factors.up) in own
        and (
            placement.factors.alpha is None
            or placement.factors.stored_alpha is None
            or id(placement.factors.stored_alpha) in own
        )
        for placement in plan.placements
    )


def retargeted(plan: Plan, container: Container) -> Plan:
    """Return ``plan`` for the tensors of another file of the same layout."""
    tensors = container.tensors
    new = {id(old): tensors[name] for name, old in plan.adapter.tensors.items()}
    made: dict[int, Lora] = {}
    placements = []
    for placement in plan.placements:
        factors = made.get(id(placement.factors))
        if factors is None:
            factors = made[id(placement.factors)] = _with_tensors(placement.factors, new)
        placements.append(_with_factors(placement, factors))
    adapter = Adapter(
        (), metadata=container.metadata, config=container.config, tensors=tensors, places=container.places
    )
    return Plan(adapter, tuple(placements), plan.report)


def _with_tensors(factors: object, new: Mapping[int, Tensor]) -> Lora:
    assert isinstance(factors, Lora)
    alpha, stored = factors.alpha, factors.stored_alpha
    if stored is not None:
        stored = new[id(stored)]
        alpha = stored.item()
    if factors.widen is not None or factors.embedding or factors.transposed:
        return replace(factors, down=new[id(factors.down)], up=new[id(factors.up)], alpha=alpha, stored_alpha=stored)
    return Lora(
        down=new[id(factors.down)],
        up=new[id(factors.up)],
        alpha=alpha,
        stored_alpha=stored,
        rslora=factors.rslora,
    )


def _with_factors(placement: Placement, factors: Lora) -> Placement:
    return Placement(
        placement.component,
        placement.tensor,
        placement.shape,
        factors,
        placement.keys,
        placement.target,
        placement.source,
        placement.swap,
        placement.transpose,
        placement.widen,
        placement.creates,
    )
