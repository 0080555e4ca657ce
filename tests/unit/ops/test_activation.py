"""GEGLU: the reference and Triton's kernel against float64, and what autograd stores for it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.unit.ops.interpreter import run_interpreted  # noqa: E402
from tests.unit.ops.test_norm import assert_as_exact  # noqa: E402
from torch.nn import functional  # noqa: E402

from inweave.ops.activation import geglu, reference  # noqa: E402

SHAPES = [(3, 2), (5, 34), (2, 2560)]


def inputs(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
    return x.to(dtype), torch.randn(shape[0], shape[1] // 2, generator=generator, dtype=torch.float64).to(dtype)


def by_torch(x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    a, b = x.chunk(2, -1)
    y = a * functional.gelu(b)
    y.backward(dy)
    return [y.detach(), x.grad]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_reference_is_as_exact_as_torch(dtype: torch.dtype) -> None:
    assert check_all(reference, [dtype]) > 1000


def interpreted() -> int:
    """What the other process runs: the kernel in the interpreter."""
    from inweave.ops.activation import triton as kernel

    return check_all(kernel, [torch.float32, torch.float16])


def test_the_kernel_is_as_exact_as_torch_in_the_interpreter() -> None:
    assert run_interpreted(__name__) > 2000


def test_autograd_agrees_and_stores_the_input_alone() -> None:
    x, dy = inputs((6, 34), torch.float64)
    x = x.view(2, 3, 34).requires_grad_()
    assert torch.autograd.gradcheck(geglu, [x[:1, :2]], fast_mode=True)
    stored: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: stored.append(tensor) or tensor, lambda tensor: tensor
    ):
        y = geglu(x)
    assert y.shape == (2, 3, 17)
    assert [tensor.data_ptr() for tensor in stored] == [x.data_ptr()]
    y.backward(dy.view(2, 3, 17))
    assert torch.allclose(x.grad.view(6, 34), by_torch(x.detach().view(6, 34), dy)[1], rtol=1e-12, atol=1e-12)


def test_a_compiled_region_computes_the_same() -> None:
    x, _ = inputs((4, 20), torch.float64)
    assert torch.allclose(torch.compile(geglu, backend="aot_eager", fullgraph=True)(x), geglu(x), rtol=1e-12)


def test_kernels_compile_for_a_gpu() -> None:
    from tests.unit.ops.compiling import compiled_size

    from inweave.ops.activation import triton as kernel

    assert compiled_size(kernel._geglu_kernel, {"BLOCK": 128}) > 1000
    assert compiled_size(kernel._geglu_gradient_kernel, {"BLOCK": 128}) > 1000
