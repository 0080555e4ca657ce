"""Quantization-aware training of layers: what they compute, their gradients, and that merging keeps it."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from inweave.errors import ConfigError
from inweave.layers import LoraLayer, inject, lora_layers, merge
from inweave.layers.qat import fake_quantize
from inweave.ops.quantized import FORMATS, QuantizedLinear
from inweave.training.memory.checkpointing import _contexts

SCHEMES = ["int8", "int8-hadamard", "nf4"]
KINDS: list[dict[str, Any]] = [{}, {"dora": True}, {"network": "loha"}, {"network": "lokr", "factor": 8}]


def adapted(seed: int = 0, *, dtype: torch.dtype = torch.float32, rank: int = 4, **options: Any) -> nn.Sequential:
    """Two layers with adapters that change something."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 96), nn.GELU(), nn.Linear(96, 64, bias=False)).to(dtype)
    inject(model, rank, 4.0, ["0"], seed=seed, dtype=torch.float32, **options)
    for parameter in layer_of(model).adapters.parameters():
        with torch.no_grad():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def layer_of(model: nn.Sequential) -> Any:
    layer = model[0]
    assert isinstance(layer, LoraLayer)
    return layer


@pytest.mark.parametrize("options", KINDS, ids=["lora", "dora", "loha", "lokr"])
@pytest.mark.parametrize("format", SCHEMES)
def test_the_output_is_that_of_merging_and_quantizing(format: str, options: dict[str, Any]) -> None:
    model = adapted(**options)
    x = torch.randn(3, 5, 128)
    merged = copy.deepcopy(model)
    merge(merged)
    quantized = layer_of(merged).base
    FORMATS[format].quantize(quantized)
    expected = quantized(x)
    plain = model[0](x)
    fake_quantize(lora_layers(model).values(), format)
    for training in (True, False):
        model.train(training)
        assert torch.equal(model[0](x), expected)
    with torch.no_grad():
        assert torch.equal(model[0](x), expected)
    assert 1e-4 < (plain - expected).norm() / plain.norm() < 0.3


@pytest.mark.parametrize("options", KINDS, ids=["lora", "dora", "loha", "lokr"])
def test_gradients_are_straight_through(options: dict[str, Any]) -> None:
    """Against autograd through the whole weight, in which rounding counts as the identity."""
    model = adapted(**options)
    layer = layer_of(model)
    x = torch.randn(7, 128, requires_grad=True)
    fake_quantize([layer], "nf4")
    target = torch.randn(7, 96)
    branch = layer.branch("default")
    parameters = [*branch.parameters()]
    (layer(x) * target).sum().backward()
    got: list[Any] = [x.grad, *(parameter.grad for parameter in parameters)]

    other = x.detach().clone().requires_grad_()
    total = layer.weight.detach() + branch.scale * branch.product()
    if branch.magnitude is not None:
        total = total / total.detach().norm(dim=1, keepdim=True) * branch.magnitude.unsqueeze(1)
    rounded = FORMATS["nf4"].weights.of(total.detach()).dequantized(torch.float32)
    y = functional.linear(other, total + (rounded - total).detach(), layer.base.bias)
    expected = torch.autograd.grad((y * target).sum(), [other, *parameters])
    for one, two in zip(got, expected, strict=True):
        assert torch.allclose(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("format", SCHEMES)
def test_a_base_in_the_same_format_is_computed_as_merged(format: str) -> None:
    model = adapted()
    base = layer_of(model).base
    FORMATS[format].quantize(base)
    assert isinstance(base, QuantizedLinear)
    fake_quantize([layer_of(model)], format)
    x = torch.randn(4, 128)
    before = model[0](x)
    merge(model)
    assert torch.equal(model[0](x), before)


def test_memory_of_a_step_holds_no_rounded_weight() -> None:
    """What autograd keeps is small: inputs and factors, not one more weight for each layer."""
    model = adapted(rank=2)
    x = torch.randn(2, 128, requires_grad=True)
    fake_quantize([layer_of(model)], "int8")
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model[0](x)
    assert sum(sizes) < 128 * 96


@pytest.mark.parametrize("format", SCHEMES)
def test_selective_checkpointing_stores_products_and_no_weight(format: str) -> None:
    """The sum of weight and adapter is computed by products too, which are as large as the weight."""
    model = adapted(rank=2)
    fake_quantize([layer_of(model)], format)
    x = torch.randn(2, 128, requires_grad=True)
    contexts = partial(_contexts, "selective", nullcontext)

    def of_the_size_of_the_weight() -> int:
        gc.collect()
        tensors: list[Any] = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        return sum(each.numel() == 128 * 96 for each in tensors)

    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    before = of_the_size_of_the_weight()
    y = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
    assert of_the_size_of_the_weight() == before
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(gradient, expected)


def test_convolutions_compute_by_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, 64, 3, stride=2, padding=1))
    inject(model, 4, targets=["0"], dtype=torch.float32)
    layer = layer_of(model)
    with torch.no_grad():
        for parameter in layer.adapters.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    monkeypatch.setattr(FORMATS["int8"], "fits", classmethod(lambda cls, module: True))
    fake_quantize([layer], "int8")
    x: Any = torch.randn(2, 64, 8, 8, requires_grad=True)
    y = layer(x)
    branch = layer.branch("default")
    total = layer.weight.flatten(1) + branch.scale * branch.product()
    rounded = FORMATS["int8"].weights.of(total.detach()).dequantized(torch.float32).reshape(64, 64, 3, 3)
    other = x.detach().requires_grad_()
    expected = functional.conv2d(other, rounded, layer.base.bias, 2, 1)
    assert torch.allclose(y, expected, atol=1e-5)
    y.square().sum().backward()
    (dx,) = torch.autograd.grad(expected.square().sum(), other)
    assert torch.allclose(x.grad, dx, rtol=1e-4, atol=1e-3)
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in branch.parameters())


