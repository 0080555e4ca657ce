"""Whole pipelines of diffusers: LoRAs as layers of every network, and block strengths, with diffusers' outputs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("peft")

import torch

from inweave import Weaver, activate, attach, collect, disabled, eject, inject, load, merge, set_strength, unmerge
from inweave.errors import ConfigError, TargetError
from tests.peers import tiny_models as tiny


def pipe(variant: str = "sdxl") -> Any:
    return copy.deepcopy(tiny.pipeline(variant))


def outputs(model: Any) -> list[torch.Tensor]:
    """Return the denoiser's prediction and the states of every text encoder."""
    ids = torch.arange(77).remainder(20)[None]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        encoders = [model.text_encoder, getattr(model, "text_encoder_2", None)]
        states = [
            encoder(ids, output_hidden_states=True).hidden_states[-2] for encoder in encoders if encoder is not None
        ]
        config = model.unet.config
        sample = torch.randn(1, config.in_channels, 8, 8, generator=generator)
        context = torch.randn(1, 77, config.cross_attention_dim, generator=generator)
        extra = {}
        if config.addition_embed_type == "text_time":
            width = model.text_encoder_2.config.projection_dim
            extra = {"text_embeds": torch.randn(1, width, generator=generator), "time_ids": torch.ones(1, 6)}
        return [model.unet(sample, 5, context, added_cond_kwargs=extra).sample, *states]


def same(ours: Any, theirs: Any) -> None:
    for mine, expected in zip(outputs(ours), outputs(theirs), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dialect", ["kohya", "diffusers"])
def test_a_file_is_attached_to_a_pipeline(dialect: str, tmp_path: Path) -> None:
    path = tiny.lora(tmp_path / "a.safetensors", "sdxl", dialect=dialect)
    model, peer, plain = pipe(), pipe(), outputs(pipe())
    peer.load_lora_weights(str(path), adapter_name="a")
    attach(model, path, name="a")
    same(model, peer)
    assert all((mine - base).abs().max() > 1e-3 for mine, base in zip(outputs(model), plain, strict=True))
    set_strength(model, "a", 0.5)
    peer.set_adapters("a", 0.5)
    same(model, peer)
    merge(model)
    same(model, peer)
    unmerge(model)
    with disabled(model):
        assert all(map(torch.equal, outputs(model), plain))
    adapter = collect(model, "a")
    assert {entry.ref.component for entry in adapter} == {"unet", "te1", "te2"}
    again = attach(pipe(), adapter, name="a")
    set_strength(again, "a", 0.5)
    assert all(map(torch.equal, outputs(again), outputs(model)))
    activate(model, [])
    eject(model)
    assert all(map(torch.equal, outputs(model), plain))


def test_one_component_and_a_mapping(tmp_path: Path) -> None:
    path = tiny.lora(tmp_path / "a.safetensors", "sdxl", dialect="kohya")
    model = attach(pipe(), path, component="te2")
    assert {entry.ref.component for entry in collect(model)} == {"te2"}
    whole = pipe()
    attach({"unet": whole.unet, "te1": whole.text_encoder, "te2": whole.text_encoder_2}, load(path))
    assert len(collect(whole)) == len(load(path))
    with pytest.raises(ConfigError, match="no component 'te3'; it has unet, te1, te2"):
        attach(pipe(), path, component="te3")


def test_a_file_for_another_model_changes_nothing(tmp_path: Path) -> None:
    path = tiny.lora(tmp_path / "a.safetensors", "sd1.5", dialect="kohya")
    model = pipe()
    before = [type(module) for module in model.unet.modules()]
    with pytest.raises(TargetError):
        attach(model, path)
    assert [type(module) for module in model.unet.modules()] == before
    with pytest.raises(ConfigError, match=r"expected a torch module.*inject\(pipe.unet, ...\)"):
        inject(model)


NESTED: list[Any] = [
    {"unet": {"down": 0.5, "mid": 0.25, "up": 2.0}},
    {"unet": {"down": {"block_1": 0.5}, "up": {"block_0": [0.4, 0.8, 1.5], "block_1": [0.3]}}, "text_encoder": 0.5},
    {"unet": 0.5, "text_encoder": 0.0, "text_encoder_2": 2.0},
    {"unet": {"mid": [0.5]}, "text_encoder_2": 0.5},
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("strengths", NESTED)
def test_block_strengths_as_diffusers_writes_them(strengths: Any, tmp_path: Path) -> None:
    path = tiny.lora(tmp_path / "a.safetensors", "sdxl", dialect="kohya")
    peer, model = pipe(), pipe()
    peer.load_lora_weights(str(path), adapter_name="a")
    peer.set_adapters("a", copy.deepcopy(strengths))
    Weaver(model).apply([(path, strengths)])
    same(model, peer)


@pytest.mark.parametrize(
    ("strengths", "message"),
    [
        ({"down": {"block_1": [1.0, 2.0, 3.0]}}, r"3 strengths for down_blocks.1, which has [123] attentions"),
        ({"unet": {"down": {"block_9": 1.0}}}, r"no block 'down_blocks.9'"),
        ({"unet": {"side": 1.0}}, "expected 'down', 'mid' and 'up', got 'side'"),
        ({"unet": {"up": {"1": 1.0}}}, "expected names like 'block_1', got '1'"),
        ({"unet": {"up": {"block_1": "x"}}}, "finite number"),
    ],
)
def test_block_strengths_that_the_model_lacks(strengths: Any, message: str, tmp_path: Path) -> None:
    path = tiny.lora(tmp_path / "a.safetensors", "sdxl", dialect="kohya")
    with pytest.raises(ConfigError, match=message):
        Weaver(pipe()).apply([(path, strengths)])


def test_a_weaver_shows_its_stack_and_is_not_copied(tmp_path: Path) -> None:
    import pickle

    path = tiny.lora(tmp_path / "style.safetensors", "sdxl", dialect="kohya")
    weaver = Weaver(pipe())
    assert repr(weaver) == "<Weaver of unet, te1, te2: the base>"
    weaver.apply([(path, {"unet": 0.8, "te": 0.5})])
    assert "style.safetensors" in repr(weaver) and repr(weaver).endswith("at unet=0.8 te=0.5>")
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match="cannot be copied or pickled"):
            copied(weaver)
