"""The grouped merge: the plain reference against the formula, and the kernel against it in Triton's interpreter.

bf16 is left to the GPU: the interpreter's bf16 products are wrong.
"""

from __future__ import annotations

import pytest
import torch

from inweave.ops.merge import Product, WeightUpdate, merge_products
from tests.unit.ops.interpreter import run_interpreted

SHAPES = [(1, 1), (7, 3), (64, 64), (130, 70), (33, 200)]
RANKS = [(), (1,), (16,), (5, 33), (70, 2, 3)]


def make_targets(dtype: torch.dtype, factor: torch.dtype) -> list[WeightUpdate]:
    torch.manual_seed(0)
    targets = []
    for (rows, columns), ranks in zip(SHAPES, RANKS, strict=True):
        base = torch.randn(rows, columns).to(dtype)
        products = tuple(
            Product((torch.randn(rows, r) * 0.3).to(factor), (torch.randn(r, columns) * 0.3).to(factor), 0.4 - 0.7 * i)
            for i, r in enumerate(ranks)
        )
        targets.append(WeightUpdate(base, torch.full_like(base, 9.0), products))
    return targets


def errors(targets: list[WeightUpdate]) -> list[float]:
    """Largest error of each target against float64, in units of the dtype's rounding at that size."""
    ratios = []
    for target in targets:
        exact = target.base.double()
        for product in target.products:
            exact = exact + product.scale * (product.up.double() @ product.down.double())
        unit = torch.finfo(target.base.dtype).eps * exact.abs().clamp_min(0.1)
        ratios.append(float(((target.out.double() - exact).abs() / unit).max()))
    return ratios


@pytest.mark.parametrize("factor", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reference_is_the_formula_rounded_once(dtype: torch.dtype, factor: torch.dtype) -> None:
    targets = make_targets(dtype, factor)
    merge_products(targets)
    limit = 0.51 if dtype != torch.float32 else 64  # half a unit is one rounding; float32 sums may stray a little
    assert max(errors(targets)) <= limit
    assert torch.equal(targets[0].out, targets[0].base), "no products restore the base"


def test_in_place_and_empty() -> None:
    targets = make_targets(torch.float32, torch.float32)
    again = [WeightUpdate(t.base.clone(), torch.empty_like(t.base), t.products) for t in targets]
    merge_products(again)
    merge_products([WeightUpdate(t.base, t.base, t.products) for t in targets])
    assert all(torch.equal(t.base, a.out) for t, a in zip(targets, again, strict=True))
    merge_products([])


def with_overflow(targets: list[WeightUpdate], dtype: torch.dtype) -> list[WeightUpdate]:
    """The same with results beyond the dtype in the third, and a base that is infinite in the last."""
    third, last = targets[2], targets[4]
    huge = torch.finfo(dtype).max
    products = tuple(Product(p.up.fill_(1), p.down.fill_(1), huge) for p in third.products)
    last.base[-1, -1] = float("inf")
    return [*targets[:2], WeightUpdate(third.base, third.out, products), targets[3], last]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_results_that_are_not_finite_are_reported(dtype: torch.dtype) -> None:
    assert merge_products(make_targets(dtype, dtype)) == []
    assert merge_products(with_overflow(make_targets(dtype, dtype), dtype)) == [2, 4]


def interpreted() -> dict[str, list[list[float]]]:
    """What the other process runs: the kernel in the interpreter; returns its errors."""
    from inweave.ops.merge import triton as kernel

    rows = {}
    for dtype in (torch.float32, torch.float16):
        for factor in (torch.float32, torch.float16):
            targets = make_targets(dtype, factor)
            kernel.merge_products(targets)
            plain = [WeightUpdate(t.base, torch.empty_like(t.base), t.products) for t in targets]
            merge_products(plain)
            rows[f"{dtype} {factor}"] = [errors(targets), errors(plain)]
    launch = kernel.PreparedMerge(make_targets(torch.float32, torch.float32)[3:4])
    launch.rescale(torch.zeros(2).numpy())
    launch.run()
    target = launch._keep[0]
    assert isinstance(target, WeightUpdate)
    rows["rescaled to nothing"] = [[float((target.out - target.base).abs().max())], [0.0]]
    for dtype in (torch.float32, torch.float16):
        targets = with_overflow(make_targets(dtype, dtype), dtype)
        assert kernel.merge_products(targets) == [2, 4], dtype
        launch = kernel.PreparedMerge(targets)
        assert launch.run() == launch.run() == [2, 4]
        launch.rescale(torch.zeros(sum(len(target.products) for target in targets)).numpy())
        assert launch.run() == [4]  # its base
    return rows


def test_kernel_equals_the_reference_in_the_interpreter() -> None:
    rows = run_interpreted(__name__)
    assert len(rows) == 5
    for name, (ours, plain) in rows.items():
        assert max(ours) <= 2 * max(*plain, 0.5), (name, ours, plain)
