"""LoKr in diffusers' dialect: its own loaders read FLUX.2's and Z-Image's, and merge what we merge."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import Flux2Transformer2DModel, ZImageTransformer2DModel
from diffusers.loaders import Flux2LoraLoaderMixin, ZImageLoraLoaderMixin
from torch import nn

import inweave
from inweave.adapter import Adapter, Entry, Lokr, Ref, Tensor
from inweave.errors import TargetError
from inweave.exchange.convert import rewrite
from inweave.ops.delta.reference import change
from inweave.targets.bases import known_index
from inweave.targets.index import Component, ModelIndex
from inweave.targets.tables import TABLES
from tests.support import random

MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "flux2": (Flux2Transformer2DModel, Flux2LoraLoaderMixin, {
        "in_channels": 8, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 4,
        "joint_attention_dim": 32, "timestep_guidance_channels": 32, "axes_dims_rope": (2, 2, 2, 2),
    }),
    "z-image": (ZImageTransformer2DModel, ZImageLoraLoaderMixin, {
        "dim": 48, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4, "cap_feat_dim": 48,
        "axes_dims": [4, 4, 4], "axes_lens": [8, 8, 8],
    }),
}  # fmt: skip


def model_of(family: str) -> tuple[nn.Module, ModelIndex]:
    torch.manual_seed(0)
    model = MODELS[family][0](**MODELS[family][2])
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    return model, ModelIndex({"unet": Component("unet", TABLES[family], "diffusers", shapes)})


def lokr(seed: int, out: int, into: int, full: bool, factor: int = 4, rank: int = 1, **fields: Any) -> Lokr:
    right = (out // factor, into // factor)
    w2: dict[str, Tensor] = {"w2": random(seed, *right)}
    if not full:
        w2 = {"w2_a": random(seed, right[0], rank), "w2_b": random(seed + 1, rank, right[1])}
    return Lokr(w1=random(seed + 2, factor, factor), **w2, **fields)


def adapter_for(model: nn.Module) -> Adapter:
    """LoKr on every linear layer of the blocks: full and of ranks 1 and 2, at several scales."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    layers = [(name, layer) for name, layer in layers if "transformer_blocks" in name or name.startswith("layers.")]
    assert len(layers) > 5
    entries = []
    for seed, (name, layer) in enumerate(layers):
        factors = lokr(10 * seed, layer.out_features, layer.in_features, not seed % 3, rank=1 + seed % 2,
                       alpha=(None, 1.0, 3.0)[seed % 3])  # fmt: skip
        keys = tuple(f"{name}.{role}" for role in factors.tensors())
        entries.append(Entry(Ref("unet", name), "weight", factors, keys, "x"))
    return Adapter(tuple(entries))


@pytest.mark.parametrize("family", MODELS)
def test_diffusers_merges_the_lokr_that_is_written_for_it(family: str, tmp_path: Path) -> None:
    model, index = model_of(family)
    adapter = adapter_for(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    done = inweave.save(adapter, tmp_path / "lokr.safetensors", dialect="diffusers", base=index)
    assert not done.lost
    pipe = SimpleNamespace(transformer=model, components={"transformer": model}, transformer_name="transformer")
    mixin = MODELS[family][1]
    with warnings.catch_warnings(action="ignore"):
        state, metadata = mixin.lora_state_dict(tmp_path / "lokr.safetensors", return_lora_metadata=True)
        mixin.load_lora_into_transformer(state, transformer=pipe.transformer, adapter_name="a", metadata=metadata)
    assert len(state) == done.tensors
    merged = {}
    for name, layer in model.named_modules():
        if hasattr(layer, "get_delta_weight"):
            layer.merge()
            merged[name] = layer.get_base_layer().weight
    expected = {e.ref.name: before[f"{e.ref.name}.weight"] for e in adapter}
    assert merged.keys() == expected.keys()
    again = {e.ref.name: e.factors for e in inweave.load(tmp_path / "lokr.safetensors")}
    for entry in adapter:
        name, weight = entry.ref.name, expected[entry.ref.name]
        torch.testing.assert_close(merged[name], weight + change(entry.factors, weight), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(change(again[name], weight), change(entry.factors, weight), rtol=1e-5, atol=1e-7)


def test_lokr_that_peft_would_not_make_is_refused_by_name() -> None:
    model, index = model_of("z-image")
    name = "layers.0.feed_forward.w1"
    layer = model.get_submodule(name)
    factors = lokr(1, layer.out_features, layer.in_features, True)  # type: ignore[arg-type]
    odd = Lokr(w1=factors.w1, w2=Tensor("F32", (*factors.w2.shape, 1, 1), factors.w2.data))  # type: ignore[union-attr]
    adapter = Adapter((Entry(Ref("unet", name), "weight", odd, (name,), "x"),))
    assert "PEFT derives" in rewrite(adapter, "diffusers", index).lost[0].reason
    with pytest.raises(TargetError, match="flux2 and z-image only"):
        flux = Entry(
            Ref("unet", "transformer_blocks.0.attn.to_out.0"), "weight", lokr(1, 3072, 3072, True), ("x",), "x"
        )
        inweave.save(Adapter((flux,)), "x.safetensors", dialect="diffusers", base=known_index("flux1-dev"))
