"""GEGLU and the tanh GELU: references and Triton's kernels against float64, and the tensors that autograd saves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from inweave.ops.activation import geglu, reference, tanh_gelu
from tests.unit.ops.interpreter import run_interpreted
from tests.unit.ops.saving import saved_tensors
from tests.unit.ops.test_group_norm import assert_as_exact

SHAPES = [(3, 2), (5, 34), (2, 2560)]
#: (rows, width, columns on the left)
GELU_SHAPES = [(7, 1, 0), (5, 34, 0), (3, 40, 24), (4, 2080, 1), (2, 4096, 2050)]


def inputs(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
    return x.to(dtype), torch.randn(shape[0], shape[1] // 2, generator=generator, dtype=torch.float64).to(dtype)


def by_torch(x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    a, b = x.chunk(2, -1)
    y = a * functional.gelu(b)
    return [y.detach(), *torch.autograd.grad(y, x, dy)]


def check_all(work: Any, dtypes: list[torch.dtype]) -> int:
    """Compare with torch's own in every dtype, against float64; returns how many numbers were compared."""
    count = 0
    for dtype in dtypes:
        for shape in SHAPES:
            x, dy = inputs(shape, dtype)
            truth, theirs = by_torch(x.double(), dy.double()), by_torch(x, dy)
            mine = [work.geglu(x), work.geglu_backward(dy, x)]
            assert all(result.dtype == dtype for result in mine)
            assert_as_exact(mine, theirs, truth, dtype, shape)
            count += sum(result.numel() for result in mine)
    return count


