"""The raw products, before scale and strength.

    Lora   flat(up) @ flat(down), in `groups` diagonal blocks
           [o,i,...] = sum_ab up[o,a] * mid[a,b,...] * down[b,i]                     with `mid`
    Loha   (w1_a @ w1_b) * (w2_a @ w2_b)
           factor[o,i,...] = sum_ab w_a[a,o] * t[a,b,...] * w_b[b,i]                 with `t1`, `t2`
    Lokr   kron(w1, w2);  w1 = w1 | w1_a @ w1_b;  w2 = w2 | w2_a @ w2_b | the same sum with `t2`
    Vera   diag(lambda_b) @ up[:out] @ diag(lambda_d) @ down[:, :in]
    Glora  W.a1.a2 + b1 @ b2, or W.a2.a1 + b2 @ b1 in the old layout;  W.a contracts W's axis 1
           the b part is Lora's sum with `bm` as `mid`
    Full   value

A product has the shape its factors give it; `fit.fitted` lays it on the weight. With a kernel spread
over both of LoKr's factors that reshape is part of the formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from inweave.adapter import Factors, Full, Glora, Loha, Lokr, Lora, Tensor, Vera
from inweave.errors import TargetError
from inweave.ops.decode import Reader
from inweave.ops.delta.fit import fitted, flat, misfit


def product(factors: Factors, read: Reader, shape: Sequence[int] | None, weight: torch.Tensor | None) -> torch.Tensor:
    """The raw product of an algorithm that adds to the weight."""
    match factors:
        case Lora():
            return _lora(factors, read)
        case Loha():
            return _loha(factors, read)
        case Lokr():
            return _lokr(factors, read)
        case Vera():
            return _vera(factors, read, shape)
        case Full():
            return read(factors.value)
        case Glora() if weight is not None:
            return _glora(factors, read, weight)
    raise TargetError(f"{factors.kind}: there is no formula for {type(factors).__name__}")


def _lora(factors: Lora, read: Reader) -> torch.Tensor:
    up, down = read(factors.up), read(factors.down)
    if factors.mid is not None:
        return _tucker("lora", read(factors.mid), flat("lora", up).T, flat("lora", down))
    up, down, groups = flat("lora", up), flat("lora", down), factors.groups
    if groups == 0 or up.shape[1] * groups != down.shape[0]:
        raise misfit("lora", f"up {tuple(up.shape)} and down do not meet", f"({up.shape[1]}, ...)", down)
    blocks = torch.bmm(
        up.reshape(groups, up.shape[0] // groups, up.shape[1]),
        down.reshape(groups, up.shape[1], down.shape[1]),
    )
    return blocks.reshape(factors.shape())


def _loha(factors: Loha, read: Reader) -> torch.Tensor:
    left = _factor("loha", read, factors.w1_a, factors.w1_b, factors.t1)
    right = _factor("loha", read, factors.w2_a, factors.w2_b, factors.t2)
    if left.shape != right.shape:
        raise misfit("loha", "the two factors differ", left, right)
    return left * right


def _lokr(factors: Lokr, read: Reader) -> torch.Tensor:
    left = _whole("w1", read, factors.w1, factors.w1_a, factors.w1_b, None)
    right = _whole("w2", read, factors.w2, factors.w2_a, factors.w2_b, factors.t2)
    right = right.reshape(factors.factor_shapes()[1]).contiguous()
    if right.dim() < 2:
        raise misfit("lokr", "w2 must be a matrix or a convolution", "2 axes or more", right)
    left = flat("lokr", left)
    return torch.kron(left.reshape(*left.shape, *[1] * (right.dim() - 2)), right)


def _whole(
    name: str, read: Reader, full: Tensor | None, a: Tensor | None, b: Tensor | None, core: Tensor | None
) -> torch.Tensor:
    if full is not None:
        return read(full)
    if a is None or b is None:
        raise TargetError(f"lokr: expected {name}, or {name}_a and {name}_b, got neither")
    return _factor("lokr", read, a, b, core)


def _vera(factors: Vera, read: Reader, shape: Sequence[int] | None) -> torch.Tensor:
    into, out = read(factors.lambda_d).flatten(), read(factors.lambda_b).flatten()
    up, down = flat("vera", read(factors.up)), flat("vera", read(factors.down))
    columns = down.shape[1] if shape is None else math.prod(shape[1:])
    if not into.numel() == up.shape[1] == down.shape[0]:
        met = (up.shape[1], down.shape[0])
        raise misfit("vera", "up's columns and down's rows against lambda_d", (into.numel(),) * 2, met)
    if up.shape[0] < out.numel() or down.shape[1] < columns:
        shared = (up.shape[0], down.shape[1])
        raise misfit("vera", "the shared pair is too small", f"{(out.numel(), columns)} or more", shared)
    return (out[:, None] * up[: out.numel()]) @ (into[:, None] * down[:, :columns])


def _glora(factors: Glora, read: Reader, weight: torch.Tensor) -> torch.Tensor:
    a, b = (factors.a1, factors.a2), (factors.b1, factors.b2)
    if factors.layout == "old":
        a, b = a[::-1], b[::-1]
    first, second = flat("glora", read(a[0])), flat("glora", read(a[1]))
    if weight.dim() < 2 or weight.shape[1] != first.shape[0] or second.shape != first.T.shape:
        raise misfit("glora", f"the weight's inputs against a {tuple(first.shape)}", first.shape[0], weight)
    turned = torch.einsum("oi...,ij,jk->ok...", weight, first, second)
    if factors.bm is not None:
        added = _tucker("glora", read(factors.bm), flat("glora", read(b[0])).T, flat("glora", read(b[1])))
    else:
        added = _matmul("glora", read(b[0]), read(b[1]))
    return turned + fitted("glora", added, weight.shape)


def _factor(kind: str, read: Reader, a: Tensor, b: Tensor, core: Tensor | None) -> torch.Tensor:
    if core is None:
        return _matmul(kind, read(a), read(b))
    return _tucker(kind, read(core), flat(kind, read(a)), flat(kind, read(b)))


def _matmul(kind: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    left, right = flat(kind, left), flat(kind, right)
    if left.shape[1] != right.shape[0]:
        raise misfit(kind, f"{tuple(left.shape)} cannot multiply", f"({left.shape[1]}, ...)", right)
    return left @ right


def _tucker(kind: str, core: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """sum_ab left[a,o] * core[a,b,...] * right[b,i]"""
    expected = (left.shape[0], right.shape[0])
    if tuple(core.shape[:2]) != expected:
        raise misfit(kind, "the core does not fit its factors", expected, core)
    return torch.einsum("ab...,ao,bi->oi...", core, left, right)
