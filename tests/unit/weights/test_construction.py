"""Models built on the meta device: what no checkpoint holds is computed by constructors, or refused by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import inweave
from inweave.errors import TargetError
from inweave.weights.build import build
from inweave.weights.source import DictSource

transformers: Any = importlib.import_module("transformers")
diffusers: Any = importlib.import_module("diffusers")
SMALL: Any = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "pad_token_id": 0,
}
YARN: Any = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "original_max_position_embeddings": 64}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "yarn": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, rope_parameters=YARN)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SMALL, head_dim=8)),
    "falcon": lambda: transformers.FalconForCausalLM(transformers.FalconConfig(**SMALL)),
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SMALL)),
    "swin": lambda: transformers.SwinModel(
        transformers.SwinConfig(image_size=32, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4)
    ),
    "qwen-image": lambda: diffusers.QwenImageTransformer2DModel(
        num_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16, axes_dims_rope=(4, 6, 6)
    ),
}


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def other_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the non-persistent buffers and the plain attributes of a model that are tensors."""
    tensors: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        members = {**{n: module._buffers[n] for n in module._non_persistent_buffers_set}, **module.__dict__}
        tensors |= {f"{path}.{n}": value for n, value in members.items() if isinstance(value, torch.Tensor)}
    return tensors


@pytest.mark.parametrize("name", MODELS)
def test_tensors_that_no_file_holds_are_those_of_the_model(name: str) -> None:
    torch.manual_seed(0)
    model, before = MODELS[name](), torch.get_rng_state()
    built = build(on_meta(MODELS[name]), DictSource(model.state_dict()), dtype="bf16")
    expected = other_tensors(model)
    assert expected
    assert torch.get_rng_state().shape == before.shape
    actual = other_tensors(built)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype  # as `from_pretrained` in bfloat16 leaves them
        assert torch.equal(actual[key], value)


@torch.no_grad()
def test_a_language_model_built_on_meta_computes_as_one_that_was_loaded() -> None:
    torch.manual_seed(0)
    model = MODELS["llama"]().eval()
    built = build(on_meta(MODELS["llama"]), DictSource(model.state_dict())).eval()
    rows = torch.arange(12)[None]
    assert torch.equal(built(rows).logits, model(rows).logits)
    assert {"model"} == set(inweave.Weaver(built).index.components)


class Table(nn.Module):
    """A table whose size is an attribute; ``power`` is kept only if ``keep``."""

    def __init__(self, size: int, power: float = 2.0) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("table", torch.arange(size) ** power, persistent=False)


class Halved(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = max(size // 2, 1)
        self.register_buffer("table", torch.full((4,), size), persistent=False)


class Noise(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("table", torch.randn(size), persistent=False)


class Masks(nn.Module):
    """Weights beside a mask, and a list of tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(width, width).tril().bool(), persistent=False)
        self.tables = [torch.arange(width), torch.ones(2)]


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "an argument that is not kept": (lambda: Table(4, 3.0), r"0\.table \(Table: its argument power is not kept"),
    "an argument that is changed": (lambda: Halved(8), r"0\.table \(Halved: constructed again its size is 2"),
    "random numbers": (lambda: Noise(4), r"0\.table \(Noise: table holds random numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_is_refused_by_name(case: str) -> None:
    make, message = REFUSED[case]
    with torch.device("meta"):
        model = nn.Sequential(make(), nn.Linear(2, 2))
    with pytest.raises(TargetError, match=message):
        build(model, DictSource({"1.weight": torch.ones(2, 2), "1.bias": torch.ones(2)}))
    assert model.get_parameter("1.weight").is_meta  # nothing was changed


def test_masks_and_lists_of_tensors_are_computed_beside_weights() -> None:
    state = torch.get_rng_state()
    model, built = Masks(6), on_meta(lambda: Masks(6))
    torch.set_rng_state(state)
    build(built, DictSource(model.state_dict()))
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(built, Masks)
    assert torch.equal(built.get_buffer("mask"), model.get_buffer("mask"))
    assert all(map(torch.equal, built.tables, model.tables))
    assert torch.equal(built.linear.weight, model.linear.weight)
