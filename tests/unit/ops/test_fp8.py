"""Rows in e4m3: their distance from the numbers, the error of a product of them, and the layer that uses them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import inweave
from inweave.layers import fused, lora_layers
from inweave.ops.fp8 import autograd, quantize_rows
from inweave.ops.fp8.reference import LARGEST
from inweave.ops.fp8.reference import quantize_rows as reference
from inweave.ops.quantized import fp8
from inweave.ops.quantized.fp8 import Fp8Linear, Fp8Weight
from inweave.training.memory import checkpointing
from tests.unit.ops.interpreter import run_interpreted

HALF_STEP = 2.0**-4  # of four significant bits
EPS = 2.0**-24


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers in rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 10.0 ** torch.randn(shape[0], 1, generator=generator)).to(dtype)


def error_bound(x: torch.Tensor) -> torch.Tensor:
    """Return half a step of e4m3, relative above its smallest normal number, absolute below, plus three roundings."""
    exact = x.double().abs()
    scale = exact.amax(-1, keepdim=True) / LARGEST
    return exact * (HALF_STEP + 4 * EPS) + scale * 2.0**-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_within_half_a_step(dtype: torch.dtype) -> None:
    x = numbers(64, 257, dtype=dtype)
    q, scales = quantize_rows(x)
    assert q.dtype == torch.float8_e4m3fn and q.shape == x.shape and scales.shape == (64, 1)
    error = (q.double() * scales.double() - x.double()).abs()
    assert error.le(error_bound(x)).all()
    assert error.gt(0.9 * error_bound(x)).any(), "the bound must be able to fail"
    assert q.float().abs().amax(-1).eq(LARGEST).all(), "every row uses the whole range"


def test_rows_of_zeros_and_numbers_that_are_not_finite() -> None:
    x = torch.ones(5, 32)
    x[0], x[1, 3], x[2, 4], x[3] = 0.0, float("nan"), float("-inf"), 1e-38
    q, scales = quantize_rows(x)
    back = q.float() * scales
    assert back[0].eq(0).all() and back[4].sub(1).abs().max() < 1e-6
    assert back[1].isnan().all() and back[2].isnan().any(), "a bad number is seen, not replaced"
    assert scales[3].isfinite().all() and back[3].abs().max() < 1e-30


def test_products_forward_and_backward_are_within_the_errors_of_their_factors() -> None:
    x, weight, dy = numbers(24, 96), numbers(64, 96, seed=1), numbers(24, 64, seed=2)
    bias = numbers(1, 64, seed=3)[0]
    layer = nn.Linear(96, 64)
    layer.weight.data, layer.bias.data = weight.clone(), bias
    layer.requires_grad_(False)
    Fp8Linear.quantize(layer)
    assert isinstance(layer, Fp8Linear) and "weight" not in dict(layer.named_parameters())
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)

    def room(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Of a @ b.T: both errors, their product, and the additions in float32."""
        big_a, big_b, off_a, off_b = a.double().abs(), b.double().abs(), error_bound(a), error_bound(b)
        ideal = big_a @ off_b.T + off_a @ big_b.T + off_a @ off_b.T
        return ideal + a.shape[1] * 2 * EPS * (1 + HALF_STEP) ** 2 * (big_a @ big_b.T)

    plain = x.detach()
    forward = (y.detach().double() - plain.double() @ weight.double().T - bias.double()).abs()
    assert forward.le(room(plain, weight) + EPS * 2 * y.detach().abs()).all()
    assert x.grad is not None
    backward = (x.grad.double() - dy.double() @ weight.double()).abs()
    assert backward.le(room(dy, weight.T.contiguous())).all()
    assert forward.max() > 1e-4 and backward.max() > 1e-4, "8 bits cost something"


def test_the_layer_multiplies_with_the_weight_it_shows() -> None:
    layer = nn.Linear(64, 48, bias=False).requires_grad_(False)
    original = layer.weight.detach().clone()
    Fp8Linear.quantize(layer)
    assert layer.weight.shape == (48, 64) and (layer.weight - original).abs().max() > 0
    q, scales = quantize_rows(torch.eye(64))
    torch.testing.assert_close(layer(torch.eye(64)), (q.float() * scales) @ layer.weight.T)
    assert torch.equal(layer.weight, Fp8Weight.of(original).dequantized(torch.float32))


