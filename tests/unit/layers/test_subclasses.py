"""Weights that are tensor subclasses: quantized ones are refused where they cannot be written, sharded ones merged."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

import inweave
from inweave.errors import InweaveError, TargetError
from inweave.layers import collect, lora_layers, merge, trainable, unmerge
from inweave.weights.build import build
from inweave.weights.source import DictSource


class Halves(torch.Tensor):
    """A quantized weight, as torchao and quanto have them: its numbers are in other tensors."""

    stored: torch.Tensor

    @staticmethod
    def __new__(cls, stored: torch.Tensor) -> Halves:
        return torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=torch.float32)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, stored: torch.Tensor) -> None:
        self.stored = stored

    def dequantize(self) -> torch.Tensor:
        return self.stored.float()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return Halves(args[0].stored)
        plain = tree_map(lambda each: each.dequantize() if isinstance(each, Halves) else each, (args, kwargs or {}))
        return func(*plain[0], **plain[1])  # copy_ writes to a copy: the change is gone


def in_halves(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Halves(module.weight.detach().half()), requires_grad=False)


def by_torchao(model: nn.Module) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())


def by_torchao_fp8(model: nn.Module) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    quantization.quantize_(model, quantization.Float8WeightOnlyConfig())


def by_quanto(model: nn.Module) -> None:
    quanto = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)


QUANTIZED: list[Callable[[nn.Module], None]] = [in_halves, by_torchao, by_torchao_fp8, by_quanto]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval()


X = torch.linspace(-1, 1, 64).reshape(2, 32)


def with_factors(model: nn.Module, **options: Any) -> nn.Module:
    inweave.inject(model, 4, alpha=8, **options)
    for layer in lora_layers(model).values():
        nn.init.constant_(layer.branch("default").get_parameter("up"), 0.25)
    return model


@pytest.mark.parametrize("quantize", QUANTIZED)
@torch.no_grad()
def test_layers_add_to_quantized_weights_and_merge_refuses_them(quantize: Callable[[nn.Module], None]) -> None:
    model = network()
    quantize(model)
    base = model(X)
    plain = collect(with_factors(network()))
    for dora in (False, True):
        with_factors(model, dora=dora)
        after = model(X)
        assert not torch.allclose(after, base, atol=1e-3)
        with pytest.raises(TargetError, match=r"0: its weight is stored as .*; leave the adapter unmerged"):
            merge(model)
        assert torch.equal(model(X), after)
        assert len(collect(model)) == 2
        inweave.eject(model)
    inweave.attach(model, plain)
    assert not torch.allclose(model(X), base, atol=1e-3)


@pytest.mark.parametrize("quantize", QUANTIZED)
def test_the_weaver_build_and_sources_refuse_quantized_weights(quantize: Callable[[nn.Module], None]) -> None:
    adapter = collect(with_factors(network()))
    model = network()
    quantize(model)
    with pytest.raises(InweaveError, match=r"0\.weight.*(stored as|quantized)|no floating-point weights"):
        inweave.Weaver(model).apply([adapter])
    with pytest.raises(TargetError, match=r"0\.weight"):
        build(model, DictSource(network().state_dict()))
    with pytest.raises(TargetError, match=r"0\.weight: stored as"):
        DictSource(dict(model.named_parameters())).get("0.weight")
    with pytest.raises(TargetError, match=r"0\.weight: stored as"):
        trainable(model, "0.weight")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("options", [{}, {"dora": True}, {"network": "lokr"}, {"network": "loha"}])
@torch.no_grad()
def test_adapters_of_8_bit_weights_are_float32(dtype: torch.dtype, options: dict[str, Any]) -> None:
    model = network()
    for module in (model[0], model[2]):
        module.weight.data = module.weight.data.to(dtype)
    inweave.inject(model, 4, **options)
    assert {parameter.dtype for layer in lora_layers(model).values() for parameter in layer.adapters.parameters()} == {
        torch.float32
    }
    weight = model.get_parameter("0.weight")
    before = weight.float()
    for layer in lora_layers(model).values():
        for parameter in layer.adapters.parameters():
            parameter.add_(0.2)
    merge(model)
    assert not torch.equal(weight.float(), before)
    unmerge(model)
    assert torch.equal(weight.float(), before)


class ScaledLinear(nn.Linear):
    """An 8-bit weight with a scale, as transformers' FP8Linear."""

    def __init__(self) -> None:
        super().__init__(32, 32)
        self.scale = nn.Parameter(torch.ones(1))
        self.weight.data = self.weight.data.to(torch.float8_e4m3fn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def test_an_8_bit_class_of_its_own_is_refused_by_name() -> None:
    with pytest.raises(TargetError, match="0: ScaledLinear overrides forward"):
        inweave.inject(nn.Sequential(ScaledLinear()), 4, targets=["0"])


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=datetime.timedelta(seconds=60))
    yield
    dist.destroy_process_group()


def check_sharded(model: nn.Module, whole: nn.Module) -> None:
    """Compare a sharded model with the same one that is whole: outputs, collected factors, merges."""
    for layer in ("0", "2"):
        assert isinstance(model.get_submodule(layer).weight, DTensor)
    expected = whole(X)
    assert torch.equal(model(X), expected)  # leaves the outermost module's parameters gathered
    theirs = {key: bytes(each.data) for key, each in collect(whole).tensors.items()}
    assert {key: bytes(each.data) for key, each in collect(model).tensors.items()} == theirs
    model(X)
    merge(whole)
    merge(model)
    assert not torch.equal(whole(X), expected)
    assert torch.equal(model(X), whole(X))
    model(X)
    unmerge(model)
    assert torch.equal(model(X), expected)


def shard(model: nn.Module) -> nn.Module:
    fully_shard(model.get_submodule("2"))  # type: ignore[arg-type]
    fully_shard(model)
    return model


@pytest.mark.usefixtures("one_process")
@torch.no_grad()
def test_a_sharded_model_merges_and_collects_as_a_whole_one() -> None:
    for options in ({}, {"dora": True}):
        check_sharded(shard(with_factors(network(), **options)), with_factors(network(), **options))


@pytest.mark.usefixtures("one_process")
@torch.no_grad()
def test_a_sharded_model_refuses_what_would_be_lost() -> None:
    adapter = collect(with_factors(network()))
    model = shard(network())
    model(X)  # parameters are gathered: a write to them would be lost when they are sharded again
    with pytest.raises(TargetError, match="sharded by FSDP"):
        inweave.Weaver(model).apply([adapter])
    with pytest.raises(TargetError, match="fully_shard"):
        inweave.inject(model, 4)
