"""The registry of formats of quantized weights: its contract, and a format that is added to it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple, get_args

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import inweave
from inweave.layers import fused, lora_layers
from inweave.ops.linear.frozen import parts_of, weight_of
from inweave.ops.quantized import (
    FORMATS,
    QuantizedLayer,
    QuantizedLinear,
    Rows,
    joint_weight,
    relative_error,
    restore_weight,
)
from inweave.ops.quantized.int8 import _hadamard
from inweave.ops.quantized.nf4 import book
from inweave.training.config.schema import TrainConfig
from inweave.training.memory import checkpointing


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
        return "outside"

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

    def traced_gradient_rows(self, grad_out: torch.Tensor) -> tuple[None, None]:
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
def with_a_format_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "outside", Int8Linear)
    monkeypatch.setattr(fused, "DEVICES", frozenset({"cpu"}))


def test_formats_are_the_values_of_the_setting() -> None:
    values = get_args(TrainConfig.model_fields["quantize"].annotation)
    assert values == ("off", "auto", "keep", *(name for name in FORMATS if name != "outside"))


@pytest.mark.parametrize("name", ["outside", *FORMATS])
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
        assert (layer.weight - original).abs().max() <= (0.2 if name.startswith("nf4") else 0.07) * original.abs().max()
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


BUILT_IN = ("fp8", "int8", "int8-hadamard", "nf4", "nf4-hadamard")
EXACT = BUILT_IN[1:]  # x is not quantized


def weights(kind: str, out: int = 48, into: int = 512) -> torch.Tensor:
    """A matrix with rows of very different sizes, outliers, or blocks and rows of zeros."""
    torch.manual_seed(1)
    weight = torch.randn(out, into)
    if kind == "rows":
        weight *= 10 ** torch.randn(out, 1)
    elif kind == "outliers":
        weight[:, ::97] *= 20
    elif kind == "zeros":
        weight[3], weight[5, 64:128], weight[7, 3:] = 0, 0, 0
    elif kind == "extreme":
        weight[1] *= 1e-37
        weight[2] *= 1e30
        weight[4, :64] *= 1e-9
    return weight


@pytest.mark.parametrize("kind", ["normal", "rows", "outliers", "zeros", "extreme"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_quantizing_what_was_dequantized_gives_the_same_bits(name: str, kind: str) -> None:
    original = weights(kind)
    weight = FORMATS[name].weights.of(original)
    back = weight.dequantized(torch.float32)
    again = FORMATS[name].weights.of(back)
    assert all(
        torch.equal(one.view(torch.uint8), two.view(torch.uint8)) for one, two in zip(weight, again, strict=True)
    )
    assert torch.equal(again.dequantized(torch.float32), back) and back.isfinite().all()
    # half a step of the coarsest place in each format, of the largest number that shares the scale
    steps = {"fp8": 1 / 28, "int8": 1 / 253, "int8-hadamard": 1 / 15, "nf4": 0.16, "nf4-hadamard": 0.5}
    largest = original.abs().amax(1, keepdim=True)
    error = (back - original).abs()
    assert error.le(steps[name] * largest + 2.0**-99).all() and error.max() > 0
    if kind != "extreme":
        most = {"fp8": 0.03, "int8": 0.035, "int8-hadamard": 0.009, "nf4": 0.17, "nf4-hadamard": 0.075}
        assert relative_error(original, weight) < most[name]


class NoDoubles(TorchDispatchMode):
    """A device without float64, as MPS."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            raise TypeError(f"{func} in float64")
        return result


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e30])
@pytest.mark.parametrize("name", BUILT_IN)
def test_the_error_needs_no_float64(name: str, size: float) -> None:
    original = weights("rows", 256, 1024) * size
    weight = FORMATS[name].weights.of(original)
    with NoDoubles():
        error = relative_error(original, weight)
    wide, back = original.double(), weight.dequantized(torch.float32).double()
    assert error == pytest.approx(float((wide - back).norm() / wide.norm()), rel=1e-4)
    assert relative_error(torch.zeros(8, 64), FORMATS[name].weights.of(torch.zeros(8, 64))) == 0


