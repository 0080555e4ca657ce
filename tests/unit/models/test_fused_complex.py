"""Fused attention of Qwen-Image and Z-Image computes what diffusers' own does, eagerly and compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

pytest.importorskip("diffusers")

from inweave.layers import inject, lora_layers
from inweave.models.fused.blocks import fuse_blocks, restore_blocks
from inweave.models.fused.complex import FusedQwenAttention, FusedZImageAttention
from tests.peers import tiny_models


def rotations(*shape: int) -> torch.Tensor:
    return torch.polar(torch.ones(shape), torch.randn(shape))


def attention_of(variant: str) -> tuple[Any, dict[str, Any]]:
    """An attention module of a tiny model, and inputs for two examples."""
    torch.manual_seed(0)
    transformer = tiny_models.pipeline(variant).transformer
    blocks = transformer.layers if variant.startswith("z") else transformer.transformer_blocks
    attention = copy.deepcopy(blocks[0].attention if variant.startswith("z") else blocks[0].attn).requires_grad_(False)
    width, half = attention.query_dim, attention.inner_dim // attention.heads // 2
    image = torch.randn(2, 6, width, requires_grad=True)
    if variant.startswith("z"):
        return attention, {"hidden_states": image, "freqs_cis": rotations(2, 6, half)}
    text = torch.randn(2, 4, width, requires_grad=True)
    tables = (rotations(6, half), rotations(4, half))
    return attention, {"hidden_states": image, "encoder_hidden_states": text, "image_rotary_emb": tables}


def results(attention: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Outputs, and gradients of the streams."""
    output = attention(**inputs)
    outputs = list(output) if isinstance(output, tuple) else [output]
    streams = [inputs[name] for name in ("hidden_states", "encoder_hidden_states") if name in inputs]
    return [*outputs, *torch.autograd.grad([each.square().sum() for each in outputs], streams)]


def assert_close(one: list[torch.Tensor], two: list[torch.Tensor]) -> None:
    assert len(one) == len(two)
    for first, second in zip(one, two, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("variant", ["qwen-image", "z-image-turbo"])
def test_outputs_and_gradients_stay(variant: str, masked: bool) -> None:
    attention, inputs = attention_of(variant)
    if masked:
        rows = 6 if variant.startswith("z") else 4
        mask = torch.arange(rows)[None] < torch.tensor([[rows], [rows - 2]])
        inputs["attention_mask" if variant.startswith("z") else "encoder_hidden_states_mask"] = mask
    plain = results(attention, inputs)
    assert fuse_blocks(attention) and isinstance(attention, FusedQwenAttention | FusedZImageAttention)
    assert_close(results(attention, inputs), plain)
    attention.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    assert_close(results(attention, inputs), plain)
    attention._compiled_call_impl = None
    restore_blocks(attention)
    assert all(torch.equal(one, two) for one, two in zip(results(attention, inputs), plain, strict=True))


@pytest.mark.parametrize("variant", ["qwen-image", "z-image-turbo"])
def test_other_arguments_take_the_way_of_diffusers(variant: str) -> None:
    attention, inputs = attention_of(variant)
    for name in ("freqs_cis", "image_rotary_emb"):
        inputs.pop(name, None)
    plain = results(attention, inputs)
    fuse_blocks(attention)
    assert_close(results(attention, inputs), plain)


def test_one_table_for_all_examples_takes_the_way_of_diffusers() -> None:
    attention, inputs = attention_of("z-image-turbo")
    inputs["freqs_cis"] = inputs["freqs_cis"][:1]
    plain = results(attention, inputs)
    fuse_blocks(attention)
    assert_close(results(attention, inputs), plain)


@pytest.mark.parametrize("variant", ["qwen-image", "z-image-turbo"])
def test_adapters_drop_by_the_seeds_of_each_example(variant: str) -> None:
    attention, inputs = attention_of(variant)
    inject(attention, 4, targets=r".*to_[qkv]", dropout=0.5, hidden_dropout=0.2, rank_dropout=0.2)
    seeds = torch.tensor([[1, 2], [3, 4]])
    for layer in lora_layers(attention).values():
        layer.branch("default").up.data.normal_()
        layer.branch("default").row_seeds = seeds
    attention.train()
    plain = results(attention, inputs)
    fuse_blocks(attention)
    assert_close(results(attention, inputs), plain)
    for layer in lora_layers(attention).values():
        layer.branch("default").row_seeds = seeds.flip(0)
    assert not torch.allclose(results(attention, inputs)[0], plain[0]), "the comparison can fail"
