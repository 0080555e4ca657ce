"""Orthogonal fine-tuning: the weight is rotated, not added to. Four similar families.

`Oft`   rotates OUTPUT rows (kohya, LyCORIS).  blocks (n, b, b), n*b = out
        Q = B - B^T;  c = alpha * out;  if c > 0 and |Q| > c: Q *= c / |Q|   (|Q| over all blocks)
        R = (I + Q) (I - Q)^-1;   strength m: R <- m*R + (1-m)*I
        W'[k,m,...] = sum_n R[k,n,m] * W[k,n,...];   then rows times `rescale`
        `solved` blocks (old `oft_diag`) are R itself.
`Boft`  the same with a butterfly: blocks (M, n, b, b); stage i permutes (c, 2, k) -> (c, k, 2) with
        k = 2^i * b/2, multiplies block j by R[i, j] from the left, undoes the permutation.
`OftIn` rotates INPUTS (PEFT >= 0.16, OneTrainer).  blocks (n, b(b-1)/2): upper triangle, row-major
        R = (I - Q)(I + Q)^-1, or the series I + 2Q + ... + 2Q^(t-2) + Q^(t-1) with `neumann_terms` = t
        (PEFT reads t = 3 as 4, t = 2 as I + 2Q)
        W' = flat(W) @ blockdiag(R)^T;   one block with `share` repeats;   `spread` divides the
        entries by 2*sqrt(b-1) first (OneTrainer's scaled form).
`BoftIn` PEFT BOFT: blocks (M, n, b, b), Q = (B - B^T)/2, R = (I - Q)(I + Q)^-1,
        W' = (butterfly(blockdiag(R)) W^T)^T * s; stage s permutes inputs (c, 2, 2^s, b/2) -> (c, 2^s, 2, b/2)

alpha is a constraint here, never a scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from inweave.adapter.contract import SERIES_TERMS, Form, Parts
from inweave.adapter.factors import Factors
from inweave.adapter.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Oft(Factors):
    """Blocks that rotate the output rows."""

    blocks: Tensor
    rescale: Tensor | None = None
    solved: bool = False

    kind: ClassVar[str] = "oft"
    replacement: ClassVar[str] = "inweave.ops.delta.rotations:replaced"
    suffixes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "lycoris": {"oft_blocks": "oft_blocks", "oft_diag": "oft_diag", "rescale": "rescale"}
    }
    written: ClassVar[Mapping[str, str]] = {"blocks": "oft_blocks", "rescale": "rescale"}
    numbers_parts: ClassVar[bool] = True
    row_local: ClassVar[bool] = False
    additive: ClassVar[bool] = False
    constraint: ClassVar[bool] = True

    def shape(self) -> tuple[int, ...]:
        return (self.blocks.shape[0] * self.blocks.shape[1], -1)

    def rows(self, start: int, length: int) -> Self | None:
        """Return the blocks of some rows, or None if the cut is inside a block or a constraint couples the blocks."""
        block = self.blocks.shape[1]
        if start % block or length % block or (self.alpha and not self.solved):
            return None
        rescale = self.rescale.rows(start, length) if self.rescale else None
        return replace(self, blocks=self.blocks.rows(start // block, length // block), rescale=rescale)

    def kohya_suffixes(self) -> Mapping[str, str]:
        return {**self.written, "blocks": "oft_diag"} if self.solved else self.written

    @classmethod
    def recognize(cls, parts: Parts) -> None:
        """Make `Oft` or `Boft`; kohya stores one tensor per fused part (`oft_blocks.<i>`) under a single constraint."""
        numbered = sorted((role for role in parts.left if role.startswith("oft_blocks.")), key=lambda r: int(r[11:]))
        roles = [role for role in ("oft_blocks", "oft_diag") if role in parts.left] + numbered
        if not roles:
            return
        fields, keys = parts.shared(cls)
        rescale = parts.left.get("rescale")
        extra = parts.take("rescale") + keys
        for role in roles:
            blocks = parts.left[role]
            part = int(role[11:]) if role in numbered else None
            keys = parts.take(role) + extra
            if len(blocks.shape) == 4:
                parts.make(Boft(blocks=blocks, rescale=rescale, **fields), keys, part=part)
            elif len(blocks.shape) == 3 and blocks.shape[1] == blocks.shape[2]:
                solved = role == "oft_diag"
                parts.make(cls(blocks=blocks, rescale=rescale, solved=solved, **fields), keys, part=part)
            else:
                expected = "(n, b, b) or (m, n, b, b) was expected"
                parts.malformed(keys, f"OFT blocks of shape {list(blocks.shape)}; {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Boft(Factors):
    """Butterfly stages of blocks that rotate the output rows."""

    blocks: Tensor
    rescale: Tensor | None = None

    kind: ClassVar[str] = "boft"
    replacement: ClassVar[str] = "inweave.ops.delta.rotations:replaced"
    written: ClassVar[Mapping[str, str]] = Oft.written
    row_local: ClassVar[bool] = False
    additive: ClassVar[bool] = False
    constraint: ClassVar[bool] = True

    def shape(self) -> tuple[int, ...]:
        return (self.blocks.shape[1] * self.blocks.shape[2], -1)

    def shape_problem(self) -> str:
        return butterfly_problem(self.blocks, first=0)

    @classmethod
    def recognize(cls, parts: Parts) -> None:
        """Do nothing: `Oft.recognize` handles the same suffixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OftIn(Factors):
    """Upper triangles of blocks that rotate the inputs."""

    blocks: Tensor
    share: bool = False
    neumann_terms: int | None = None
    spread: Tensor | None = None

    kind: ClassVar[str] = "oft_in"
    replacement: ClassVar[str] = "inweave.ops.delta.rotations:replaced"
    suffixes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "peft": {"oft_R.weight": "oft_R", "oft_r": "oft_r"},
        "onetrainer": {"oft_R.scaled_oft": "scaled_oft"},
    }
    additive: ClassVar[bool] = False
    constraint: ClassVar[bool] = True

    @property
    def block_size(self) -> int:
        """b, from b(b-1)/2 = stored entries."""
        return (1 + math.isqrt(1 + 8 * self.blocks.shape[1])) // 2

    def shape(self) -> tuple[int, ...]:
        return (-1, -1 if self.share else self.blocks.shape[0] * self.block_size)

    def rows(self, start: int, length: int) -> Self | None:
        return self  # inputs are rotated: every output row gets the same rotation

    def shape_problem(self) -> str:
        size = self.block_size
        return "" if size * (size - 1) // 2 == self.blocks.shape[1] else "the blocks are not upper triangles"

    def fit_key(self) -> tuple[object, ...]:
        return (*Factors.fit_key(self), self.share, self.block_size)

    def fits(self, shape: tuple[int, ...]) -> bool:
        if self.share and len(shape) > 1:
            return math.prod(shape[1:]) % self.block_size == 0
        return Factors.fits(self, shape)

    @classmethod
    def recognize(cls, parts: Parts) -> None:
        if parts.has("oft_R"):
            blocks, spread, config = parts.left["oft_R"], parts.left.get("scaled_oft"), parts.config
            fields, keys = parts.shared(cls)
            keys = parts.take("oft_R", "scaled_oft") + keys
            if len(blocks.shape) != 2 or not blocks.shape[1]:
                parts.malformed(keys, f"oft_R has shape {list(blocks.shape)}; (blocks, b(b-1)/2) was expected")
            elif config and config.constrained:
                parts.unsupported(keys, "constrained OFT (PEFT coft=true)")
            else:
                share, terms = (config.block_share, config.neumann_terms) if config else (False, SERIES_TERMS)
                parts.make(cls(blocks=blocks, share=share, neumann_terms=terms, spread=spread, **fields), keys)
        if parts.has("oft_r"):
            keys = parts.take(*parts.left)
            parts.unsupported(keys, "OFT as PEFT wrote it before 0.16; save it again with a newer PEFT")

    def kohya_tensors(self, form: Form, param: str) -> dict[str, Tensor] | str:
        if not form.rotates_inputs:
            return f"{self.kind} as PEFT stores it cannot be expressed in this dialect"
        if self.share:
            return "OFT whose inputs share one block cannot be expressed in this dialect"
        if self.neumann_terms != SERIES_TERMS:
            terms = f"a series of {self.neumann_terms} terms" if self.neumann_terms else "the exact Cayley transform"
            return f"OFT with {terms} cannot be expressed in this dialect, whose readers use {SERIES_TERMS} terms"
        names = {"blocks": "oft_R.weight", "spread": "oft_R.scaled_oft"}
        return {names[role]: tensor for role, tensor in self.tensors().items()} | self.alpha_tensor()


