"""Factors of layers that read the same input are adjacent."""

from __future__ import annotations

import torch
from torch import nn

from inweave.models.roles import projections
from inweave.training.adapters.order import side_by_side


def names(*modules: str, rank: dict[str, int] | None = None) -> list[str]:
    parameters = {}
    for module in modules:
        size = (rank or {}).get(module, 4)
        parameters[f"{module}.down"] = nn.Parameter(torch.zeros(size, 8))
        parameters[f"{module}.up"] = nn.Parameter(torch.zeros(8, size))
    ordered = side_by_side(parameters)
    assert ordered == parameters and all(ordered[name] is parameters[name] for name in parameters)
    return list(ordered)


def test_projections_of_one_attention_are_together_by_role() -> None:
    assert names("unet.b.attn.to_out.0", "unet.b.attn.to_v", "unet.b.attn.to_q", "unet.b.attn.to_k") == [
        "unet.b.attn.to_out.0.down", "unet.b.attn.to_out.0.up",
        *(f"unet.b.attn.{name}.{role}" for role in ("down", "up") for name in ("to_q", "to_k", "to_v")),
    ]  # fmt: skip
    streams = [f"unet.b.attn.{name}" for name in ("add_k_proj", "add_v_proj", "add_q_proj")]
    assert names(*streams) == [
        f"unet.b.attn.{name}.{role}" for role in ("down", "up") for name in ("add_q_proj", "add_k_proj", "add_v_proj")
    ]


def test_other_attentions_and_ranks_are_apart() -> None:
    modules = ["unet.a.attn1.to_q", "unet.b.attn1.to_q", "unet.a.attn1.to_k"]
    assert names(*modules, rank={modules[2]: 2}) == [
        f"{module}.{role}" for module in modules for role in ("down", "up")
    ]


def test_everything_that_reads_the_text_is_together() -> None:
    modules = [f"unet.{block}.attn2.{name}" for block in "ab" for name in ("to_q", "to_k", "to_v")]
    text = [f"unet.{block}.attn2.{name}" for block in "ab" for name in ("to_k", "to_v")]
    assert names(*modules) == [
        "unet.a.attn2.to_q.down", "unet.a.attn2.to_q.up",
        *(f"{module}.{role}" for role in ("down", "up") for module in text),
        "unet.b.attn2.to_q.down", "unet.b.attn2.to_q.up",
    ]  # fmt: skip
    assert names("te1.a.attn2.to_k", "unet.a.attn2.to_k")[:2] == ["te1.a.attn2.to_k.down", "te1.a.attn2.to_k.up"]


def test_projections_of_an_attention_are_found_by_name() -> None:
    modules = ["a.to_v", "a.to_k", "a.to_q", "b.to_q", "b.to_v", "a.ff", "c.add_q_proj", "c.add_v_proj", "c.add_k_proj"]
    assert projections(modules) == [
        ("a.to_q", "a.to_k", "a.to_v"), ("b.to_q",), ("b.to_v",), ("a.ff",),
        ("c.add_q_proj", "c.add_k_proj", "c.add_v_proj"),
    ]  # fmt: skip
    assert projections(["to_q", "to_k", "to_v"]) == [("to_q", "to_k", "to_v")]
