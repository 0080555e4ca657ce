"""Low-rank products by rows: the reference and Triton's kernels against float64, one row and one slot at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from inweave.ops.rowwise import RowTable, SlotFactors, add_products, meta, reference
from tests.unit.ops.interpreter import run_interpreted

RANKS = (4, 0, 128, 33, 16)
#: (inputs, outputs, tokens)
SHAPES = [(40, 24, 1), (64, 130, 17), (129, 64, 70)]
#: slots and strengths of each row: none, one, several, a slot that leaves the layer alone, one slot at two strengths
ROWS: list[list[tuple[int, float]]] = [
    [], [(0, 0.7)], [(2, -1.3), (3, 0.5), (4, 1.0)], [(1, 1.0)], [(4, 0.2), (2, 2.0)], [(4, 0.9), (2, 2.0)],
]  # fmt: skip


def make_factors(inputs: int, outputs: int, dtype: torch.dtype, device: str = "cpu") -> SlotFactors:
    generator = torch.Generator().manual_seed(inputs)
    total = sum(RANKS)
    down, up = (torch.randn(total, size, generator=generator) * 0.1 for size in (inputs, outputs))
    spans, start = [], 0
    for number, rank in enumerate(RANKS):
        spans.append((start, rank, 0.25 * (number + 1)))
        start += rank
    places = torch.tensor([span[:2] for span in spans], dtype=torch.int32, device=device)
    scales = torch.tensor([span[2] for span in spans], device=device)
    return SlotFactors(down.to(device, dtype), up.to(device, dtype), places, scales, spans, max(RANKS))


def make_table(rows: list[list[tuple[int, float]]] = ROWS, device: str = "cpu") -> RowTable:
    table = RowTable(torch.device(device))
    table.fill(rows)
    return table


def make_inputs(shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    inputs, outputs, tokens = shape
    generator = torch.Generator().manual_seed(tokens)
    x, y = (torch.randn(len(ROWS), tokens, size, generator=generator) for size in (inputs, outputs))
    return x.to(device, dtype), y.to(device, dtype)


def exact(y: Tensor, x: Tensor, factors: SlotFactors) -> Tensor:
    """The formula in float64, with the inner values rounded as everywhere."""
    total = y.double().clone()
    for number, row in enumerate(ROWS):
        for slot, strength in row:
            start, rank, scale = factors.spans[slot]
            part = slice(start, start + rank)
            total[number] += strength * scale * (x[number].double() @ factors.down[part].double().T) @ (
                factors.up[part].double()
            )  # fmt: skip
    return total


def check(work: Any, dtypes: list[torch.dtype], device: str = "cpu") -> int:
    """Compare with float64: within two roundings, of the inner values and of the result."""
    count = 0
    for dtype in dtypes:
        for shape in SHAPES:
            factors, (x, y) = make_factors(*shape[:2], dtype, device), make_inputs(shape, dtype, device)
            before = y.clone()
            got = work.add_products(y, x, factors, make_table(device=device))
            truth = exact(y, x, factors)
            assert got.dtype == dtype and got.shape == y.shape and torch.equal(y, before), "y is left alone"
            eps = torch.finfo(dtype).eps
            assert float((got.double() - truth).abs().max()) < 4 * eps * float(truth.abs().max()), (dtype, shape)
            assert torch.equal(got[[0, 3]], y[[0, 3]]), "rows without a change keep their bits"
            assert not torch.equal(got[4], got[5])
            count += got.numel()
    return count


def check_convolution(work: Any, dtype: torch.dtype, device: str = "cpu") -> int:
    """The inner values of a convolution, and outputs in either memory layout."""
    count = 0
    for layout in (torch.contiguous_format, torch.channels_last):
        generator = torch.Generator().manual_seed(3)
        factors = make_factors(6 * 9, 20, dtype, device)
        x = torch.randn(len(ROWS), 6, 7, 5, generator=generator).to(device, dtype).to(memory_format=layout)
        y = torch.randn(len(ROWS), 20, 4, 3, generator=generator).to(device, dtype).to(memory_format=layout)

        def inner(rows: Tensor, down: Tensor) -> Tensor:
            return functional.conv2d(rows, down.view(-1, 6, 3, 3), None, 2, 1).flatten(2).transpose(1, 2)

        tokens = y.flatten(2).transpose(1, 2)
        got = work.add_products(tokens, x, factors, make_table(device=device), inner)
        columns = functional.unfold(x.double(), 3, padding=1, stride=2).transpose(1, 2)
        truth = exact(tokens, columns, factors)
        error = float((got.double() - truth).abs().max()) / float(truth.abs().max())
        assert error < 4 * torch.finfo(dtype).eps, error
        count += got.numel()
    return count


def check_isolation(work: Any, dtype: torch.dtype, device: str = "cpu") -> int:
    """A NaN of a row, and the infinities of a slot, reach no other row, whose bits stay."""
    factors, (x, y) = make_factors(64, 130, dtype, device), make_inputs(SHAPES[1], dtype, device)
    good = work.add_products(y, x, factors, make_table(device=device))
    x[1] = float("nan")
    factors.down[factors.spans[3][0]] = float("inf")  # of slot 3, which row 2 alone has
    got = work.add_products(y, x, factors, make_table(device=device))
    others = [0, 3, 4, 5]
    assert torch.equal(got[others], good[others])
    assert bool(got[1].isnan().all()) and not bool(got[2].isfinite().all())
    return got.numel()


def test_reference() -> None:
    assert check(reference, [torch.float32, torch.float16, torch.bfloat16]) > 0
    assert check_convolution(reference, torch.float32) > 0
    assert check_isolation(reference, torch.float32) > 0


def interpreted() -> list[int]:
    from inweave.ops.rowwise import triton

    dtypes = [torch.float32, torch.float16]
    return [check(triton, dtypes), check_convolution(triton, torch.float32), check_isolation(triton, torch.float32)]


def test_kernels_in_the_interpreter() -> None:
    assert min(run_interpreted("tests.unit.ops.test_rowwise")) > 0


def test_the_reference_computes_on_the_cpu_and_meta_allocates() -> None:
    factors, (x, y) = make_factors(64, 130, torch.float32), make_inputs(SHAPES[1], torch.float32)
    assert torch.equal(add_products(y, x, factors, make_table()), reference.add_products(y, x, factors, make_table()))
    empty = factors._replace(down=factors.down.to("meta"), up=factors.up.to("meta"))
    shaped = add_products(y.to("meta"), x.to("meta"), empty, make_table())
    assert shaped.is_meta and shaped.shape == y.shape
    assert meta.add_products(y.to("meta"), x.to("meta"), empty, make_table()).shape == y.shape


def test_a_table_keeps_its_addresses_while_it_is_large_enough() -> None:
    table = make_table()
    places = table.slots.data_ptr(), table.strengths.data_ptr()
    assert not table.fill([[(3, 0.5)], [(1, 1.0)]])
    assert (table.slots.data_ptr(), table.strengths.data_ptr()) == places
    assert table.slots[:2, 0].tolist() == [3, 1] and int((table.slots >= 0).sum()) == 2
    assert [(run.first, run.last, run.slot) for run in table.runs] == [(0, 1, 3), (1, 2, 1)]
    assert table.fill([[(0, 1.0)] * 5] * 7) and not table.fill([[(0, 1.0)] * 5] * 7)
    assert table.slots.shape == (64, 8) and len(table.runs) == 5


@pytest.mark.parametrize(
    ("rows", "runs"),
    [
        ([[], []], []),
        ([[(1, 0.5)], [(1, 0.7)], [], [(1, 0.5)]], [(0, 2, 1, (0.5, 0.7)), (3, 4, 1, (0.5,))]),
        ([[(1, 1.0), (2, 1.0)], [(3, 1.0), (2, 0.5)]], [(0, 1, 1, (1.0,)), (1, 2, 3, (1.0,)), (0, 2, 2, (1.0, 0.5))]),
    ],
)
def test_neighboring_rows_with_one_slot_are_a_run(rows: Any, runs: list[Any]) -> None:
    assert [tuple(run) for run in make_table(rows).runs] == runs
