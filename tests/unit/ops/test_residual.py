"""The sum at the end of a residual block: reference and kernel against float64, gradients, compiled regions."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from inweave.ops.residual import reference, residual_sum
from tests.unit.ops.interpreter import run_interpreted
from tests.unit.ops.test_group_norm import assert_as_exact, channels_last, values

SHAPES = [(1, 1, 3), (2, 35, 6), (3, 49, 320)]  # batch, positions, channels


def inputs(shape: tuple[int, int, int], count: int, dtype: torch.dtype) -> tuple[Any, Any, list[Any]]:
    """Both images and the biases."""
    a, b = (values(*shape, dtype=dtype, seed=seed) for seed in range(2))
    return a, b, [values(shape[-1], dtype=dtype, seed=2 + number) for number in range(count)]


def check_all(work: Any, dtypes: list[torch.dtype]) -> int:
    """Compare with one sum after the other, against float64; returns how many numbers were compared."""
    compared = 0
    for dtype, shape, count in product(dtypes, SHAPES, (1, 2)):
        a, b, biases = inputs(shape, count, dtype)
        truth = a.double() + b.double() + sum(bias.double() for bias in biases)
        theirs = a
        for each in (b, *biases):
            theirs = theirs + each
        mine = work.residual_sum(a, b, biases)
        assert mine.dtype == dtype
        assert_as_exact([mine], [theirs], [truth], dtype, shape, count)
        compared += mine.numel()
    return compared


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_reference_is_as_exact_as_torch(dtype: torch.dtype) -> None:
    assert check_all(reference, [dtype]) > 10_000


def interpreted() -> int:
    """What the other process runs: the kernel in the interpreter."""
    from inweave.ops.residual import triton as kernel

    return check_all(kernel, [torch.float32, torch.float16])


def test_the_kernel_is_as_exact_as_torch_in_the_interpreter() -> None:
    assert run_interpreted(__name__) > 20_000


@pytest.mark.parametrize("count", [0, 1, 2])
def test_sum_and_gradients_are_those_of_plain_additions(count: int) -> None:
    a, b = (channels_last(values(2, 6, 5, 7, dtype=torch.float64, seed=seed)).requires_grad_() for seed in range(2))
    biases = [None, *(values(6, dtype=torch.float64, seed=2 + number) for number in range(count))]
    y = residual_sum(a, b, *biases)
    assert torch.allclose(y, a + b + sum(bias[:, None, None] for bias in biases if bias is not None), atol=1e-15)
    assert y.is_contiguous(memory_format=torch.channels_last)
    wider = values(2, 12, 5, 7, dtype=torch.float64, seed=9)
    of_a, of_b = torch.autograd.grad(y, (a, b), wider[:, :6])  # a slice of channels, as a concatenation has it
    assert torch.equal(of_a, wider[:, :6]) and torch.equal(of_b, of_a)
    assert of_a.is_contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(residual_sum, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(a, b, *biases), y, atol=1e-15)


def test_of_two_dtypes_the_result_has_the_wider_one() -> None:
    a, b = (channels_last(values(2, 6, 5, 7, dtype=dtype, seed=1)) for dtype in (torch.bfloat16, torch.float32))
    bias = values(6, dtype=torch.float32, seed=2)
    assert residual_sum(a, b, bias).dtype == residual_sum(b, a, bias).dtype == torch.float32
    assert torch.equal(residual_sum(a, b, bias), a + b + bias[:, None, None])


def test_the_kernel_compiles_for_a_gpu() -> None:
    from inweave.ops.residual import triton as kernel
    from tests.unit.ops.compiling import compiled_size

    for count in (1, 2):
        assert compiled_size(kernel._residual_sum_kernel, {"CHANNELS": 320, "BIASES": count, "BLOCK": 2048}) > 1000