@pytest.mark.parametrize("kind", ["normal", "rows", "outliers"])
def test_four_and_a_half_bits_are_closer_than_nf4_with_as_many(kind: str) -> None:
    """NF4 with one exact scale for 16 inputs has 4.5 bits too, if that scale takes 8."""
    original = weights(kind)
    blocks = original.view(48, -1, 16)
    scales = blocks.abs().amax(2, keepdim=True)
    plain = book(torch.device("cpu"))
    codes = (blocks / scales).unsqueeze(-1).sub(plain).abs().argmin(-1)
    error = float(((plain[codes] * scales).view_as(original) - original).norm() / original.norm())
    assert relative_error(original, FORMATS["nf4-hadamard"].weights.of(original)) < 0.9 * error


def test_a_rotation_spreads_outliers() -> None:
    original = weights("outliers")
    plain, rotated = (relative_error(original, FORMATS[name].weights.of(original)) for name in EXACT[:2])
    assert rotated < plain / 4


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_format_has_the_same_bits_in_every_surrounding(name: str) -> None:
    original, kind = weights("rows"), FORMATS[name].weights
    expected = [*(weight := kind.of(original)), weight.dequantized(torch.float32)]

    def actual() -> list[torch.Tensor]:
        for cached in (book, _hadamard):
            cached.cache_clear()
        again = kind.of(original)
        return [*again, again.dequantized(torch.float32)]

    default, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    results = []
    try:
        with torch.autocast("cpu", torch.bfloat16):
            results.append(actual())
        for dtype in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            results.append(actual())
        torch.set_default_dtype(default)
        torch.set_float32_matmul_precision("medium")
        results.append(actual())
    finally:
        torch.set_default_dtype(default)
        torch.set_float32_matmul_precision(precision)
        for cached in (book, _hadamard):
            cached.cache_clear()
    for result in results:
        assert [each.dtype for each in result] == [each.dtype for each in expected]
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("size", [1, 4, 16, 64, 256])
def test_rotating_is_the_product_with_a_hadamard_matrix(size: int) -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(matrix, torch.tensor([[1, 1], [1, -1]]).double())
    blocks = torch.randn(12, 3, size)
    expected = (blocks.double() @ matrix / size**0.5).flatten(1).float()
    kind = FORMATS["int8-hadamard"].weights
    torch.testing.assert_close(kind.rotated(blocks.flatten(1)), expected, rtol=1e-5, atol=1e-6)
    weight = kind.of(blocks.flatten(1))
    exact = (weight.numbers.double() * weight.scales).view(12, 3, size) @ matrix / size**0.5
    assert torch.equal(weight.dequantized(torch.float32), exact.flatten(1).float())


@pytest.mark.parametrize("name", [None, *BUILT_IN])
def test_merging_under_autocast_gives_the_same_bits(name: str | None) -> None:
    def merged(autocast: bool) -> torch.Tensor:
        torch.manual_seed(0)
        layer: Any = nn.Sequential(nn.Linear(128, 64))
        if name is not None:
            FORMATS[name].quantize(layer[0])
        inweave.inject(layer, 4, targets=["0"])
        torch.nn.init.normal_(layer[0].branch("default").up)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            inweave.merge(layer)
        weight: torch.Tensor = layer[0].base.weight
        return weight

    assert torch.equal(merged(True), merged(False))


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_number_that_is_not_finite_is_seen(name: str) -> None:
    for bad in ("nan", "inf"):
        original = weights("normal")
        original[2, 5] = float(bad)
        back = FORMATS[name].weights.of(original).dequantized(torch.float32)
        assert not back[2].isfinite().all() and back[3].isfinite().all()


@pytest.mark.parametrize("name", BUILT_IN)
def test_sizes_are_known_without_numbers(name: str) -> None:
    """On the meta device, where the planner measures; and nothing of a layer is stored twice."""
    layer, blank = nn.Linear(512, 384), nn.Linear(512, 384, device="meta")
    for each in (layer, blank):
        FORMATS[name].quantize(each)
    tensors = [dict(each.state_dict(keep_vars=True)) for each in (layer, blank)]
    assert {key: (t.shape, t.dtype) for key, t in tensors[0].items()} == {
        key: (t.shape, t.dtype) for key, t in tensors[1].items()
    }
    total = sum(tensor.nbytes for key, tensor in tensors[0].items() if key != "bias")
    assert total == pytest.approx(FORMATS[name].bytes_per_parameter * 512 * 384, rel=0.02)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_layer_is_saved_loaded_moved_and_converted(name: str) -> None:
    torch.manual_seed(0)
    models: list[Any] = [nn.Sequential(nn.Linear(128, 64)).requires_grad_(False) for _ in range(2)]
    first, second = models
    for model in models:
        FORMATS[name].quantize(model[0])
    second.load_state_dict(first.state_dict())
    x = torch.randn(3, 128)
    assert torch.equal(first(x), second(x))
    bits = [tensor.clone() for tensor in first[0].quantized]
    first.to(torch.bfloat16)
    assert first[0].weight.dtype == torch.bfloat16 and first(x.bfloat16()).dtype == torch.bfloat16
    assert all(torch.equal(one.float(), two.float()) for one, two in zip(bits, first[0].quantized, strict=True))
    first.to(torch.float32)
    assert torch.equal(first[0].weight, second[0].weight), "a conversion and back loses nothing of a quantized weight"


