"""What a Weaver and `index_of` accept as a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import inweave
from inweave.errors import ConfigError
from inweave.targets.index import ModelIndex
from inweave.weights.networks import index_of, networks_of
from inweave.weights.source import DictSource
from tests.support import random, write


@pytest.fixture
def pipeline() -> Any:
    """A real Stable Diffusion pipeline of diffusers, of a few thousand weights."""
    diffusers, transformers = pytest.importorskip("diffusers"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=8, attention_head_dim=4,
        norm_num_groups=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    text = transformers.CLIPTextConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50
    )
    vae = diffusers.AutoencoderKL(block_out_channels=(4,), norm_num_groups=4, latent_channels=4)
    return diffusers.StableDiffusionPipeline(
        vae=vae, text_encoder=transformers.CLIPTextModel(text), tokenizer=None, unet=unet,
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def test_a_diffusers_pipeline_is_woven_as_it_is(pipeline: Any, tmp_path: Path) -> None:
    query = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
    encoder = "text_model.encoder.layers.0.self_attn.q_proj"
    path = write(tmp_path / "style.safetensors", {
        f"unet.{query}.lora_A.weight": random(1, 2, 16), f"unet.{query}.lora_B.weight": random(2, 16, 2),
        f"text_encoder.{encoder}.lora_A.weight": random(3, 2, 8),
        f"text_encoder.{encoder}.lora_B.weight": random(4, 8, 2),
    })  # fmt: skip
    weight, bias = pipeline.unet.get_submodule(query).weight, pipeline.text_encoder.get_parameter(_variant_of(pipeline))
    before, encoder_before = weight.detach().clone(), bias.detach().clone()
    weaver = inweave.Weaver(pipeline)
    assert set(weaver.index.components) == {"unet", "te1"}
    assert weaver.apply([f"{path}:0.8"]) == 2
    assert not torch.equal(weight, before)
    assert not torch.equal(bias, encoder_before)
    woven = weight.detach().clone()
    weaver.apply([(path, {"unet": 0.8, "te": 0.0})])
    assert torch.equal(weight, woven)
    assert torch.equal(bias, encoder_before)
    weaver.apply([])
    assert torch.equal(weight, before)


def _variant_of(pipeline: Any) -> str:
    names = dict(pipeline.text_encoder.named_parameters())
    return next(name for name in names if name.endswith("self_attn.q_proj.weight"))


def test_components_without_weights_are_left_out(pipeline: Any) -> None:
    assert set(networks_of(pipeline)) == {"unet", "te1"}
    pipeline.text_encoder = None
    assert set(networks_of(pipeline)) == {"unet"}
    assert networks_of({"te1": pipeline.unet}) == {"te1": pipeline.unet}
    assert networks_of(pipeline.unet) == {"unet": pipeline.unet}
    assert networks_of({}) == {}  # holds nothing


@pytest.mark.parametrize("wrong", [3, "sdxl", None, {"unet": "file"}, nn.Linear])
def test_anything_else_is_an_error_that_says_what_is_expected(wrong: object) -> None:
    with pytest.raises(ConfigError, match="module"):
        inweave.Weaver(wrong)


def test_the_components_of_a_pipeline_are_the_pipeline(pipeline: Any) -> None:
    assert networks_of(pipeline.components) == networks_of(pipeline)
    assert set(inweave.Weaver(pipeline.components).index.components) == {"unet", "te1"}
    assert networks_of({"unet": pipeline.unet, "vae": pipeline.vae, "scheduler": None}) == {"unet": pipeline.unet}


def test_a_weaver_of_no_networks_holds_nothing() -> None:
    weaver = inweave.Weaver({})
    assert not weaver.woven and not weaver.index.components


def test_a_pipeline_of_other_components_is_an_error() -> None:
    class Other:
        components = {"vae": nn.Linear(1, 1), "scheduler": None}  # noqa: RUF012

    with pytest.raises(ConfigError, match=r"Other: none of its components takes adapters.*got vae, scheduler"):
        networks_of(Other())


def test_the_index_of_anything_with_named_tensors(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Embedding(3, 4))
    assert index_of(net).components["unet"].shapes == {"0.weight": (6, 4), "0.bias": (6,), "1.weight": (3, 4)}
    source = DictSource(net.state_dict())
    assert index_of(source).components["model"].shapes == index_of(net).components["unet"].shapes
    assert index_of("sd1.5").base == "sd1.5"
    known = index_of("sdxl")
    assert isinstance(known, ModelIndex)
    assert index_of(known) is known
    with pytest.raises(ConfigError, match="no such file"):
        index_of(tmp_path / "absent.safetensors")
