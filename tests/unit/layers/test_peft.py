"""The same factors in PEFT's layers and in inweave's: the same outputs, the same merged weights.

PEFT is compared where it is right: it gives `lora_A` of a convolution neither dilation, groups nor padding mode.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from inweave.layers import merge
from tests.unit.layers.zoo import KINDS, fill, injected, layer_of

peft = pytest.importorskip("peft")
from transformers.pytorch_utils import Conv1D  # noqa: E402

LAYERS = {
    "linear": (lambda: nn.Linear(7, 5), KINDS["linear"].shape),
    "conv1D": (lambda: Conv1D(6, 5), (2, 3, 5)),
    "embedding": (lambda: nn.Embedding(11, 5), (2, 7)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1, stride=2), (2, 3, 8)),
    "conv2d": (lambda: nn.Conv2d(3, 5, 3, padding=1, stride=2), (2, 3, 6, 5)),
    "conv2d-1x1": (lambda: nn.Conv2d(4, 3, 1), (2, 4, 3, 3)),
    "conv3d": (lambda: nn.Conv3d(2, 3, (3, 1, 2), padding=(1, 0, 1)), (2, 2, 4, 3, 3)),
}
OPTIONS = {
    "lora": ({}, {}),
    "rslora": ({"rslora": True}, {"use_rslora": True}),
    "dora": ({"dora": True}, {"use_dora": True}),
}


def twins(kind: str, option: str, **more: object) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """(ours, PEFT's, input) with the same numbers in both."""
    make, shape = LAYERS[kind]
    torch.manual_seed(0)
    base = nn.ModuleDict({"layer": make()})
    x = torch.randint(11, shape) if kind == "embedding" else torch.randn(shape)
    ours, theirs = OPTIONS[option]
    model = injected(copy.deepcopy(base), 3, 5.0, ["layer"], **ours, **more)  # type: ignore[arg-type]
    fill(model)
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["layer"], fan_in_fan_out=kind == "conv1D", **theirs, lora_dropout=0.0
    )
    peer = peft.get_peft_model(base, config).base_model.model
    pair, twin = layer_of(model).branch("default"), peer["layer"]
    with torch.no_grad():
        if kind == "embedding":
            twin.lora_embedding_A["default"].copy_(pair.down)
            twin.lora_embedding_B["default"].copy_(pair.up)
        else:
            twin.lora_A["default"].weight.copy_(pair.down)
            twin.lora_B["default"].weight.copy_(pair.up)
        if pair.magnitude is not None:
            vector = twin.lora_magnitude_vector["default"].weight
            vector.copy_(pair.magnitude.reshape(vector.shape))
    return model, peer, x


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_forward_and_merged_weights(kind: str, option: str) -> None:
    model, peer, x = twins(kind, option)
    ours, theirs = model["layer"](x), peer["layer"](x)
    assert (theirs - peer["layer"].base_layer(x)).abs().max() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    merge(model)
    peer["layer"].merge()
    torch.testing.assert_close(layer_of(model).weight, peer["layer"].base_layer.weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", ["linear", "conv1D", "embedding", "conv2d"])
def test_gradients(kind: str, option: str) -> None:
    """DoRA's norm takes no gradient, as in its paper and in PEFT."""
    model, peer, x = twins(kind, option)
    model["layer"](x).square().sum().backward()
    peer["layer"](x).square().sum().backward()
    theirs = {
        name.replace("_", "."): parameter.grad for name, parameter in peer.named_parameters() if parameter.requires_grad
    }
    pair = layer_of(model).branch("default")
    for role, mark in (("down", ".A"), ("up", ".B"), ("magnitude", ".magnitude")):
        parameter = getattr(pair, role)
        if parameter is not None:
            gradient = next(grad for name, grad in theirs.items() if mark in name)
            torch.testing.assert_close(parameter.grad, gradient.reshape(parameter.shape), rtol=1e-4, atol=1e-4)
    assert layer_of(model).weight.grad is None


@pytest.mark.parametrize("kind", LAYERS)
def test_dora_starts_from_the_same_norms(kind: str) -> None:
    make, _ = LAYERS[kind]
    torch.manual_seed(0)
    base = nn.ModuleDict({"layer": make()})
    model = injected(copy.deepcopy(base), 3, 5.0, ["layer"], dora=True)
    config = peft.LoraConfig(r=3, target_modules=["layer"], use_dora=True, fan_in_fan_out=kind == "conv1D")
    theirs = peft.get_peft_model(base, config).base_model.model["layer"].lora_magnitude_vector["default"].weight
    torch.testing.assert_close(layer_of(model).branch("default").magnitude, theirs.flatten())


@pytest.mark.parametrize("kind", LAYERS)
def test_new_factors_have_pefts_shapes_and_standard_deviation(kind: str) -> None:
    model, peer, _ = twins(kind, "lora")
    pair, twin = layer_of(model).branch("default"), peer["layer"]
    if kind == "embedding":
        shapes = twin.lora_embedding_A["default"].shape, twin.lora_embedding_B["default"].shape
    else:
        shapes = twin.lora_A["default"].weight.shape, twin.lora_B["default"].weight.shape
    assert (pair.down.shape, pair.up.shape) == shapes