@dataclass(frozen=True, slots=True, kw_only=True)
class BoftIn(Factors):
    """Butterfly stages of blocks that rotate the inputs."""

    blocks: Tensor
    out_scale: Tensor

    kind: ClassVar[str] = "boft_in"
    replacement: ClassVar[str] = "inweave.ops.delta.rotations:replaced"
    suffixes: ClassVar[Mapping[str, Mapping[str, str]]] = {"peft": {"boft_R": "boft_R", "boft_s": "boft_s"}}
    named_suffixes: ClassVar[tuple[str, ...]] = ("boft_R", "boft_s")
    orphans: ClassVar[Mapping[str, str]] = {"boft_R": "boft_s is missing", "boft_s": "boft_R is missing"}
    additive: ClassVar[bool] = False
    constraint: ClassVar[bool] = True

    def shape(self) -> tuple[int, ...]:
        return (self.out_scale.numel, self.blocks.shape[1] * self.blocks.shape[2])

    def shape_problem(self) -> str:
        return butterfly_problem(self.blocks, first=1)

    @classmethod
    def recognize(cls, parts: Parts) -> None:
        if not parts.has("boft_R", "boft_s"):
            return
        blocks, out_scale = parts.left["boft_R"], parts.left["boft_s"]
        fields, keys = parts.shared(cls)
        keys = parts.take("boft_R", "boft_s") + keys
        if len(blocks.shape) != 4:
            parts.malformed(keys, f"boft_R has shape {list(blocks.shape)}; (m, n, b, b) was expected")
        else:
            parts.make(cls(blocks=blocks, out_scale=out_scale, **fields), keys)


def butterfly_problem(blocks: Tensor, first: int) -> str:
    """Return why the stages from ``first`` on cannot mix spans of 2^stage blocks; empty if they can."""
    stages, count, size, width = blocks.shape
    if not stages or not size or size != width:
        return "butterfly blocks must be square, and at least one stage"
    wide = stages > first and (size % 2 or stages - 1 >= count.bit_length() or count % (1 << (stages - 1)))
    return (
        f"{stages} butterfly stages need an even block size and {count} blocks to be a multiple of 2^{stages - 1}"
        if wide
        else ""
    )
