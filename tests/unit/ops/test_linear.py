"""The LoRA linear operation: its formulas against float64, autograd of the plain formula, and compiled regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from inweave.ops.linear import Rounded, lora_backward, lora_linear, reference
from inweave.training.memory.checkpointing import _contexts
from tests.unit.ops.interpreter import run_interpreted

SHAPES = [(1, 1, 1, 1), (5, 8, 6, 3), (77, 64, 48, 16), (33, 40, 72, 64)]  # M, K, N, r
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def numbers(shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.Tensor]:
    """x, W, b, down, up, dY"""
    m, k, n, r = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = [((m, k), 1.0), ((n, k), k**-0.5), ((n,), 1.0), ((r, k), k**-0.5), ((n, r), 1.0), ((m, n), 1.0)]
    return [(torch.randn(size, generator=generator, dtype=torch.float64) * std).to(dtype) for size, std in sizes]


def plain(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, down: torch.Tensor, up: torch.Tensor, scale: float
) -> torch.Tensor:
    return functional.linear(x, weight, bias) + scale * functional.linear(functional.linear(x, down), up)


def gradients(function: Callable[..., torch.Tensor], tensors: Sequence[Any], scale: float) -> list[torch.Tensor]:
    x, weight, bias, down, up, grad = tensors
    leaves = [tensor.clone().requires_grad_() for tensor in (x, down, up)]
    y = function(leaves[0], weight, bias, leaves[1], leaves[2], scale)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_function_has_the_gradients_of_the_plain_formula(shape: tuple[int, int, int, int], bias: bool) -> None:
    tensors: list[Any] = numbers(shape)
    if not bias:
        tensors[2] = None
    for ours, theirs in zip(gradients(lora_linear, tensors, 0.7), gradients(plain, tensors, 0.7), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_error_is_at_most_twice_that_of_plain_torch(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    tensors = numbers(shape, dtype)
    exact = gradients(plain, [tensor.double() for tensor in tensors], 0.7)
    ours, theirs = gradients(lora_linear, tensors, 0.7), gradients(plain, tensors, 0.7)
    for name, right, our, their in zip(("y", "x", "down", "up"), exact, ours, theirs, strict=True):
        assert our.dtype == dtype and our.shape == their.shape
        room = torch.finfo(dtype).eps * right.norm()  # both may be exact by chance
        assert (our - right).norm() <= 2 * (their - right).norm() + room, name


@pytest.mark.parametrize("shape", SHAPES)
def test_adapter_alone(shape: tuple[int, int, int, int]) -> None:
    x, _, _, down, up, grad = numbers(shape)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, down, up)]
    expected = torch.autograd.grad(0.7 * (leaves[0] @ leaves[1].T) @ leaves[2].T, leaves, grad)
    for ours, theirs in zip(lora_backward(grad, x, down, up, 0.7), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_leading_axes_and_strides_do_not_matter() -> None:
    x, weight, bias, down, up, _ = numbers((24, 8, 6, 3))
    rows = lora_linear(x, weight, bias, down, up, 0.5)
    assert torch.equal(lora_linear(x.view(2, 3, 4, 8), weight, bias, down, up, 0.5), rows.view(2, 3, 4, 6))
    swapped = x.view(4, 6, 8).transpose(0, 1)
    assert torch.equal(lora_linear(swapped, weight, bias, down, up, 0.5), rows.view(4, 6, 6).transpose(0, 1))
    assert torch.equal(
        lora_linear(x[0], weight, bias, down, up, 0.5), lora_linear(x[:1], weight, bias, down, up, 0.5)[0]
    )
    assert lora_linear(x[:0], weight, bias, down, up, 0.5).shape == (0, 6)
    leaf = x.view(4, 6, 8).clone().requires_grad_()
    y = lora_linear(leaf.transpose(0, 1), weight, bias, down, up, 0.5)
    (grad,) = torch.autograd.grad(y.sum(), leaf)  # a gradient that is one number, expanded
    expected = (weight + 0.5 * up @ down).sum(0)
    torch.testing.assert_close(grad, expected.expand_as(grad), rtol=1e-12, atol=1e-12)


def test_only_what_is_needed_is_kept_and_computed() -> None:
    x, weight, bias, down, up, grad = numbers((5, 8, 6, 3))

    def saved_tensors(*trained: int) -> list[torch.Tensor]:
        leaves = [tensor.clone() for tensor in (x, down, up)]
        for at in trained:
            leaves[at].requires_grad_()
        seen: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = lora_linear(leaves[0], weight, bias, leaves[1], leaves[2], 0.5)
        y.backward(grad)
        assert [leaf.grad is not None for leaf in leaves] == [at in trained for at in range(3)]
        return seen

    def holds(seen: list[torch.Tensor], shape: tuple[int, ...]) -> bool:
        return any(tensor.shape == shape for tensor in seen)

    factors = saved_tensors(1, 2)
    assert holds(factors, (5, 8)) and holds(factors, (5, 3)) and not holds(factors, (6, 8)), "no dX: W is not kept"
    inputs = saved_tensors(0)
    assert holds(inputs, (6, 8)) and not holds(inputs, (5, 8)) and not holds(inputs, (5, 3)), "frozen: x is not kept"
    assert not holds(saved_tensors(0, 2), (5, 8)), "down is frozen: x is not kept"


def test_second_derivative_raises() -> None:
    x, weight, bias, down, up, _ = numbers((5, 8, 6, 3))
    x.requires_grad_()
    for loss in (torch.Tensor.sum, lambda y: y.square().sum()):  # dx depends on the factors, even if dy is constant
        y = lora_linear(x, weight, bias, down.requires_grad_(), up, 0.5)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(loss(y), x, create_graph=True)


def test_rounded_copies_take_the_factors_place_and_gradients_go_to_their_buffers() -> None:
    x, weight, bias, _, _, grad = numbers((33, 40, 72, 4), torch.bfloat16)
    down, up = (tensor.float().requires_grad_() for tensor in numbers((33, 40, 72, 4))[3:5])
    low = [factor.detach().bfloat16() for factor in (down, up)]
    lora_linear(x, weight, bias, down, up, 0.5).backward(grad)
    expected = [down.grad, up.grad]
    assert all(each.dtype == torch.float32 for each in expected), "not rounded to the inputs' dtype"
    down.grad = up.grad = None
    buffers = [torch.ones_like(factor) for factor in low]
    buffers = [buffer.float() for buffer in buffers]
    copies = [Rounded(values, buffer) for values, buffer in zip(low, buffers, strict=True)]
    y = lora_linear(x, weight, bias, down, up, 0.5, rounded_down=copies[0], rounded_up=copies[1])
    assert torch.equal(y, lora_linear(x, weight, bias, low[0], low[1], 0.5))
    y.backward(grad)
    assert down.grad is None and up.grad is None
    for buffer, right in zip(buffers, expected, strict=True):
        torch.testing.assert_close(buffer - 1, right, rtol=0, atol=4e-7 * float(right.abs().max() + 1))


def test_copies_written_between_forward_and_backward_are_refused() -> None:
    x, weight, bias, down, up, grad = numbers((5, 8, 6, 3))
    copies = [Rounded(tensor.clone()) for tensor in (down, up)]
    y = lora_linear(x.requires_grad_(), weight, bias, down, up, 0.5, rounded_down=copies[0], rounded_up=copies[1])
    copies[0].values.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_compiles_into_one_graph(dtype: torch.dtype) -> None:
    tensors = numbers((5, 8, 6, 3), dtype)
    compiled = torch.compile(lora_linear, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(gradients(compiled, tensors, 0.7), gradients(lora_linear, tensors, 0.7), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_operator_contract() -> None:
    x, weight, bias, down, up, grad = numbers((6, 8, 6, 3), torch.float32)
    for factor in (down, up):
        factor.requires_grad_()
    none = (None,) * 6  # rounded factors, the other tensors of a quantized weight, its format
    for inputs in (x, x.view(2, 3, 8), x.view(2, 3, 8).transpose(0, 1)):
        torch.library.opcheck(torch.ops.inweave.lora_linear.default, (inputs, weight, bias, down, up, 0.5, *none))
    plain_factors = (down.detach(), up.detach())
    for needed in ((True, True, True), (False, True, False), (True, False, False)):
        torch.library.opcheck(
            torch.ops.inweave.lora_linear_backward.default,
            (grad, x, x @ plain_factors[0].T, weight, *plain_factors, 0.5, *none, *needed),
        )


def test_selective_checkpointing_stores_the_output() -> None:
    tensors = numbers((5, 8, 6, 3))
    expected = gradients(lora_linear, tensors, 0.5)
    calls = 0
    plain_forward = reference.forward

    def amount(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal calls
        calls += 1
        return plain_forward(*arguments)

    def recomputed(*arguments: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(
            lambda *inputs: lora_linear(*inputs).clone(), *arguments, use_reentrant=False,
            context_fn=lambda: _contexts("selective", nullcontext),
        )  # fmt: skip
        return result

    reference.forward = amount  # type: ignore[assignment]
    try:
        ours = gradients(recomputed, tensors, 0.5)
    finally:
        reference.forward = plain_forward
    assert calls == 1, "the forward pass ran once"
    assert all(torch.equal(one, two) for one, two in zip(ours, expected, strict=True))


def side_by_side(shape: tuple[int, int, int, int], count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, W, b, down, up, dY of several layers of one input."""
    layers = [numbers(shape, dtype, seed) for seed in range(count)]
    _, *stacked, _ = (torch.cat(tensors) for tensors in zip(*layers, strict=True))
    return [layers[0][0], *stacked, torch.cat([layer[-1] for layer in layers], 1)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_layers_of_one_input_are_one_operation(dtype: torch.dtype) -> None:
    tensors = side_by_side((7, 8, 6, 3), 3, dtype)
    y, of_x, of_down, of_up = gradients(lora_linear, tensors, 0.7)
    x, weight, bias, down, up, grad = tensors
    apart = [
        gradients(lora_linear, [x, *parts, part], 0.7)
        for *parts, part in zip(
            weight.split(6), bias.split(6), down.split(3), up.split(6), grad.split(6, 1), strict=True
        )
    ]
    together = [torch.cat([one[0] for one in apart], 1), sum(one[1] for one in apart)]
    together += [torch.cat([one[at] for one in apart]) for at in (2, 3)]
    for ours, theirs in zip((y, of_x, of_down, of_up), together, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=4 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


def test_layers_of_one_input_are_one_operation_when_compiled() -> None:
    tensors = side_by_side((7, 8, 6, 3), 3, torch.float32)
    compiled = torch.compile(lora_linear, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(gradients(compiled, tensors, 0.7), gradients(lora_linear, tensors, 0.7), strict=True):
        torch.testing.assert_close(ours, theirs)


def interpreted() -> dict[str, float]:
    """Run in a process of its own: what Triton's decorators make is decided when they run."""

    from inweave.ops.linear import triton as kernel

    worst: dict[str, float] = {}

    def record(name: str, ours: torch.Tensor, exact: torch.Tensor) -> None:
        error = float((ours.double() - exact.double()).norm() / exact.double().norm())
        worst[name] = max(worst.get(name, 0.0), error)

    shapes = ((5, 8, 6, 3), (33, 40, 72, 20), (150, 24, 40, 4), (37, 40, 24, 5))
    for shape, count, dtype in product(shapes, (1, 3), (torch.float32, torch.float16)):
        x, _, bias, down, up, _ = side_by_side(shape, count, dtype)
        hidden = x @ down.T
        for own_bias in (bias, None):
            parts = zip(hidden.double().chunk(count, 1), up.double().chunk(count), strict=True)
            exact = 0.7 * torch.cat([s @ factor.T for s, factor in parts], 1)
            exact = exact if own_bias is None else exact + own_bias.double()
            record(f"output {dtype}", kernel.adapter_output(hidden, up, own_bias, 0.7), exact)
    for shape, splits, dtype in product(shapes, (1, 2), (torch.float32, torch.float16)):
        x, _, _, down, up, grad = numbers(shape, dtype)
        division = kernel.tile_sizes(shape[0], shape[2], shape[1], shape[3])
        division = division._replace(splits=splits, block_depth=32, rows=32)
        hidden = x @ down.T
        for saved, fresh, of_x in ((None, True, True), (hidden, False, True), (hidden, False, False)):
            ours, theirs = ([torch.ones(factor.shape) for factor in (down, up)] for _ in range(2))
            if fresh:
                theirs = [torch.zeros_like(total) for total in theirs]
            options: dict[str, Any] = {"grad_x": of_x, "grad_down": ours[0], "grad_up": ours[1], "fresh": fresh}
            one = kernel.backward(grad, x, saved, down, up, 0.7, **options, sizes=division)
            wide: Any = [tensor.double() for tensor in (grad, x, down, up)]
            two = reference.backward(
                wide[0], wide[1], None, None, wide[2], wide[3], 0.7, grad_x=of_x, grad_down=theirs[0], grad_up=theirs[1]
            )
            record(f"down {dtype}", ours[0], theirs[0])
            record(f"up {dtype}", ours[1], theirs[1])
            assert (one is None) == (two is None)
            if one is not None and two is not None:
                record(f"x {dtype}", one, two)
    return worst


def test_kernels_agree_with_float64_in_the_interpreter() -> None:
    worst = run_interpreted(__name__)
    assert len(worst) == 8
    for name, error in worst.items():  # S, dS and dX are rounded once each; sums of 150 numbers at most are in float32
        assert error <= 2 * torch.finfo(torch.float16 if "16" in name else torch.float32).eps, name


@pytest.mark.parametrize("rank", [16, 32])
def test_kernels_compile_for_a_gpu(rank: int) -> None:
    """The interpreter lets a name have two types, and a compiler does not."""
    pytest.importorskip("triton")
    from inweave.ops.linear import triton as kernel
    from tests.unit.ops.compiling import compiled_size

    sizes = kernel.tile_sizes(1024, 1280, 1280, rank)
    common = {"RANK": sizes.rank, "PRECISION": "tf32"}
    assert compiled_size(kernel._inner_kernel, {**common, "BLOCK": sizes.block_rows, "DEPTH": sizes.block_depth}) > 1000
    tiles = {"ROWS": sizes.rows, "COLUMNS": sizes.columns}
    names = ("OF_X", "OF_DOWN", "ADD", "SPLIT", "EVICTION")
    for flags in (
        (True, True, True, False, ""),
        (False, True, False, True, ""),
        (True, False, True, False, ""),
        (True, True, False, True, "evict_first"),
    ):
        options = dict(zip(names, flags, strict=True))
        assert compiled_size(kernel._column_kernel, {**common, **tiles, **options}) > 1000
    for bias, count in product((True, False), (1, 3)):
        options = {"COUNT": count, "BIAS": bias, "ROWS": kernel._ROWS, "COLUMNS": kernel._COLUMNS}
        assert compiled_size(kernel._output_kernel, {**common, **options}) > 1000
    assert compiled_size(kernel._sum_kernel, {"ADD": True, "SPLITS": 2, "BLOCK": kernel._SUM_BLOCK}) > 1000


def test_the_gradients_of_an_adapter_are_those_of_autograd_and_other_shapes_are_refused() -> None:
    import inweave

    torch.manual_seed(0)
    x, down, up = (torch.randn(*shape, requires_grad=True) for shape in ((2, 5, 8), (3, 8), (6, 3)))
    grad = torch.randn(2, 5, 6)
    expected = torch.autograd.grad((0.5 * (x @ down.T) @ up.T), (x, down, up), grad)
    for ours, theirs in zip(inweave.lora_backward(grad, x, down, up, 0.5), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    for wrong in (
        (grad[..., :5], x, down, up),
        (grad, x, down.T, up),
        (grad, x, down, up.T),
        (grad.double(), x, down, up),
    ):
        with pytest.raises(inweave.ConfigError, match="lora_backward: expected x"):
            inweave.lora_backward(*wrong, 0.5)