@pytest.mark.parametrize("network", ["lora", "fused lora", "loha", "lokr"])
def test_an_adapter_is_added_to_the_quantized_layer(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``fused lora``: as a GPU computes it, with the branch added by the product itself."""
    if network == "fused lora":
        monkeypatch.setattr(fused, "DEVICES", frozenset({"cpu"}))
    model = nn.Sequential(nn.Linear(32, 48)).requires_grad_(False)
    inweave.inject(model, rank=4, alpha=8, targets=["0"], network=network.removeprefix("fused "))
    layer = lora_layers(model)["0"]
    for parameter in layer.branch("default").parameters():
        nn.init.normal_(parameter, std=0.3)
    x = numbers(6, 32).view(2, 3, 32).requires_grad_()
    change = (layer.branch("default").product() * layer.branch("default").scale).detach()
    base: Any = layer.base
    Fp8Linear.quantize(base)
    assert layer.base is base and isinstance(layer.base, Fp8Linear)
    output, plain = model(x), base(x)
    torch.testing.assert_close(output - plain, x @ change.T, rtol=1e-4, atol=1e-4 * float(output.detach().abs().max()))
    dy = numbers(6, 48, seed=5).view(2, 3, 48)
    (whole,) = torch.autograd.grad(output, x, dy, retain_graph=True)
    (own,) = torch.autograd.grad(plain, x, dy)
    torch.testing.assert_close(whole - own, dy @ change, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))
    output.backward(dy)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.branch("default").parameters())
    with torch.no_grad():
        torch.testing.assert_close(model(x), output)
    bits = [tensor.clone() for tensor in cast("Any", base).quantized]
    layer.merge()
    merged = base(x)
    assert layer.merged and float((merged - output).norm()) <= 0.1 * float(output.detach().norm())
    layer.unmerge()
    assert all(
        torch.equal(one.float(), two.float()) for one, two in zip(bits, cast("Any", base).quantized, strict=True)
    )


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradient_checkpointing_of_a_quantized_layer_with_a_lora(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DEVICES", frozenset({"cpu"}))
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32)).requires_grad_(False)
    inweave.inject(model, rank=4, alpha=4, targets=["0", "2"])
    for layer in lora_layers(model).values():
        nn.init.normal_(cast("torch.Tensor", layer.branch("default").up), std=0.3)
        assert isinstance(layer.base, nn.Linear)
        Fp8Linear.quantize(layer.base)
    x = numbers(6, 32)

    def gradients(run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad()
        run(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients(model)
    contexts = partial(checkpointing._contexts, mode, nullcontext)
    again = gradients(lambda x: checkpoint(model, x, use_reentrant=False, context_fn=contexts))
    assert len(plain) == 4
    for one, two in zip(plain, again, strict=True):
        torch.testing.assert_close(one, two)


def test_torch_compile_traces_it_whole_with_its_lora(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DEVICES", frozenset({"cpu"}))
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 48)).requires_grad_(False)
    inweave.inject(model, rank=4, alpha=4, targets=["0"])
    layer = lora_layers(model)["0"]
    nn.init.normal_(cast("torch.Tensor", layer.branch("default").up), std=0.3)
    assert isinstance(layer.base, nn.Linear)
    Fp8Linear.quantize(layer.base)
    x = numbers(6, 32).requires_grad_()
    eager = model(x)
    (plain,) = torch.autograd.grad(eager.square().sum(), x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    (traced,) = torch.autograd.grad(compiled.square().sum(), x)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(traced, plain)


class Graphs:
    """A backend for torch.compile that records its graphs, forward and backward, and runs them unchanged."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.Graph] = []
        self.backend = aot_autograd(fw_compiler=self.keep, bw_compiler=self.keep)

    def keep(self, module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        self.graphs.append(module.graph)
        return make_boxed_func(module.forward)

    def calls(self, name: str) -> list[torch.fx.Node]:
        return [node for graph in self.graphs for node in graph.nodes if name in str(node.target)]


def quantized_layers(monkeypatch: pytest.MonkeyPatch) -> nn.Sequential:
    """A norm, a layer in 8 bits, GELU, and a layer in 8 bits with a LoRA, which a GPU computes as one operation."""
    monkeypatch.setattr(fused, "DEVICES", frozenset({"cpu"}))
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(approximate="tanh"), nn.Linear(48, 64))
    for parameter in model.requires_grad_(False).parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    inweave.inject(model, rank=4, alpha=4, targets=["3"])
    layer = lora_layers(model)["3"]
    layer.branch("default").up.data.normal_(std=0.3, generator=generator)
    for linear_ in (model[1], layer.base):
        assert isinstance(linear_, nn.Linear)
        Fp8Linear.quantize(linear_)
    return model


def gradients(model: Callable[[torch.Tensor], torch.Tensor], layers: nn.Module) -> list[torch.Tensor]:
    """What the layers return, and gradients of the input and of the LoRA."""
    x, dy = numbers(7, 32).requires_grad_(), numbers(7, 64, seed=1)
    y = model(x)
    inputs = [x, *(parameter for parameter in layers.parameters() if parameter.requires_grad)]
    assert len(inputs) == 3
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def test_a_compiler_sees_how_rows_are_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    """In plain operations, whose results the operators read: without an adapter nothing else reads x and dy."""
    model = quantized_layers(monkeypatch)
    graphs = Graphs()
    traced = gradients(torch.compile(model, backend=graphs.backend, fullgraph=True), model)
    for one, two in zip(traced, gradients(model, model), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5 * float(two.abs().max()))
    forward, backward = graphs.calls("lora_linear")[0], graphs.calls("lora_linear_backward")[0]
    products = graphs.calls("fp8_product") + graphs.calls("fp8_gradient")
    assert len(products) == 2 and not graphs.calls("fp8_linear")
    rows = [(forward.args[-2], forward.args[-1]), (backward.args[-2], backward.args[-1])]
    rows += [(node.args[0], node.args[1]) for node in products]
    for q, scales in rows:
        assert q.meta["val"].dtype == torch.float8_e4m3fn and scales.meta["val"].dtype == torch.float32
        assert "convert_element_type" in str(q.target) or "_to_copy" in str(q.target), "not an operator of inweave"
        assert len(q.users) == 1
    assert all(
        argument.meta["val"].dtype in (torch.float8_e4m3fn, torch.float32)
        and argument.meta["val"].shape[-1] in (1, 32, 48)
        for node in products
        for argument in node.args[:3]
    )


@pytest.mark.parametrize("kind", ["plain", "lora"])
def test_rows_of_a_transposed_input_lie_one_after_the_other(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's product refuses others; tokens of one image with its channels first are such an input."""
    monkeypatch.setattr(fused, "DEVICES", frozenset({"cpu"}))
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 48)).requires_grad_(False)
    if kind == "lora":
        inweave.inject(model, rank=4, targets=["0"])
        Fp8Linear.quantize(cast("nn.Linear", lora_layers(model)["0"].base))
    else:
        Fp8Linear.quantize(cast("nn.Linear", model[0]))
    strides: list[tuple[int, ...]] = []
    own = autograd.scaled_product

    def product(x: tuple[torch.Tensor, torch.Tensor], *others: Any, **options: Any) -> torch.Tensor:
        strides.append(x[0].stride())
        return own(x, *others, **options)

    monkeypatch.setattr(autograd, "scaled_product", product)
    monkeypatch.setattr(fp8, "scaled_product", product)

    def tokens(image: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(image.flatten(2).transpose(1, 2) + 1)
        return y.transpose(1, 2).contiguous()

    image = numbers(32, 6).view(1, 32, 2, 3).requires_grad_()
    torch.compile(tokens, backend="aot_eager", fullgraph=True)(image).square().sum().backward()
    assert strides == [(32, 1), (48, 1)]


def test_a_bias_that_is_trained_has_a_gradient() -> None:
    layer = nn.Linear(32, 48)
    layer.weight.requires_grad_(False)
    Fp8Linear.quantize(layer)
    x, dy = numbers(7, 32), numbers(7, 48, seed=1)
    for work in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer.bias.grad = None
        work(x).backward(dy)
        torch.testing.assert_close(layer.bias.grad, dy.sum(0))


def test_a_second_derivative_is_refused() -> None:
    layer = nn.Linear(32, 48).requires_grad_(False)
    Fp8Linear.quantize(layer)
    x = numbers(7, 32).requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)