def gelu_inputs(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """x, what is on its left or None, and the gradient of the result."""
    rows, width, columns = shape
    generator = torch.Generator().manual_seed(sum(shape))
    x, left, dy = (
        torch.randn(rows, size, generator=generator, dtype=torch.float64).to(device, dtype)
        for size in (width, columns, columns + width)
    )
    x *= torch.tensor([1.0, 3.0, 9.0], dtype=dtype, device=device)[torch.arange(width, device=device) % 3]
    return x, left if columns else None, dy


def gelu_by_torch(x: torch.Tensor, left: torch.Tensor | None, dy: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = functional.gelu(x, approximate="tanh")
    y = y if left is None else torch.cat((left, y), -1)
    return [y.detach(), *torch.autograd.grad(y, x, dy)]


def check_gelu(work: Any, dtypes: list[torch.dtype], shapes: list[tuple[int, int, int]], device: str = "cpu") -> int:
    """The same for the GELU with tanh; what is on its left is copied, and so is its gradient."""
    count = 0
    for dtype in dtypes:
        for shape in shapes:
            x, left, dy = gelu_inputs(shape, dtype, device)
            truth = gelu_by_torch(x.double(), None if left is None else left.double(), dy.double())
            y = work.tanh_gelu(x, left)
            dx, dleft = work.tanh_gelu_backward(dy, x, True, left is not None)
            assert y.is_contiguous() and dx.is_contiguous() and y.dtype == dx.dtype == dtype
            columns = shape[2]
            if left is not None:
                assert dleft.is_contiguous() and torch.equal(dleft, dy[:, :columns])
                assert torch.equal(y[:, :columns], left)
                for of_x, of_left in ((True, False), (False, True)):  # one at a time, the same bits
                    some = work.tanh_gelu_backward(dy, x, of_x, of_left)
                    assert [grad is not None for grad in some] == [of_x, of_left]
                    assert torch.equal(some[0] if of_x else some[1], dx if of_x else dleft)
            assert work.tanh_gelu_backward(dy, x, False, False) == (None, None)
            mine, theirs = [y[:, columns:], dx], gelu_by_torch(x, left, dy)
            theirs[0], truth[0] = theirs[0][:, columns:], truth[0][:, columns:]
            assert_as_exact(mine, theirs, truth, dtype, shape)
            count += sum(result.numel() for result in mine)
    return count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_reference_is_as_exact_as_torch(dtype: torch.dtype) -> None:
    assert check_all(reference, [dtype]) > 1000
    assert check_gelu(reference, [dtype], GELU_SHAPES) > 10_000


def interpreted() -> list[int]:
    """What the other process runs: the kernels in the interpreter."""
    from inweave.ops.activation import triton as kernel

    dtypes = [torch.float32, torch.float16]
    return [
        check_all(kernel, dtypes),
        check_gelu(kernel, [*dtypes, torch.bfloat16], GELU_SHAPES),
        check_tails(kernel, "cpu"),
    ]


def test_the_kernels_are_as_exact_as_torch_in_the_interpreter() -> None:
    gated, plain, tails = run_interpreted(__name__)
    assert gated > 2000 and plain > 30_000 and tails > 100


def check_tails(work: Any, device: str) -> int:
    """Far from 0, where 1 + tanh has no digits left, every number is right; so are huge ones, where z overflows."""
    count = 0
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.linspace(-9, 9, 181).to(device, dtype)[None]
        wide = x.double().requires_grad_()
        truth = wide * torch.sigmoid((8 / math.pi) ** 0.5 * (wide + 0.044715 * wide**3))
        (slopes,) = torch.autograd.grad(truth.sum(), wide)
        y, (dx, _) = work.tanh_gelu(x, None), work.tanh_gelu_backward(torch.ones_like(x), x, True, False)
        rtol = max(
            3e-5, torch.finfo(dtype).eps
        )  # of 66, the largest |z|, 3e-5 are 4 units of the last place of float32
        torch.testing.assert_close(y.double(), truth.detach(), rtol=rtol, atol=0)
        torch.testing.assert_close(dx[:, :60].double(), slopes[:, :60], rtol=rtol, atol=0)
        torch.testing.assert_close(dx[:, 60:].double(), slopes[:, 60:], rtol=rtol, atol=1e-6)  # the slope is 0 at -0.75
        huge = torch.tensor([[1e30, -1e30, 3e18, -3e18]], device=device, dtype=dtype)
        assert torch.equal(work.tanh_gelu(huge, None), huge.clamp(min=0.0))
        count += y.numel()
    return count


def test_the_reference_keeps_digits_far_from_0() -> None:
    check_tails(reference, "cpu")


def test_autograd_agrees_and_stores_the_input_alone() -> None:
    x, dy = inputs((6, 34), torch.float64)
    x = x.view(2, 3, 34).requires_grad_()
    assert torch.autograd.gradcheck(geglu, [x[:1, :2]], fast_mode=True)
    with saved_tensors() as stored:
        y = geglu(x)
    assert y.shape == (2, 3, 17)
    assert [tensor.data_ptr() for tensor in stored] == [x.data_ptr()]
    y.backward(dy.view(2, 3, 17))
    assert torch.allclose(x.grad.view(6, 34), by_torch(x.detach().view(6, 34), dy)[1], rtol=1e-12, atol=1e-12)


def test_a_compiled_region_computes_the_same() -> None:
    x, _ = inputs((4, 20), torch.float64)
    assert torch.allclose(torch.compile(geglu, backend="aot_eager", fullgraph=True)(x), geglu(x), rtol=1e-12)


@pytest.mark.parametrize("columns", [0, 5])
def test_autograd_of_the_gelu_agrees_and_stores_the_input_alone(columns: int) -> None:
    x, left, dy = gelu_inputs((6, 17, columns), torch.float64)
    x, dy, left = x.unflatten(0, (2, 3)), dy.unflatten(0, (2, 3)), None if left is None else left.unflatten(0, (2, 3))
    leaves = [each.requires_grad_() for each in (x, left) if each is not None]
    assert torch.autograd.gradcheck(tanh_gelu, leaves, fast_mode=True)
    with saved_tensors() as stored:
        y = tanh_gelu(x, left)
    assert [tensor.data_ptr() for tensor in stored] == [x.data_ptr()] and y.shape == (2, 3, columns + 17)
    plain = functional.gelu(x, approximate="tanh")
    plain = plain if left is None else torch.cat((left, plain), -1)
    torch.testing.assert_close(y, plain, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(each, leaves, dy) for each in (y, plain)]
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_a_gradient_that_nobody_needs_is_not_computed() -> None:
    x, left, dy = gelu_inputs((4, 6, 3), torch.float32)
    assert left is not None
    for of_x, of_left in ((True, False), (False, True)):
        one, two = x.clone().requires_grad_(of_x), left.clone().requires_grad_(of_left)
        tanh_gelu(one, two).backward(dy)
        assert (one.grad is not None, two.grad is not None) == (of_x, of_left)


def test_a_matrix_of_another_dtype_on_the_left_is_joined_as_torch_does() -> None:
    x, left, _ = gelu_inputs((4, 6, 3), torch.bfloat16)
    assert left is not None
    y = tanh_gelu(x, left.float())
    assert y.dtype == torch.float32 and torch.equal(y[:, 3:].bfloat16(), functional.gelu(x, approximate="tanh"))
    with pytest.raises(ValueError, match=r"\(3, 3\) is left of \(4, 6\)"):
        tanh_gelu(x, left[:3])


def test_a_gelu_that_is_changed_in_place_and_sizes_without_numbers() -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    (2 * functional.gelu(x, approximate="tanh")).sum().backward()
    expected, x.grad = x.grad, None
    y = tanh_gelu(x)
    y.mul_(2)
    y.sum().backward()
    torch.testing.assert_close(x.grad, expected)
    for shape in ((0, 4), (3, 0), (2, 0, 4), ()):
        x = torch.randn(shape, requires_grad=True)
        y = tanh_gelu(x)
        y.sum().backward()
        assert y.shape == x.shape and x.grad is not None and x.grad.shape == x.shape
    assert tanh_gelu(torch.randn(3, 4), torch.randn(3, 0)).shape == (3, 4)


def test_a_second_derivative_is_refused() -> None:
    """A kernel's gradient has no history: terms would be missing without a word."""
    x = torch.randn(3, 8, requires_grad=True)
    for work in (tanh_gelu, geglu):
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(work(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("columns", [0, 5])
def test_a_compiled_region_calls_the_operator(columns: int) -> None:
    x, left, dy = gelu_inputs((6, 16, columns), torch.float32)
    leaves = [each.requires_grad_() for each in (x, left) if each is not None]
    torch.library.opcheck(torch.ops.inweave.tanh_gelu.default, (x, left))

    def function(*leaves: torch.Tensor) -> torch.Tensor:
        return tanh_gelu(*leaves) * 2.0

    plain, fast = function(*leaves), torch.compile(function, backend="aot_eager", fullgraph=True)(*leaves)
    assert torch.equal(plain, fast)
    grads = [torch.autograd.grad(y, leaves, dy) for y in (plain, fast)]
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))


def test_the_meta_device_allocates_what_the_kernels_do() -> None:
    x, left, dy = (torch.empty(2, 3, size, dtype=torch.bfloat16, device="meta") for size in (16, 5, 21))
    leaves = [x.requires_grad_(), left.requires_grad_()]
    y = tanh_gelu(*leaves)
    y.backward(dy)
    assert y.shape == dy.shape and y.is_contiguous() and y.dtype == torch.bfloat16
    assert all(leaf.grad.shape == leaf.shape and leaf.grad.is_contiguous() for leaf in leaves)


@pytest.mark.parametrize(("width", "columns"), [(12288, 3072), (9728, 0)], ids=["flux", "sd3.5-large"])
def test_gelu_kernels_compile_for_a_gpu_and_read_16_bytes_at_once(width: int, columns: int) -> None:
    """Machine code for a Hopper GPU: the interpreter lets a name have two types, a compiler does not."""
    from inweave.ops.activation import triton as kernel
    from tests.unit.ops.compiling import compiled_code

    left, blocks = kernel._blocks(columns, width)
    sizes = {"BLOCKS": blocks, "LEFT_BLOCKS": left, "BLOCK": kernel._GELU_BLOCK}
    loads = kernel._GELU_BLOCK // (8 * 32 * kernel._GELU_WARPS)  # of 8 numbers
    for function, more, inputs in (
        (kernel._tanh_gelu_kernel, {}, 1),
        (kernel._tanh_gelu_gradient_kernel, {"FIRST_BLOCK": 0}, 2),
    ):
        code = compiled_code(function, sizes | more, warps=kernel._GELU_WARPS, aligned=True)
        assert len(code["cubin"]) > 1000
        copies = loads if columns else 0
        assert code["ptx"].count("ld.global.v4.b32") == loads * inputs + copies
        assert code["ptx"].count("st.global.v4.b32") == loads + copies


def test_kernels_compile_for_a_gpu() -> None:
    from inweave.ops.activation import triton as kernel
    from tests.unit.ops.compiling import compiled_size

    assert compiled_size(kernel._geglu_kernel, {"BLOCK": 128}) > 1000
    assert compiled_size(kernel._geglu_gradient_kernel, {"BLOCK": 128}) > 1000
