"""LoRA's product, for merging and for layers.

flat(up) @ flat(down), in diagonal blocks if `down` has more rows than `up` has columns
[o,i,...] = sum_ab up[o,a] * mid[a,b,...] * down[b,i]                     with `mid`
"""

from __future__ import annotations

import torch

from inweave.adapter.lora import block_count
from inweave.ops.delta.fit import flat, misfit
from inweave.ops.delta.low_rank import tucker


def product(up: torch.Tensor, down: torch.Tensor, mid: torch.Tensor | None = None) -> torch.Tensor:
    """Return the product as (out, in, kernel...), with the kernel of `down` or `mid`."""
    if mid is not None:
        return tucker("lora", mid, flat("lora", up).T, down)
    rows, columns = flat("lora", up), flat("lora", down)
    blocks = block_count(rows.shape, columns.shape)
    if blocks == 0 or rows.shape[1] * blocks != columns.shape[0]:
        raise misfit("lora", f"up {tuple(rows.shape)} and down do not fit together", f"({rows.shape[1]}, ...)", columns)
    result = torch.bmm(
        rows.reshape(blocks, rows.shape[0] // blocks, rows.shape[1]),
        columns.reshape(blocks, rows.shape[1], columns.shape[1]),
    )
    return result.reshape(up.shape[0], *down.shape[1:])
