"""What inweave writes loads in diffusers with every key used, and merges to the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

pytest.importorskip("diffusers")
pytest.importorskip("peft")

from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from diffusers.loaders import FluxLoraLoaderMixin

from inweave.exchange.convert import rewrite
from inweave.formats.files import write_file
from tests.peers import models


def attention(name: str) -> bool:
    return "attn" in name and name.split(".")[-1] != "attn"


def everything(name: str) -> bool:
    return True


def plain(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's state after peft's wrappers are merged and removed."""
    state = {}
    for name, value in module.state_dict().items():
        if ".lora_" not in name:
            state[name.replace(".base_layer.", ".")] = value
    return state


def fuse(module: torch.nn.Module) -> int:
    """Merge every loaded adapter layer; returns how many there were."""
    layers = [m for m in module.modules() if hasattr(m, "merge") and hasattr(m, "lora_A")]
    for layer in layers:
        layer.merge()
    return len(layers)


@pytest.mark.parametrize("alpha", [None, 2.0])
@pytest.mark.parametrize("select", [attention, everything])
def test_sd1_kohya(alpha: float | None, select: Callable[..., Any], tmp_path: Path) -> None:
    unet, text = models.sd_unet(), models.clip()
    index = models.index_of(unet=unet, te1=text)
    if select is everything:  # diffusers' own kohya reader knows the names of attention and resnets only
        select = lambda name: "time_embedding" not in name and name not in ("conv_in", "conv_out")  # noqa: E731
    tensors = models.random_lora("unet.", unet, select, alpha=alpha)
    text_layers = models.random_lora(
        "text_encoder.text_model.", getattr(text, "text_model", text), attention, alpha=alpha
    )
    adapter = models.adapter_from(tensors | text_layers)
    output = rewrite(adapter, "kohya", index)
    assert not output.lost
    path = write_file(tmp_path / "kohya.safetensors", output.tensors, output.metadata)
    state, alphas = StableDiffusionPipeline.lora_state_dict(str(path), unet_config=unet.config)
    ours = models.merged(adapter, index, "unet", unet)
    StableDiffusionPipeline.load_lora_into_unet(state, alphas, unet=unet)
    layers = fuse(unet)
    assert layers == sum(1 for key in tensors if key.endswith("lora_A.weight"))
    models.assert_same_state(ours, plain(unet), layers)
    ours = models.merged(adapter, index, "te1", text)
    StableDiffusionPipeline.load_lora_into_text_encoder(state, alphas, text_encoder=text, prefix="text_encoder")
    layers = fuse(text)
    assert layers == sum(1 for key in text_layers if key.endswith("lora_A.weight"))
    models.assert_same_state(ours, plain(text), layers)


def test_sdxl_kohya_uses_sgm_names_that_diffusers_maps_back(tmp_path: Path) -> None:
    unet = models.sdxl_unet()
    index = models.index_of(unet=unet)
    tensors = models.random_lora("unet.", unet, attention, alpha=3.0)
    adapter = models.adapter_from(tensors)
    output = rewrite(adapter, "kohya", index)
    assert not output.lost
    assert all(
        key.startswith(("lora_unet_input_blocks", "lora_unet_middle_block", "lora_unet_output_blocks"))
        for key in output.tensors
    )
    path = write_file(tmp_path / "kohya.safetensors", output.tensors, output.metadata)
    state, alphas = StableDiffusionXLPipeline.lora_state_dict(str(path), unet_config=unet.config)
    ours = models.merged(adapter, index, "unet", unet)
    StableDiffusionXLPipeline.load_lora_into_unet(state, alphas, unet=unet)
    layers = fuse(unet)
    assert layers == len(tensors) // 3
    models.assert_same_state(ours, plain(unet), layers)


