"""Products in parts of their rows: where they are divided, and that a division changes no result."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from inweave.ops import products
from inweave.ops.frozen_linear import FrozenLinear, frozen_linear


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "first"),
    [
        (4608, 3072, 15360, 4224),  # 432 tiles: three rounds of 132, and 36 tiles that would take a fourth
        (4096, 3072, 3072, 0),  # 384 tiles: the third round is nearly full
        (4608, 3072, 512, 0),  # a tile of so short a sum takes no time
        (128, 256, 4096, 0),  # fewer tiles than multiprocessors: no round is whole
        (4096, 1280, 10240, 3328),
    ],
)
def test_rows_of_whole_rounds(rows: int, columns: int, depth: int, first: int) -> None:
    assert products.whole_rounds(rows, columns, depth, 132) == first


def test_a_first_part_fills_whole_rounds() -> None:
    """But for tiles that do not make a whole row of them."""
    divisions = 0
    for rows in range(100, 20_000, 377):
        for columns in (640, 1280, 2432, 3072, 5120, 9216):
            first = products.whole_rounds(rows, columns, 4096, 132)
            across = -(-columns // 256)
            if first:
                full = -(-rows // 128) * across // 132 * 132
                assert first % 128 == 0 and first < rows and full - across < first // 128 * across <= full
                divisions += 1
    assert 20 < divisions < 300


@pytest.mark.parametrize("bias", [True, False])
def test_parts_are_the_whole(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    left, weight, total = torch.randn(70, 30), torch.randn(50, 30), torch.randn(70, 50)
    added = torch.randn(50) if bias else None
    whole = products.multiply(left, weight.T, added)
    both = products.add_product(total.clone(), left, weight.T)
    sizes: list[int] = []

    def first_rows(left: torch.Tensor, right: torch.Tensor) -> int:
        sizes.append(left.shape[0])
        return 64

    monkeypatch.setattr(products, "_first_rows", first_rows)
    assert torch.allclose(products.multiply(left, weight.T, added), whole, atol=1e-5)
    assert torch.allclose(products.add_product(total.clone(), left, weight.T), both, atol=1e-5)
    assert torch.allclose(whole, functional.linear(left, weight, added), atol=1e-5) and sizes


def test_the_operator_has_the_gradient_of_a_linear_layer() -> None:
    x, weight, bias = torch.randn(2, 7, 30, requires_grad=True), torch.randn(50, 30), torch.randn(50)
    ours = torch.ops.inweave.frozen_linear(x, weight, bias)
    plain = functional.linear(x, weight, bias)
    grad = torch.randn_like(plain)
    assert torch.allclose(ours, plain, atol=1e-5)
    mine, theirs = (torch.autograd.grad(y, x, grad)[0] for y in (ours, plain))
    assert torch.allclose(mine, theirs, atol=1e-5)
    torch.library.opcheck(torch.ops.inweave.frozen_linear, (x, weight, bias))
    torch.library.opcheck(torch.ops.inweave.frozen_linear_backward, (grad, weight))


def test_a_trained_weight_has_its_gradient() -> None:
    layer = FrozenLinear(30, 50)
    layer(torch.randn(4, 30)).sum().backward()
    assert layer.weight.grad is not None and layer.bias.grad is not None
    assert frozen_linear(torch.randn(0, 30), layer.weight, None).shape == (0, 50)
