"""Low-rank products by rows on a real GPU: equal to float64, and valid in a recorded graph when slots change."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from tests.unit.ops.test_rowwise import (  # noqa: E402
    ROWS,
    SHAPES,
    check,
    check_convolution,
    check_isolation,
    make_factors,
    make_inputs,
    make_table,
)

from inweave.ops.rowwise import add_products  # noqa: E402
from inweave.ops.rowwise import triton as kernel  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def test_results() -> None:
    assert check(kernel, DTYPES, "cuda") > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_convolutions(dtype: torch.dtype) -> None:
    assert check_convolution(kernel, dtype, "cuda") > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_see_each_other(dtype: torch.dtype) -> None:
    assert check_isolation(kernel, dtype, "cuda") > 0


def test_a_recorded_graph_follows_the_table() -> None:
    shape = SHAPES[1]
    factors, table = make_factors(*shape[:2], torch.bfloat16, "cuda"), make_table(device="cuda")
    x, y = make_inputs(shape, torch.bfloat16, "cuda")
    add_products(y, x, factors, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = add_products(y, x, factors, table)
    for rows in (ROWS, ROWS[::-1], [[(2, 0.5)]] * len(ROWS)):
        table.fill(rows)
        graph.replay()
        assert torch.equal(out, add_products(y, x, factors, table))
