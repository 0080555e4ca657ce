"""Orthogonal fine-tuning: W' = rotation of W. Four families with different conventions.

    cayley(Q) = (I + Q)(I - Q)^-1

    Oft     Q = B - B^T, shrunk to |Q| <= c = alpha * out where c > 0 (|Q| over all blocks)
            R = m * cayley(Q) + (1 - m) * I;   W'[k,j] = sum_i R[k,i,j] * W[k,i], k a block of rows
            `solved` blocks are R before the strength m
    Boft    the same R in M stages; stage s sees rows (c, 2, h), h = 2^s * b/2, as (c, h, 2), in blocks
            of b, and multiplies block j by R[s,j] from the left
    both    then rows times `rescale`, which is not scaled by the strength (no trainer does that)
    OftIn   Q from its upper triangle, divided by 2 * sqrt(b - 1) with `spread`
            R = cayley(-Q), or PEFT's series with t = `neumann_terms`:
                I + 2Q + 2Q^2 + ... + 2Q^(t-2) + Q^(t-1)        t >= 4; t = 3 counts as 4
                I + 2Q for t = 2, I for t = 1
            W' = flat(W) @ blockdiag(R)^T
    BoftIn  Q = (B - B^T) / 2, R = cayley(-Q), W' = (S_{M-1} ... S_0 flat(W)^T)^T * out_scale
            S_s sees inputs (c, 2, 2^s, b/2) as (c, 2^s, 2, b/2), in blocks of b, times blockdiag(R[s])

The last two have no built-in strength: W + m * (W' - W).
"""

from __future__ import annotations

import math

import torch

from inweave.adapter import Boft, BoftIn, Oft, OftIn
from inweave.ops.delta.fit import along, flat, misfit
from inweave.ops.tensors.decode import Reader

Rotation = Oft | Boft | OftIn | BoftIn


def replaced(factors: Rotation, read: Reader, base: torch.Tensor, strength: float) -> torch.Tensor:
    """Return W' - W at a strength."""
    matrix = flat(factors.kind, base)
    match factors:
        case Oft() | Boft():
            result = _rows(factors, read, matrix, strength)
            if factors.rescale is not None:
                result = result * along(factors.kind, read(factors.rescale), result, 0)
        case OftIn():
            result = torch.lerp(matrix, _oft_in(factors, read, matrix), strength)
        case BoftIn():
            result = torch.lerp(matrix, _boft_in(factors, read, matrix), strength)
    return result.reshape(base.shape) - base


def _rows(factors: Oft | Boft, read: Reader, matrix: torch.Tensor, strength: float) -> torch.Tensor:
    blocks = read(factors.blocks)
    axes = 3 if isinstance(factors, Oft) else 4
    _check_blocks(factors.kind, blocks, axes, matrix.shape[0], "output rows")
    if isinstance(factors, Oft) and factors.solved:
        turn = blocks
    else:
        turn = cayley(_limited(blocks - blocks.mT, (factors.alpha or 0.0) * matrix.shape[0]))
    turn = strength * turn + (1 - strength) * torch.eye(blocks.shape[-1]).to(blocks)
    if isinstance(factors, Oft):
        return _blockwise(turn.mT, matrix)
    for stage, each in enumerate(turn):
        half = _half_span("boft", stage, blocks.shape[-1], matrix.shape[0])
        matrix = _shuffled(matrix, 2, half)
        matrix = _shuffled(_blockwise(each, matrix), half, 2)
    return matrix


