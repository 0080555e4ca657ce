"""Max-norm regularization of adapters (`scale_weight_norms`): after a step no module's change is larger than a limit.

    norm    = |scale * product|        Frobenius; the product of the module's factors that is merged
    ratio   = min(1, limit / norm)
    factors *= ratio^(1/n)             each of the n factors alike, so that the product is multiplied by the ratio

Srebro and Shraibman, "Rank, Trace-Norm and Max-Norm", 2005; Hinton et al., arXiv 1207.0580. A DoRA's magnitudes do not
change. Only the factors change, in place and without a number on the host, so it can be part of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from inweave.layers.branch import Branch
from inweave.layers.norms import NormBranch


@torch.no_grad()
def limit_norms(branches: Iterable[Branch], limit: float, ok: torch.Tensor) -> None:
    """Scale the factors of every branch whose norm exceeds ``limit``; if ``ok`` is 0 nothing changes."""
    for branch in branches:
        if isinstance(branch, NormBranch):  # no product of factors; LyCORIS does not limit them either
            continue
        roles = branch.roles().values()
        norm = branch.product_norm() * abs(branch.scale)
        ratio = torch.where(ok.bool(), (limit / norm).clamp_max(1.0), 1.0)  # 1 if the norm is 0
        for factor in roles:
            factor.mul_(ratio.pow(1 / len(roles)))