def test_quotients_are_those_of_float32_whoever_divides() -> None:
    """A compiler may multiply with a reciprocal: of float64, rounded, it has the same bits."""
    generator = torch.Generator().manual_seed(0)
    largest = (torch.rand(200_000, 1, generator=generator) + 1) * 2.0 ** torch.randint(
        -90, 90, (200_000, 1), generator=generator
    )
    _, scales = reference(largest)
    top = torch.full_like(largest, LARGEST)
    assert torch.equal(scales, largest / top)
    assert torch.equal((largest.double() * (1 / LARGEST)).float(), largest / top)
    assert torch.equal((LARGEST / largest.double()).float(), top / largest)
    assert torch.equal((largest.double().reciprocal() * LARGEST).float(), top / largest)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor asks the C++ compiler who it is")
def test_the_kernel_that_makes_rows_quantizes_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Inductor's code for the CPU; nothing of it is compiled or run."""
    from torch._inductor import cpu_vec_isa
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *tensors: None)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)  # a C++ compiler finds out what the CPU has
    model = quantized_layers(monkeypatch)
    _, codes = run_and_get_code(gradients, torch.compile(model, fullgraph=True), model)
    kernels = [line for code in codes for line in code.splitlines() if "async_compile.cpp_pybinding" in line]
    quantizers = [line for line in kernels if "Float8" in line]
    assert len(quantizers) == 4, kernels
    for line, made in zip(quantizers, ("native_layer_norm", "gelu", "", "gelu_backward"), strict=True):
        assert "amax" in line and made in line, "where rows are made they are quantized"
    assert not any("fp8_linear" in code for code in codes)


