"""Do the factors of one module make a product at all? Asked when they are read, before any model is involved.

    LoRA   up (out, r, 1...) and down (r, in, ...); a Tucker core (r, r, k...) between up and a down without a kernel
    LoHa   equal products: a (out, r) @ b (r, columns) twice; Tucker: t (r, r, k...) with a (r, out), b (r, in)
    LoKr   each low-rank side a (rows, r) @ b (r, columns); Tucker: t2 (r, r, k...) with a (r, rows), b (r, columns)

Only what the formulas multiply is compared; whether the result fits a weight is `inweave.targets.fit`'s question.
"""

from __future__ import annotations

import math

from inweave.adapter import Factors, Loha, Lokr, Lora, OftIn, Tensor


def shape_problem(factors: Factors) -> str:
    """What is wrong with the shapes of these factors; empty if nothing is."""
    tensors = factors.tensors()
    sizes = ", ".join(f"{role} {list(tensor.shape)}" for role, tensor in tensors.items())
    match factors:
        case Lora():
            wrong = _lora_problem(factors)
        case Loha():
            wrong = _loha_problem(factors)
        case Lokr():
            wrong = _lokr_problem(factors)
        case OftIn():
            size = factors.block_size
            wrong = "" if size * (size - 1) // 2 == factors.blocks.shape[1] else "the blocks are no upper triangles"
        case _:
            wrong = ""
    return f"{wrong}: {sizes}" if wrong else ""


def _lora_problem(factors: Lora) -> str:
    up, down, mid = factors.up.shape, factors.down.shape, factors.mid
    if math.prod(up[2:]) != 1:
        return "lora_up may have two axes and axes of size one"
    if mid is None:
        return ""
    if len(mid.shape) < 3 or mid.shape[:2] != (up[1], down[0]) or math.prod(down[2:]) != 1:
        return "the Tucker core does not fit between lora_up and lora_down"
    return ""


def _loha_problem(factors: Loha) -> str:
    pairs = ((factors.w1_a, factors.w1_b, factors.t1), (factors.w2_a, factors.w2_b, factors.t2))
    if (factors.t1 is None) != (factors.t2 is None):
        return "one of two Tucker cores is missing"
    shapes = [_product_shape(*pair) for pair in pairs]
    if None in shapes:
        return "LoHa factors do not make a product"
    return "" if shapes[0] == shapes[1] else "the two products of LoHa differ in shape"


def _lokr_problem(factors: Lokr) -> str:
    sides = ((factors.w1, factors.w1_a, factors.w1_b, None), (factors.w2, factors.w2_a, factors.w2_b, factors.t2))
    for whole, left, right, core in sides:
        if whole is None and left is not None and right is not None and _product_shape(left, right, core) is None:
            return "LoKr factors do not make a product"
        if whole is not None and core is not None:
            return "a Tucker core beside a full factor"
    return ""


def _product_shape(left: Tensor, right: Tensor, core: Tensor | None) -> tuple[int, ...] | None:
    """Of left @ right, or of the Tucker product where there is a core; None if the ranks do not meet."""
    if core is None:
        meets = math.prod(left.shape[1:]) == right.shape[0] > 0
        return (left.shape[0], math.prod(right.shape[1:])) if meets else None
    flat = len(left.shape) == len(right.shape) == 2 and len(core.shape) > 2
    meets = flat and core.shape[:2] == (left.shape[0], right.shape[0]) and 0 not in core.shape[:2]
    return (left.shape[1], right.shape[1], *core.shape[2:]) if meets else None