@pytest.mark.parametrize("options", KINDS, ids=["lora", "dora", "loha", "lokr"])
def test_autocast_does_not_change_the_weight(options: dict[str, Any]) -> None:
    layer = layer_of(adapted(**options))
    fake_quantize([layer], "int8")
    weight = layer.operation.weight(layer.acting, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.operation.weight(layer.acting, torch.float32), weight)


def test_what_cannot_be_rounded_is_refused() -> None:
    model = adapted(dropout=0.1)
    with pytest.raises(ConfigError, match="dropout"):
        fake_quantize([layer_of(model)], "int8")
    model = adapted()
    FORMATS["int8"].quantize(layer_of(model).base)
    with pytest.raises(ConfigError, match="not a layer that nf4 quantizes"):
        fake_quantize([layer_of(model)], "nf4")
    model = adapted()
    layer_of(model).base.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="0: has hooks"):
        fake_quantize([layer_of(model)], "int8")
    small = nn.Sequential(nn.Linear(8, 8))
    inject(small, 2, targets=["0"])
    with pytest.raises(ConfigError, match="not a layer that int8 quantizes"):
        fake_quantize([layer_of(small)], "int8")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("format", "size"), [("int8", 1e-3), ("nf4", 8e-3)])
def test_training_through_rounding_keeps_more_of_a_target(format: str, size: float) -> None:
    """A regression with a few strong directions in its inputs, as activations have: the loss after merging."""
    seeds, losses = range(3), {True: 0.0, False: 0.0}
    for seed in seeds:
        for aware in losses:
            torch.manual_seed(seed)
            base = nn.Linear(64, 64, bias=False)
            goal = base.weight.detach() + size * torch.randn(64, 4) @ torch.randn(4, 64)
            strengths, rotation = torch.linspace(0, -4, 64).exp(), torch.linalg.qr(torch.randn(64, 64))[0]
            x = torch.randn(256, 64) * strengths @ rotation
            model = nn.Sequential(base)
            FORMATS[format].quantize(base)
            inject(model, 8, targets=["0"], seed=seed, dtype=torch.float32)
            layer = layer_of(model)
            if aware:
                fake_quantize([layer], format)
            optimizer = torch.optim.Adam(layer.adapters.parameters(), lr=2e-3)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
            for _ in range(200):
                optimizer.zero_grad()
                functional.mse_loss(layer(x), x @ goal.T).backward()
                optimizer.step()
                schedule.step()
            merge(model)
            losses[aware] += float(functional.mse_loss(layer.base(x), x @ goal.T).detach())
    assert losses[True] < 0.95 * losses[False], losses
