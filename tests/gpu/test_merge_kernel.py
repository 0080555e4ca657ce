"""The grouped merge on a real GPU: equal to a float64 reference, on ragged sizes, ranks 1 to 128, beyond 2^31."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from inweave.ops.merge import reference  # noqa: E402
from inweave.ops.merge import triton as kernel  # noqa: E402
from inweave.ops.merge.reference import Product, WeightUpdate  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RANKS = [(1,), (4, 16), (32,), (128,), (5, 33, 64), (32,) * 5, ()]
#: (dtype of the weight, of the factors, ranks): ragged ranks in every pair, the others where both have one dtype
CASES = [
    (dtype, factor, ranks)
    for dtype in DTYPES
    for factor in DTYPES
    for ranks in RANKS
    if dtype == factor or len(ranks) == 3
]
SHAPES = [(1, 1), (7, 3), (64, 64), (129, 65), (128, 256), (320, 2880), (1000, 999), (2, 5000), (3072, 64)]


def make_targets(dtype: torch.dtype, factor: torch.dtype, ranks: tuple[int, ...], shapes=SHAPES) -> list[WeightUpdate]:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    targets = []
    for rows, columns in shapes:
        base = torch.randn(rows, columns, device="cuda").to(dtype)
        products = tuple(
            Product(
                (torch.randn(rows, r, device="cuda") * 0.1).to(factor),
                (torch.randn(r, columns, device="cuda") * 0.1).to(factor),
                0.7 * (-1) ** i + 0.1 * i,
            )
            for i, r in enumerate(ranks)
        )
        targets.append(WeightUpdate(base, torch.full_like(base, 9.0), products))
    return targets


def worst(targets: list[WeightUpdate]) -> tuple[float, float]:
    """(kernel's, plain torch's) largest error against float64, in units of the dtype's epsilon at that value."""
    ours = theirs = 0.0
    for t in targets:
        exact = t.base.double()
        for p in t.products:
            exact = exact + p.scale * (p.up.double() @ p.down.double())
        plain = WeightUpdate(t.base, torch.empty_like(t.base), t.products)
        reference.merge_products([plain])
        ulp = torch.finfo(t.base.dtype).eps * exact.abs().clamp_min(1e-3)
        ours = max(ours, float(((t.out.double() - exact).abs() / ulp).max()))
        theirs = max(theirs, float(((plain.out.double() - exact).abs() / ulp).max()))
    return ours, theirs


@pytest.mark.parametrize(("dtype", "factor", "ranks"), CASES, ids=str)
def test_equals_the_reference(dtype: torch.dtype, factor: torch.dtype, ranks: tuple[int, ...]) -> None:
    targets = make_targets(dtype, factor, ranks)
    kernel.merge_products(targets)
    ours, theirs = worst(targets)
    assert ours <= 2 * max(theirs, 0.5), (ours, theirs)


def test_hundreds_of_layers_in_one_launch() -> None:
    targets = make_targets(torch.bfloat16, torch.bfloat16, (32,), shapes=[(640, 640), (1280, 640), (1280, 1280)] * 200)
    kernel.merge_products(targets)
    ours, theirs = worst(targets[::37])
    assert ours <= 2 * max(theirs, 0.5)


def test_in_place() -> None:
    targets = [WeightUpdate(t.base, t.base, t.products) for t in make_targets(torch.bfloat16, torch.bfloat16, (16,))]
    copies = [WeightUpdate(t.base.clone(), torch.empty_like(t.base), t.products) for t in targets]
    kernel.merge_products(copies)
    kernel.merge_products(targets)
    assert all(torch.equal(a.out, b.out) for a, b in zip(targets, copies, strict=True))


def test_offsets_beyond_two_to_the_31() -> None:
    """Weights 5 GB apart in one slab: 32-bit offsets would write elsewhere."""
    slab = torch.zeros(2**31 + 2**29, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros_like(slab)
    first, last = slab[: 256 * 256].view(256, 256), slab[-256 * 256 :].view(256, 256)
    first.normal_()
    last.normal_()
    targets = []
    for base, output in ((first, out[: 256 * 256]), (last, out[-256 * 256 :])):
        up, down = (torch.randn(s, device="cuda", dtype=torch.bfloat16) * 0.1 for s in ((256, 8), (8, 256)))
        targets.append(WeightUpdate(base, output.view(256, 256), (Product(up, down, 0.5),)))
    kernel.merge_products(targets)
    ours, theirs = worst(targets)
    assert ours <= 2 * max(theirs, 0.5)
    assert not out[256 * 256 : -256 * 256].any()


def test_one_huge_weight() -> None:
    """More than 2^31 elements in a single matrix."""
    rows, columns = 70_000, 40_000
    base = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    up = torch.ones(rows, 4, dtype=torch.bfloat16, device="cuda")
    down = torch.ones(4, columns, dtype=torch.bfloat16, device="cuda")
    kernel.merge_products([WeightUpdate(base, base, (Product(up, down, 0.5),))])
    assert bool((base[-1] == 2).all())
    assert bool((base[0] == 2).all())
    assert float(base[::997, ::991].float().mean()) == 2.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_that_are_not_finite_are_reported(dtype: torch.dtype) -> None:
    """Out of range in one tile of a large weight, in the last run of rows, and in a base that is itself infinite."""
    targets = make_targets(dtype, torch.float32, (16,))
    assert kernel.merge_products(targets) == []
    targets[5].base[200, 1000] = float("inf")
    one = targets[6]
    up, down = one.products[0].up, one.products[0].down
    up[-1], down[:, -1] = 1.0, 1.0
    targets[6] = WeightUpdate(one.base, one.out, (Product(up, down, torch.finfo(dtype).max),))
    assert kernel.merge_products(targets) == [5, 6]
    launch = kernel.PreparedMerge(targets)
    assert launch.run() == launch.run() == [5, 6]
    targets[5].base[200, 1000] = 1.0
    scales = torch.full((len(targets),), 0.5).double().numpy()
    launch.rescale(scales)
    assert launch.run() == []