def test_operator_contract() -> None:
    layer = nn.Linear(32, 48).requires_grad_(False)
    Fp8Linear.quantize(layer)
    assert isinstance(layer, Fp8Linear)
    x = numbers(7, 32)
    # not its schema: torch compares arguments with what they were, and has no comparison of e4m3
    checks = ("test_autograd_registration", "test_faketensor")
    own = cast("Fp8Weight", layer.quantized)
    torch.library.opcheck(torch.ops.inweave.fp8_linear, (x.requires_grad_(), *own, layer.bias), test_utils=checks)
    for bias, dtype, fast in ((layer.bias, torch.bfloat16, True), (None, torch.float32, False)):
        arguments = (*quantize_rows(x.detach()), own.rows, own.row_scales, bias, dtype, fast)
        torch.library.opcheck(torch.ops.inweave.fp8_product, arguments, test_utils=checks)


def test_only_large_layers_of_even_sizes_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        assert Fp8Linear.fits(nn.Linear(3072, 12288)) and Fp8Linear.fits(nn.Linear(2048, 2048))
        assert (
            not Fp8Linear.fits(nn.Linear(1280, 10240))
            and not Fp8Linear.fits(nn.Linear(3072, 64))
            and not Fp8Linear.fits(nn.Linear(3080, 3072))
        )
        assert not Fp8Linear.fits(nn.Conv2d(3072, 3072, 1))
    monkeypatch.setattr(fp8, "SMALLEST_SIDE", 16)
    small = nn.Linear(16, 32)
    assert Fp8Linear.fits(small)
    Fp8Linear.quantize(small)
    assert not Fp8Linear.fits(small), "once"


def test_a_device_without_such_products_says_so() -> None:
    assert Fp8Linear.device_problems(torch.device("cpu")) == ["device cpu: 8-bit products need an NVIDIA GPU"]


def interpreted() -> dict[str, list[str]]:
    """In a process of its own: the kernel against the formula, bit for bit.

    Triton's interpreter loses the carry where rounding reaches the next power of two, and NaN: those are left to a GPU.
    """
    from inweave.ops.fp8 import triton as kernel

    differing = {}
    for rows, columns in ((3, 16), (5, 2048), (2, 8192 + 48), (1, 20000)):
        x = numbers(rows, columns, seed=columns)
        x[0, columns // 2] = float("nan") if rows > 1 else 0.0
        (q, scales), (expected, expected_scales) = kernel.quantize_rows(x), reference(x)
        exact, rounded = (x / expected_scales).abs(), expected.float().abs()
        comparable = ~((torch.frexp(rounded).mantissa == 0.5) & (exact < rounded)) & ~rounded.isnan()
        assert comparable.float().mean() > 0.4
        same = torch.equal(q.float()[comparable], expected.float()[comparable])
        same_scales = torch.equal(scales.nan_to_num(-1), expected_scales.nan_to_num(-1))
        differing[f"{rows}x{columns}"] = ["q"] * (not same) + ["scales"] * (not same_scales)
    return differing


def test_kernel_agrees_with_the_formula_in_the_interpreter() -> None:
    rows = run_interpreted(__name__)
    assert len(rows) == 4 and not any(rows.values()), rows
