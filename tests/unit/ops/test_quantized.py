"""The registry of formats of quantized weights: its contract, and a format that is added to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, get_args

import pytest
import torch
from torch import nn
from torch.nn import functional

import inweave
from inweave.layers import fused, lora_layers
from inweave.ops.linear.frozen import parts_of, weight_of
from inweave.ops.quantized import FORMATS, QuantizedLinear, Rows, restore_weight
from inweave.training.config.schema import TrainConfig


class Int8Weight(NamedTuple):
    """A weight in int8 with one scale per row; x and dy stay in their own dtype."""

    numbers: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8Weight:
        scales = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scales).round().to(torch.int8), scales)

    def split(self, count: int) -> list[Int8Weight]:
        parts = (torch.split(tensor, tensor.shape[0] // count) for tensor in self)
        return [Int8Weight(*each) for each in zip(*parts, strict=True)]

    @classmethod
    def joined(cls, parts: Sequence[Int8Weight]) -> Int8Weight | None:
        return None

    def format(self) -> str:
        return "int8"

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.numbers * self.scales).to(dtype)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(x, self.dequantized(x.dtype), bias)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None, rows: Rows | None) -> torch.Tensor:
        return functional.linear(x, self.dequantized(x.dtype), bias)

    def gradient(self, grad_out: torch.Tensor, rows: Rows | None) -> torch.Tensor:
        return grad_out @ self.dequantized(grad_out.dtype)

    def traced_rows(self, x: torch.Tensor) -> tuple[None, None]:
        return None, None


class Int8Linear(QuantizedLinear):
    weights: ClassVar[type[Int8Weight]] = Int8Weight
    bytes_per_parameter: ClassVar[float] = 1

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    @classmethod
    def device_problems(cls, device: torch.device) -> list[str]:
        return []


@pytest.fixture(autouse=True)
def with_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "int8", Int8Linear)
    monkeypatch.setattr(fused, "DEVICES", frozenset({"cpu"}))


def test_formats_are_the_values_of_the_setting() -> None:
    values = get_args(TrainConfig.model_fields["quantize"].annotation)
    assert values == ("off", *(name for name in FORMATS if name != "int8"))


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_a_format_keeps_its_contract(name: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(256, 128) for _ in range(2)]
    originals = [layer.weight.detach().clone() for layer in layers]
    kind = FORMATS[name]
    kind.quantize(*layers)
    for layer, original in zip(layers, originals, strict=True):
        assert isinstance(layer, kind) and "weight" not in layer._parameters
        weight = layer.quantized
        assert weight.format() == name and len(tuple(weight)) <= 4 and weight[0].shape[0] == 128
        assert (layer.weight - original).abs().max() <= 0.07 * original.abs().max()
        stored = sum(tensor.nbytes for tensor in weight)
        assert stored == pytest.approx(kind.bytes_per_parameter * original.numel(), rel=0.05), "scales are the rest"
        first, *others, format = parts_of(weight)
        assert all(one is two for one, two in zip(weight_of(format, first, *others), weight, strict=True))
        assert type(restore_weight(name, first, *others)) is kind.weights
        x = torch.randn(5, 256, requires_grad=True)
        y, dy = layer(x), torch.randn(5, 128)
        torch.testing.assert_close(y.detach(), weight.product(x.detach(), layer.bias.detach(), None))
        torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], weight.gradient(dy, None))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_new_format_works_with_a_lora_like_the_plain_weight(compiled: bool) -> None:
    """Its class and its line in the registry are all: no other code names a format."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(32, 48)).requires_grad_(False)
    inweave.inject(model, rank=4, targets=["0"])
    layer: Any = lora_layers(model)["0"]
    nn.init.normal_(layer.branch("default").up, std=0.3)
    x, dy = torch.randn(6, 32, requires_grad=True), torch.randn(6, 48)
    leaves = [x, layer.branch("default").down, layer.branch("default").up]
    Int8Linear.quantize(layer.base)
    branch = layer.branch("default")
    plain = functional.linear(x, layer.base.weight, layer.base.bias)
    plain = plain + branch.scale * (x @ branch.down.T @ branch.up.T)
    work = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    results = [[y.detach(), *torch.autograd.grad(y, leaves, dy)] for y in (work(x), plain)]
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