@pytest.mark.parametrize("name", BUILT_IN)
def test_layers_quantized_together_are_one_weight(name: str) -> None:
    layers = [nn.Linear(128, 64) for _ in range(3)]
    single = [FORMATS[name].weights.of(layer.weight.detach()) for layer in layers]
    FORMATS[name].quantize(*layers)
    whole = joint_weight(layers)
    assert whole is not None and whole[0].shape[0] == 192
    parts = [layer.weight for layer in layers]
    assert torch.equal(whole.dequantized(torch.float32), torch.cat(parts))
    assert all(torch.equal(one, two.dequantized(torch.float32)) for one, two in zip(parts, single, strict=True))
    assert joint_weight(layers[::-1]) is None and joint_weight(layers[:2]) is not None


def two_layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128)).requires_grad_(False)


def trained(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Inject a LoRA, and return the output and all gradients."""
    inweave.inject(model, rank=4, targets=["0", "2"])
    torch.manual_seed(1)
    for layer in lora_layers(model).values():
        for parameter in layer.branch("default").parameters():
            nn.init.normal_(parameter, std=0.1)
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]  # type: ignore[list-item]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_train_on_it_as_on_the_dequantized_model(name: str, dtype: torch.dtype) -> None:
    """The same bits: outputs, and gradients of the input and of every factor."""
    quantized, plain = two_layers().to(dtype), two_layers().to(dtype)
    for at in (0, 2):
        FORMATS[name].quantize(quantized[at])
        plain[at].weight.copy_(quantized[at].weight)
    x = torch.randn(7, 128).to(dtype)
    mine, theirs = trained(quantized, x), trained(plain, x)
    assert len(mine) == 6 and all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("name", EXACT)
def test_no_dequantized_weight_is_kept_for_the_backward_pass(name: str) -> None:
    model = two_layers()
    for at in (0, 2):
        FORMATS[name].quantize(model[at])
    saved: list[torch.Tensor] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        model(torch.randn(2, 128, requires_grad=True)).sum()
    own = {t.data_ptr() for layer in (model[0], model[2]) for t in layer.quantized}
    assert all(t.data_ptr() in own or t.numel() <= 2 * 256 for t in saved) and any(t.data_ptr() in own for t in saved)


@pytest.mark.parametrize("name", BUILT_IN)
def test_merging_into_it_can_be_undone_bit_for_bit(name: str) -> None:
    model = two_layers()
    for at in (0, 2):
        FORMATS[name].quantize(model[at])
    trained(model, torch.randn(2, 128))
    layers: list[Any] = list(lora_layers(model).values())
    before = [[tensor.clone() for tensor in layer.base.quantized] for layer in layers]
    inweave.merge(model)
    for layer, bits in zip(layers, before, strict=True):
        kind = FORMATS[name].weights
        branch = layer.branch("default")
        total = kind(*bits).dequantized(torch.float32) + (branch.product() * branch.scale).detach()
        error = relative_error(total, layer.base.quantized)
        assert error == pytest.approx(relative_error(total, kind.of(total)), rel=0.01)
    inweave.unmerge(model)
    for layer, bits in zip(layers, before, strict=True):
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(bits, layer.base.quantized, strict=True))


@pytest.mark.parametrize("name", EXACT)
def test_operator_contract(name: str) -> None:
    layer: Any = nn.Linear(128, 64).requires_grad_(False)
    FORMATS[name].quantize(layer)
    x = torch.randn(3, 128, requires_grad=True)
    parts = (*layer.quantized, None, None, None)[:4]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.inweave.quantized_linear, (x, *parts, name, layer.bias), test_utils=checks)
    torch.library.opcheck(
        torch.ops.inweave.quantized_linear_backward, (torch.randn(3, 64), 128, *parts, name), test_utils=checks
    )


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("name", EXACT)
def test_gradient_checkpointing_gives_the_same_gradients(name: str, mode: str) -> None:
    model = two_layers()
    for at in (0, 2):
        FORMATS[name].quantize(model[at])
    x = torch.randn(5, 128)
    plain = trained(model, x)[2:]
    model.zero_grad()
    contexts = partial(checkpointing._contexts, mode, nullcontext)
    checkpoint(model, x, use_reentrant=False, context_fn=contexts).square().sum().backward()
    again = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(plain) == len(again) == 4 and all(map(torch.equal, plain, again))


# convolutions


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels-last"])
@pytest.mark.parametrize(
    "settings",
    [
        {"kernel_size": 1},
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_convolution_is_that_of_its_dequantized_weight(name: str, settings: dict[str, Any], last: bool) -> None:
    """The same bits, and the same gradients of the input and of a LoRA; nothing dequantized is kept."""
    torch.manual_seed(0)
    layer: Any = nn.Sequential(nn.Conv2d(64, 96, **settings)).requires_grad_(False)
    plain: Any = nn.Sequential(nn.Conv2d(64, 96, **settings)).requires_grad_(False)
    original = layer[0].weight.clone()
    FORMATS[name].quantize(layer[0])
    assert isinstance(layer[0], QuantizedLayer) and layer[0].weight.shape == original.shape
    assert relative_error(original.flatten(1), layer[0].quantized) < 0.17
    plain[0].weight, plain[0].bias = nn.Parameter(layer[0].weight, False), layer[0].bias
    x = torch.randn(2, 64, 9, 8)
    x = (x.contiguous(memory_format=torch.channels_last) if last else x).requires_grad_()
    results = []
    for model in (layer, plain):
        inweave.inject(model, 4, targets=["0"])
        torch.manual_seed(1)
        branch = model[0].branch("default")
        for factor in (branch.down, branch.up):
            nn.init.normal_(factor, std=0.1)
        y = model(x)
        dy = torch.ones_like(y) * 0.1
        results.append([y.detach(), *torch.autograd.grad(y, [x, branch.down, branch.up], dy)])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert torch.equal(layer[0].base(x), plain[0].base(x)) and results[0][0].stride() == results[1][0].stride()
    stored: Any = layer[0].base
    bits = [tensor.clone() for tensor in stored.quantized]
    inweave.merge(layer)
    inweave.merge(plain)
    assert relative_error(plain[0].weight.flatten(1), stored.quantized) < 0.17
    inweave.unmerge(layer)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(bits, stored.quantized, strict=True))


@pytest.mark.parametrize("name", BUILT_IN)
def test_convolutions_are_sized_without_numbers_and_checked_as_operators(name: str) -> None:
    blank: Any = nn.Conv2d(64, 96, 3, padding=1, device="meta")
    layer: Any = nn.Conv2d(64, 96, 3, padding=1).requires_grad_(False)
    for each in (blank, layer):
        FORMATS[name].quantize(each)
    assert [(t.shape, t.dtype) for t in blank.quantized] == [(t.shape, t.dtype) for t in layer.quantized]
    assert blank(torch.empty(2, 64, 8, 8, device="meta")).shape == (2, 96, 8, 8)
    assert layer(torch.randn(64, 8, 8)).shape == (96, 8, 8)
    if name == "fp8":  # the checks below have no kernels for it
        return
    parts, geometry = (*layer.quantized, None, None, None)[:4], ([3, 3], [1, 1], [1, 1], [1, 1])
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    x = torch.randn(2, 64, 8, 8, requires_grad=True)
    torch.library.opcheck(
        torch.ops.inweave.quantized_conv2d, (x, *parts, name, layer.bias, *geometry), test_utils=checks
    )


def test_convolutions_with_groups_or_other_padding_stay_plain() -> None:
    for settings in ({"groups": 2}, {"padding_mode": "circular"}, {"padding": "same"}):
        layer: Any = nn.Conv2d(128, 128, 3, **settings)
        assert not any(kind.fits(layer) for kind in FORMATS.values() if kind is not Int8Linear)
    assert FORMATS["nf4"].fits(nn.Conv2d(64, 64, 1)) and not FORMATS["nf4"].fits(nn.Conv2d(4, 320, 3))