def _oft_in(factors: OftIn, read: Reader, matrix: torch.Tensor) -> torch.Tensor:
    entries, columns = read(factors.blocks), matrix.shape[1]
    size = factors.block_size if entries.dim() == 2 else 0
    if entries.dim() != 2 or size * (size - 1) // 2 != entries.shape[1]:
        raise misfit("oft_in", "each block is an upper triangle", "(blocks, b(b-1)/2)", entries)
    count = columns // size if factors.share else entries.shape[0]
    if count * size != columns or (factors.share and entries.shape[0] != 1):
        expected = f"a multiple of {size}" if factors.share else count * size
        raise misfit("oft_in", f"inputs rotated by blocks {tuple(entries.shape)}", expected, columns)
    if factors.spread is not None and size > 1:
        entries = entries / (2 * math.sqrt(size - 1))
    row, column = torch.triu_indices(size, size, 1, device=entries.device)
    skew = entries.new_zeros(entries.shape[0], size, size)
    skew[:, row, column] = entries
    skew = skew - skew.mT
    turn = cayley(-skew) if factors.neumann_terms is None else _series(skew, factors.neumann_terms)
    return _blockwise(turn.expand(count, size, size), matrix.T).T


def _boft_in(factors: BoftIn, read: Reader, matrix: torch.Tensor) -> torch.Tensor:
    blocks = read(factors.blocks)
    _check_blocks("boft_in", blocks, 4, matrix.shape[1], "inputs")
    turn, size, columns = cayley((blocks.mT - blocks) / 2), blocks.shape[-1], matrix.T
    columns = _blockwise(turn[0], columns)
    for stage in range(1, len(turn)):
        half = _half_span("boft_in", stage, size, columns.shape[0])
        columns = _shuffled(columns, 2, half * 2 // size, size // 2)
        columns = _shuffled(_blockwise(turn[stage], columns), half * 2 // size, 2, size // 2)
    result = columns.T
    return result * along("boft_in", read(factors.out_scale), result, 0)


def cayley(skew: torch.Tensor) -> torch.Tensor:
    """Return (I + Q)(I - Q)^-1 for each block."""
    eye = torch.eye(skew.shape[-1]).to(skew)
    turn: torch.Tensor = torch.linalg.solve(eye - skew, eye + skew, left=False)
    return turn


def _series(skew: torch.Tensor, terms: int) -> torch.Tensor:
    power = torch.eye(skew.shape[-1]).to(skew)
    total = power.expand_as(skew).clone()
    last = max(terms, 4) - 1 if terms > 2 else 0
    for exponent in range(1, max(last + 1, terms)):
        power = power @ skew
        total = total + (power if exponent == last else 2 * power)
    return total


def _limited(skew: torch.Tensor, limit: float) -> torch.Tensor:
    norm = float(torch.linalg.vector_norm(skew))
    return skew * (limit / norm) if 0 < limit < norm else skew


def _blockwise(blocks: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return blockdiag(blocks) @ matrix."""
    count, size, _ = blocks.shape
    return torch.bmm(blocks, matrix.reshape(count, size, matrix.shape[1])).reshape(matrix.shape)


def _shuffled(matrix: torch.Tensor, first: int, second: int, inner: int = 1) -> torch.Tensor:
    """Reorder rows (c, first, second, inner) as (c, second, first, inner)."""
    return matrix.reshape(-1, first, second, inner, matrix.shape[1]).transpose(1, 2).reshape(matrix.shape)


def _half_span(kind: str, stage: int, size: int, length: int) -> int:
    """Return half of the rows that a butterfly stage mixes: 2^stage * b/2."""
    if size % 2 or length % (size << stage):
        raise misfit(kind, f"stage {stage} with blocks of {size}", f"a multiple of {size << stage}", length)
    return (size << stage) // 2


def _check_blocks(kind: str, blocks: torch.Tensor, axes: int, length: int, what: str) -> None:
    if blocks.dim() != axes or blocks.shape[-1] != blocks.shape[-2]:
        raise misfit(kind, "square blocks", f"{axes} axes, the last two equal", blocks)
    if blocks.shape[-3] * blocks.shape[-2] != length:
        raise misfit(
            kind, f"{what} rotated by blocks {tuple(blocks.shape)}", blocks.shape[-3] * blocks.shape[-2], length
        )
