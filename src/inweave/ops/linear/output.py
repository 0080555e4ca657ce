"""The adapter's part of the forward pass, with the bias: what the frozen product is then added to.

    y = b + s S up^T       one launch, y is written once
    y = y + x W^T          the product reads y while it computes (beta = 1)

In the other order the adapter's product reads y again, whole, and writes it again. Rounding y between the two loses less this way,
since the first part is the smaller one. Several layers of one x lie side by side (`inweave.ops.linear`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inweave.ops.implementation import on_device_of

_ROWS, _COLUMNS = 64, 128


@triton.jit
def _output_kernel(
    hidden, up, bias, y, rows, out, rank, scale,
    COUNT: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0) % COUNT
    m = (tl.program_id(0) // COUNT).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, RANK)
    real, inside, used = (m < rows)[:, None], c < out, r < rank
    s = tl.load(hidden + m[:, None] * (COUNT * rank) + layer * rank + r[None, :], mask=real & used[None, :], other=0.0)
    factor = tl.load(
        up + (layer * out + c)[None, :].to(tl.int64) * rank + r[:, None],
        mask=inside[None, :] & used[:, None],
        other=0.0,
    )
    total = tl.dot(s, factor, input_precision=PRECISION) * scale
    if BIAS:
        total += tl.load(bias + layer * out + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    places = m[:, None] * (COUNT * out) + layer * out + c[None, :]
    tl.store(y + places, total.to(y.dtype.element_ty), mask=real & inside[None, :])


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, down: torch.Tensor, up: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, S) of matrices of one dtype."""
    hidden = torch.mm(x, down.T)
    with on_device_of(x):
        y = adapter_output(hidden, up, bias, scale)
    return y.addmm_(x, weight.T), hidden


def adapter_output(hidden: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None, scale: float) -> torch.Tensor:
    """b + s S up^T (M, N of all layers) of contiguous tensors of one dtype."""
    rows, rank = hidden.shape[0], up.shape[1]
    count = hidden.shape[1] // rank
    out = up.shape[0] // count
    y = hidden.new_empty(rows, up.shape[0])
    _output_kernel[(triton.cdiv(rows, _ROWS) * count, triton.cdiv(out, _COLUMNS))](
        hidden, up, y if bias is None else bias, y, rows, out, rank, scale,
        COUNT=count, BIAS=bias is not None, ROWS=_ROWS, COLUMNS=_COLUMNS, RANK=max(16, triton.next_power_of_2(rank)),
        PRECISION="ieee" if hidden.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    return y