@pytest.mark.parametrize("alpha", [None, 2.0])
def test_diffusers_file_with_its_scaling_metadata(alpha: float | None, tmp_path: Path) -> None:
    unet, text = models.sd_unet(), models.clip()
    index = models.index_of(unet=unet, te1=text)
    tensors = models.random_lora("unet.", unet, everything, alpha=alpha, ranks=(2, 4, 3), vary=True)
    tensors |= models.random_lora("text_encoder.text_model.", getattr(text, "text_model", text), attention, alpha=alpha)
    adapter = models.adapter_from(tensors)
    output = rewrite(models.adapter_from(rewrite(adapter, "kohya", index).tensors), "diffusers", index)
    assert not output.lost
    assert ("lora_adapter_metadata" in output.metadata) == (alpha is not None)
    path = write_file(tmp_path / "pytorch_lora_weights.safetensors", output.tensors, output.metadata)
    state, alphas, metadata = StableDiffusionPipeline.lora_state_dict(str(path), return_lora_metadata=True)
    ours = models.merged(adapter, index, "unet", unet)
    StableDiffusionPipeline.load_lora_into_unet(state, alphas, unet=unet, metadata=metadata)
    layers = fuse(unet)
    assert layers == sum(1 for key in output.tensors if key.startswith("unet.") and "lora_A" in key)
    models.assert_same_state(ours, plain(unet), layers)
    ours = models.merged(adapter, index, "te1", text)
    StableDiffusionPipeline.load_lora_into_text_encoder(
        state, alphas, text_encoder=text, prefix="text_encoder", metadata=metadata
    )
    layers = fuse(text)
    models.assert_same_state(ours, plain(text), layers)


def test_flux_kohya_to_diffusers_splits_what_was_fused(tmp_path: Path) -> None:
    transformer = models.flux()
    index = models.index_of(unet=transformer)
    tensors = models.random_lora("transformer.", transformer, everything, alpha=2.0)
    tensors = {key: value for key, value in tensors.items() if not key.endswith(".alpha")}
    adapter = models.adapter_from(tensors)
    fused = rewrite(adapter, "kohya", index)
    assert not fused.lost
    assert "lora_unet_single_blocks_1_linear1.lora_up.weight" in fused.tensors
    again = rewrite(models.read(fused.tensors, fused.metadata), "diffusers", index)
    assert {k: v.data for k, v in again.tensors.items()} == {k: v.data for k, v in tensors.items()}
    path = write_file(tmp_path / "flux.safetensors", again.tensors, again.metadata)
    state, alphas = FluxLoraLoaderMixin.lora_state_dict(str(path), return_alphas=True)
    ours = models.merged(models.read(fused.tensors, fused.metadata), index, "unet", transformer)
    FluxLoraLoaderMixin.load_lora_into_transformer(state, alphas, transformer)
    layers = fuse(transformer)
    assert layers == len(tensors) // 2
    models.assert_same_state(ours, plain(transformer), layers)


def test_flux_kohya_double_blocks_load_in_diffusers(tmp_path: Path) -> None:
    """diffusers' kohya reader fixes the width of the single blocks, so a small model shows the double ones."""
    transformer = models.flux()
    index = models.index_of(unet=transformer)
    select = lambda name: name.startswith("transformer_blocks") and "norm" not in name  # noqa: E731
    tensors = models.random_lora("transformer.", transformer, select, alpha=None)
    adapter = models.adapter_from(tensors)
    output = rewrite(adapter, "kohya", index)
    assert not output.lost
    path = write_file(tmp_path / "flux.safetensors", output.tensors, output.metadata)
    state, alphas = FluxLoraLoaderMixin.lora_state_dict(str(path), return_alphas=True)
    ours = models.merged(adapter, index, "unet", transformer)
    FluxLoraLoaderMixin.load_lora_into_transformer(state, alphas, transformer)
    layers = fuse(transformer)
    assert layers == len(tensors) // 2
    models.assert_same_state(ours, plain(transformer), layers)


def test_dora_survives_conversion_through_kohya(tmp_path: Path) -> None:
    unet = models.sd_unet()
    index = models.index_of(unet=unet)
    tensors = models.random_lora("unet.", unet, attention, alpha=None)
    for key in [k for k in tensors if k.endswith("lora_B.weight")]:
        rows = tensors[key].shape[0]
        tensors[key.replace("lora_B.weight", "lora_magnitude_vector.weight")] = models.tensor(
            models.np.abs(models.np.random.default_rng(rows).standard_normal(rows)) + 0.5
        )
    adapter = models.adapter_from(tensors)
    through = rewrite(adapter, "kohya", index)
    assert not through.lost
    again = rewrite(models.read(through.tensors, through.metadata), "diffusers", index)
    path = write_file(tmp_path / "dora.safetensors", again.tensors, again.metadata)
    state, alphas = StableDiffusionPipeline.lora_state_dict(str(path), unet_config=unet.config)
    ours = models.merged(adapter, index, "unet", unet)
    StableDiffusionPipeline.load_lora_into_unet(state, alphas, unet=unet)
    layers = fuse(unet)
    assert layers == len(tensors) // 3
    theirs = {n: v for n, v in plain(unet).items() if "lora_magnitude" not in n}
    models.assert_same_state(ours, theirs, layers)
