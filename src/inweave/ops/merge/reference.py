"""The grouped merge in plain torch: one weight after the other, one addmm per weight.

Products of a weight are joined along the rank, [s1*up1 s2*up2 ..] @ [down1; down2; ..], so a stack of any
height costs one matrix product and one rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inweave.ops.merge.work import Target


def merge_products(targets: Sequence[Target]) -> None:
    """Write every target's `out`."""
    for target in targets:
        if not target.products:
            target.out.copy_(target.base)
            continue
        up = torch.cat([product.up.float() * product.scale for product in target.products], 1)
        down = torch.cat([product.down.float() for product in target.products], 0)
        target.out.copy_(torch.addmm(target.base.float(), up, down))
