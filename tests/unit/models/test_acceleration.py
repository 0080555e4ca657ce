"""A denoiser prepared for a GPU predicts what it did before, and adapters are merged into it in place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

import torch
from torch import Tensor, nn

import inweave
from inweave.layers.joined import JoinedLinear
from inweave.models.families.conditioning import ConditioningRequest
from inweave.models.fused.blocks import fuse_blocks
from inweave.models.model import Model, load_model
from inweave.models.recorded import NetworkState
from inweave.models.siblings import JoinedText, join_siblings
from tests.peers import tiny_models


def prepared(network: nn.Module) -> nn.Module:
    fuse_blocks(network, in_place=True)
    assert join_siblings(network) > 0
    return network


@cache
def loaded(variant: str) -> Model:
    return load_model(tiny_models.folder(variant), device="cpu", dtype="fp32")


@cache
def inputs(variant: str) -> tuple[Tensor, Any]:
    """Latents and arguments of two rows: guided."""
    model = loaded(variant)
    request = ConditioningRequest((("a red apple", 1.0),), (("gray", 1.0),), 5.0, 64, 64)
    conditioning = model.family.condition(model, request)
    noise = torch.randn(model.latent_space.shape(64, 64), generator=torch.Generator().manual_seed(3))
    return conditioning.expand(noise), conditioning.inputs


def prediction(variant: str, network: nn.Module) -> Tensor:
    latents, arguments = inputs(variant)
    model = replace(loaded(variant), networks={loaded(variant).blueprint.denoiser.folder: network})
    with torch.no_grad():
        return model.family.denoise(model, latents, torch.tensor(500.0), arguments)


def denoiser(variant: str) -> Any:
    return copy.deepcopy(loaded(variant).denoiser)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.sample(3)
@pytest.mark.parametrize("variant", ["sd1.5", "sdxl", "sd3.5-medium", "flux1-dev", "z-image", "qwen-image"])
def test_a_prepared_denoiser_predicts_the_same(variant: str) -> None:
    network = denoiser(variant)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    expected = prediction(variant, network)
    prepared(network)
    after = network.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert all(after[name].is_contiguous() for name in after)
    assert apart(prediction(variant, network), expected) < 1e-5


def test_products_are_shared_by_layers_of_one_input() -> None:
    network: Any = prepared(denoiser("sdxl"))
    groups = [group for module in network.modules() for group in getattr(module, "siblings", {}).values()]
    assert {type(group) for group in groups} == {JoinedLinear, JoinedText}
    attention = next(m for m in network.modules() if getattr(m, "projects_siblings", False) and m.siblings)
    x = torch.randn(2, 5, attention.to_q.in_features)
    with torch.no_grad():
        outputs = attention.siblings["to_q"].outputs(x)
        for layer, output in zip((attention.to_q, attention.to_k, attention.to_v), outputs, strict=True):
            torch.testing.assert_close(output, layer(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", ["sdxl", "flux1-dev"])
def test_adapters_are_merged_into_joined_weights_and_restored(variant: str, tmp_path: Path) -> None:
    adapter = tiny_models.lora(tmp_path / "style.safetensors", variant, dialect="diffusers")
    plain, joined = denoiser(variant), prepared(denoiser(variant))
    before = {name: tensor.clone() for name, tensor in joined.state_dict().items()}
    component = "unet" if variant == "sdxl" else "transformer"
    plain_weaver, weaver = (inweave.Weaver({component: network}) for network in (plain, joined))
    base = prediction(variant, joined)
    for each in (plain_weaver, weaver):
        each.apply([(each.plan(adapter, strict=False), 0.8)])
    merged = prediction(variant, joined)
    assert apart(merged, base) > 1e-3
    assert apart(merged, prediction(variant, plain)) < 1e-5
    weaver.apply([])
    assert all(torch.equal(tensor, before[name]) for name, tensor in joined.state_dict().items())
    assert torch.equal(prediction(variant, joined), base)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def _replace(attention: Any) -> None:
    doubled = Doubled(attention.to_k.in_features, attention.to_k.out_features, bias=attention.to_k.bias is not None)
    doubled.load_state_dict(attention.to_k.state_dict())
    attention.to_k = doubled


def _hook(attention: Any) -> None:
    attention.to_k.register_forward_hook(lambda layer, inputs, output: 2 * output)


def _move(attention: Any) -> None:
    attention.to_k.weight = nn.Parameter(2 * attention.to_k.weight.detach(), requires_grad=False)
    if attention.to_k.bias is not None:
        attention.to_k.bias = nn.Parameter(2 * attention.to_k.bias.detach(), requires_grad=False)


@pytest.mark.parametrize("change", [_replace, _hook, _move])
def test_a_layer_that_changed_is_computed_by_itself(change: Callable[[Any], None]) -> None:
    network = denoiser("sdxl")
    plain = copy.deepcopy(network)
    prepared(network)
    names = [name for name, module in network.named_modules() if getattr(module, "projects_siblings", False)]
    for each in (network, plain):
        change(each.get_submodule(names[0]))
        cross = names[0].replace("attn1", "attn2")
        change(each.get_submodule(cross))
    assert apart(prediction("sdxl", network), prediction("sdxl", plain)) < 1e-5


CHANGES: dict[str, Callable[[Any], object]] = {
    "a weight moved": lambda net: setattr(net[0].weight, "data", net[0].weight.data.clone()),
    "a weight replaced": lambda net: setattr(net[0], "weight", nn.Parameter(net[0].weight.detach().clone())),
    "a module replaced": lambda net: net.__setitem__(1, nn.SiLU()),
    "a module added": lambda net: net.append(nn.ReLU()),
    "a hook": lambda net: net[0].register_forward_hook(lambda *_: None),
    "an attribute": lambda net: setattr(net[0], "processor", object()),
    "another class": lambda net: setattr(net[1], "__class__", nn.SiLU),
    "training": lambda net: net.train(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_network_is_noticed(change: str) -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval()
    state = NetworkState(network)
    with torch.no_grad():
        network[0].weight.mul_(2)  # type: ignore[operator]
    network(torch.ones(1, 2))
    assert state.holds()
    CHANGES[change](network)
    assert not state.holds()


def test_a_hook_in_the_place_of_another_is_noticed() -> None:
    network = nn.Linear(2, 2).eval()
    handle = network.register_forward_hook(lambda *_: None)
    state = NetworkState(network)
    assert state.holds()
    handle.remove()
    network.register_forward_hook(lambda *_: None)
    assert not state.holds()


def test_a_graph_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(inweave.ConfigError, match="graph: 'fast' is unknown; use auto or off"):
        inweave.pipeline("inweave/emoji", graph="fast")  # type: ignore[arg-type]
