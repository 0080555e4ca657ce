"""LoRA and LoCon, with or without a Tucker core.

    delta = scale * reshape(flat(up) @ flat(down), W.shape)
    delta[o,i,h,w] = scale * sum_ab up[o,a] * mid[a,b,h,w] * down[b,i]          with `mid`

    up (out, r, 1...)   down (r, in, k...)   mid (r, r, k...) with down (r, in, 1...)

Grouped form: `down` has g times as many rows as `up` has columns. Output rows and rank rows are then cut into g pieces
that are multiplied pairwise: grouped convolutions, and q/k/v exports of one block each. Linear, Conv1x1 and Conv kxk
use the same code, without branching on the number of dimensions.

    grouped convolution  W (out, in/g, k...), ours down (r, in/g, k...), each group's inputs through the same rows or
                         through rows of its own; PEFT's lora_A (r, in, k...) reads all inputs: the same change if the
                         rows of each group are zero on the others' inputs

    cut    fused -> parts   parts share `down` and take their rows of `up`; an `up` that is block-sparse
                            gives each part its own rank block, with alpha divided so that the scale stays
    join   parts -> fused   equal `down`s are shared again; different ones are stacked under a
                            block-diagonal `up` of rank r1 + r2 + ..., alpha = scale * (r1 + r2 + ...)

Each undoes the other bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from inweave.adapter.contract import Blocks, Form, Parts
from inweave.adapter.factors import Factors
from inweave.adapter.full import Full
from inweave.adapter.magnitude import joined_magnitude, magnitude_rows, swapped_magnitude
from inweave.adapter.tensor import Tensor, scalar_like, stacked


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora(Factors):
    """A low-rank pair `up` and `down`, with an optional Tucker core `mid`."""

    down: Tensor
    up: Tensor
    mid: Tensor | None = None
    embedding: bool = False  # made for an embedding table, which is stored (rows, features)
    layer_groups: int = 1  # of the grouped convolution that it was trained on

    kind: ClassVar[str] = "lora"
    formula: ClassVar[str] = "inweave.ops.delta.lora:product"
    layer: ClassVar[str] = "inweave.layers.lora:LoraBranch"
    suffixes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "kohya": {"lora_down.weight": "down", "lora_up.weight": "up", "lora_mid.weight": "mid"},
        "peft": {
            "lora_A.weight": "down", "lora_B.weight": "up", "lora_A": "down", "lora_B": "up",
            "lora_B.bias": "up_bias", "lora_embedding_A": "emb_down", "lora_embedding_B": "emb_up",
        },
        "dotted": {
            "lora.down.weight": "down", "lora.up.weight": "up",
            "lora_linear_layer.down.weight": "down", "lora_linear_layer.up.weight": "up",
        },
        "hcp": {
            "___.layer.W_down": "down", "___.layer.W_up": "up",
            "___.layer.lora_down.weight": "down", "___.layer.lora_up.weight": "up",
        },
    }  # fmt: skip
    named_suffixes: ClassVar[tuple[str, ...]] = ("lora_embedding_A", "lora_embedding_B")
    orphans: ClassVar[Mapping[str, str]] = {
        "down": "lora_up is missing", "up": "lora_down is missing", "mid": "lora_up and lora_down are missing",
        "emb_down": "lora_embedding_B is missing", "emb_up": "lora_embedding_A is missing",
        "up_bias": "a LoRA bias without its LoRA",
    }  # fmt: skip
    sides: ClassVar[tuple[str, str] | None] = ("up", "down")
    written: ClassVar[Mapping[str, str]] = {
        "down": "lora_down.weight", "up": "lora_up.weight", "mid": "lora_mid.weight",
    }  # fmt: skip
    peft_type: ClassVar[str] = "LORA"
    widens_inputs: ClassVar[bool] = True

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def algorithm(self) -> str:
        if self.mid is not None or any(size > 1 for size in self.down.shape[2:]):
            return "locon" if self.magnitude is None else "dora-locon"
        return "lora" if self.magnitude is None else "dora"

    @property
    def groups(self) -> int:
        """The number of diagonal blocks in the product; 0 if the two ranks do not fit."""
        return block_count(self.up.shape, self.down.shape)

    def shape(self) -> tuple[int, ...]:
        kernel = self.mid.shape[2:] if self.mid else self.down.shape[2:]
        return (self.up.shape[0], *self.down.shape[1:2], *kernel)

    def decisive_tensors(self) -> list[Tensor]:
        return [self.up]

    def shape_problem(self) -> str:
        up, down, mid = self.up.shape, self.down.shape, self.mid
        if math.prod(up[2:]) != 1:
            return "lora_up may have two axes and axes of size one"
        if mid is None:
            return ""
        if len(mid.shape) < 3 or mid.shape[:2] != (up[1], down[0]) or math.prod(down[2:]) != 1:
            return "the Tucker core does not fit between lora_up and lora_down"
        return ""

    @classmethod
    def recognize(cls, parts: Parts) -> None:
        for down_role, up_role in (("down", "up"), ("emb_down", "emb_up")):
            if not parts.has(down_role, up_role):
                continue
            embedding = down_role == "emb_down"
            down, up, mid = parts.left[down_role], parts.left[up_role], None if embedding else parts.left.get("mid")
            fields, keys = parts.shared(cls)
            keys = parts.take(down_role, up_role, *(() if mid is None else ("mid",))) + keys
            shapes = f"down {list(down.shape)}, up {list(up.shape)}"
            if embedding:
                fields["transposed"] = True
                if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1]:
                    parts.malformed(keys, f"embedding factors do not make a product: {shapes}")
                    continue
            if len(down.shape) < 2 or len(up.shape) < 2:
                parts.malformed(keys, f"the factors must have two axes or more: {shapes}")
                continue
            factors = cls(down=down, up=up, mid=mid, embedding=embedding, **fields)
            if not factors.groups:
                parts.malformed(keys, f"the ranks differ: {shapes}")
            elif parts.make(factors, keys) and parts.has("up_bias"):  # scaled like the LoRA it belongs to
                bias = Full(
                    value=parts.left["up_bias"],
                    bias_rank=factors.rank,
                    alpha=factors.alpha,
                    stored_scale=factors.stored_scale,
                    rslora=factors.rslora,
                )
                parts.make(bias, parts.take("up_bias"), "bias")

    # writing

    def peft_tensors(self, form: Form, param: str, paired: bool) -> dict[str, Tensor] | str:
        if self.mid is not None:
            return "a Tucker core cannot be expressed in this dialect"
        if self.layer_groups > 1 and self.magnitude is not None:
            return "PEFT has no DoRA for grouped convolutions"
        if self.widen is not None and not form.widens:
            return "a widened weight cannot be expressed in this dialect"
        if self.embedding and self.magnitude is not None and (not form.replaces or self.magnitude.axis == "in"):
            return "a DoRA magnitude on an embedding cannot be expressed in this dialect"
        if self.embedding and form.replaces:
            norms = {} if self.magnitude is None else {form.magnitude: self.magnitude.tensor}
            return {"lora_embedding_A": self.down, "lora_embedding_B": self.up, **norms}
        if self.transposed and not form.replaces:
            return "a change for a transposed weight cannot be expressed in this dialect"
        tensors = {"lora_A.weight": self.down, "lora_B.weight": self.up}
        if self.magnitude is None:
            return tensors
        if self.magnitude.axis == "in" or not form.magnitude:
            return "a DoRA magnitude on this axis cannot be expressed in this dialect"
        axes, size = len(self.shape()), self.magnitude.tensor.numel
        shape = (size,) if axes <= 2 else (1, size) + (1,) * (axes - 2)
        return tensors | {form.magnitude: self.magnitude.tensor.reshaped(shape)}

    def report_suffixes(self) -> Mapping[str, str]:
        names = {"down": "lora_A.weight", "up": "lora_B.weight", "mid": "lora_mid.weight"}
        if self.embedding:
            names = {"down": "lora_embedding_A", "up": "lora_embedding_B"}
        return names | {"magnitude": "lora_magnitude_vector"}

    # grouped convolutions

    def peft_form(self) -> Factors:
        groups, blocks = self.layer_groups, self.groups
        if groups == 1 or blocks not in (1, groups) or self.mid is not None:
            return self
        down = stacked([self.down] * groups) if blocks == 1 else self.down
        data, rank = memoryview(down.data), down.shape[0]
        width, rows = len(data) // rank, rank // groups
        pieces: list[bytes | memoryview] = []
        for row in range(rank):
            before = row // rows * width
            pieces += (bytes(before), data[row * width : (row + 1) * width], bytes((groups - 1) * width - before))
        wide = Tensor(down.dtype, (rank, down.shape[1] * groups, *down.shape[2:]), b"".join(pieces))
        more = math.sqrt(rank / self.rank) if self.rslora else rank / self.rank
        alpha = None if self.alpha is None else self.alpha * more
        return replace(self, down=wide, alpha=alpha, stored_alpha=None if more != 1 else self.stored_alpha)

    def within_groups(self, shape: Sequence[int]) -> Factors | None:
        groups = self.groups
        if groups < 2 or len(shape) < 3 or len(self.down.shape) < 3 or self.down.shape[1] != groups * shape[1]:
            return None
        rows = self.rank // groups
        width, item = math.prod(self.down.shape[1:]) // groups, self.down.itemsize
        parts: list[Tensor] = []
        for group in range(groups):
            part = self.down.rows(group * rows, rows)
            if not part.is_zero_outside(group * width, width):
                return None
            data, start, step = memoryview(part.data), group * width * item, groups * width * item
            own = b"".join(data[at + start : at + start + width * item] for at in range(0, len(data), step))
            parts.append(Tensor(part.dtype, (rows, shape[1], *self.down.shape[2:]), own))
        if any(not part.same(parts[0]) for part in parts):
            return replace(self, down=stacked(parts), layer_groups=groups)
        more = math.sqrt(groups) if self.rslora else groups
        alpha = None if self.alpha is None else self.alpha / more
        return replace(self, down=parts[0], alpha=alpha, stored_alpha=None, layer_groups=groups)

    # rows

    def row_roles(self) -> Mapping[str, int]:
        return {"up": 1}

    def rows(self, start: int, length: int) -> Self | None:
        out, groups = self.up.shape[0], self.groups
        if groups <= 1 or not self.cuttable():
            return Factors.rows(self, start, length)
        block, rank = out // groups, self.down.shape[0] // groups
        if start % block or length % block:
            return None
        down = self.down.rows(start // block * rank, length // block * rank)
        magnitude = magnitude_rows(self.magnitude, out, start, length)
        return replace(self, up=self.up.rows(start, length), down=down, magnitude=magnitude)

    def cut(self, sizes: Sequence[int], made: Blocks | None = None) -> list[Factors | None] | None:
        if made is None or not made.describes(len(sizes)) or not (made.shared or sum(made.ranks) == self.rank):
            made = self._rank_blocks(sizes)
        if made is None or made.shared:
            return Factors.cut(self, sizes, made)
        parts: list[Factors | None] = []
        row = column = 0
        for size, rank, alpha in zip(sizes, made.ranks, made.alphas, strict=True):
            part = replace(
                self,
                up=self.up.rows(row, size).columns(column, rank),
                down=self.down.rows(column, rank),
                alpha=alpha,
                stored_alpha=scalar_like(alpha, self.stored_alpha),
                magnitude=magnitude_rows(self.magnitude, self.up.shape[0], row, size),
            )
            parts.append(part if rank else None)
            row, column = row + size, column + rank
        return parts

    def _rank_blocks(self, sizes: Sequence[int]) -> Blocks | None:
        """Return equal rank blocks that only their own rows use, as kohya's split_qkv saves them."""
        parts, rank = len(sizes), self.rank
        if self.groups != 1 or self.mid is not None or parts < 2 or rank % parts:
            return None
        width = rank // parts
        alpha = None if self.alpha is None else self.alpha / parts
        if self.stored_alpha is not None and alpha is not None and scalar_like(alpha, self.stored_alpha) is None:
            return None  # the file's dtype cannot hold the divided alpha: keep the parts' shared form
        for number, size in enumerate(sizes):
            rows = self.up.rows(sum(sizes[:number]), size)
            if not rows.is_zero_outside(number * width, width) or not any(rows.columns(number * width, width).data):
                return None
        return Blocks((width,) * parts, (alpha,) * parts, shared=False)

    def joined(self, parts: Sequence[Factors | None], sizes: Sequence[int]) -> tuple[Factors, Blocks] | None:
        loras = [part if isinstance(part, Lora) else None for part in parts]
        there = [part for part in loras if part is not None]
        magnitude = joined_magnitude([part.magnitude if part else None for part in parts])
        if magnitude is False or any(part.groups != 1 for part in there):
            return None

        def layout(part: Lora) -> object:
            return (
                part.up.dtype,
                part.up.shape[2:],
                part.down.dtype,
                part.down.shape[1:],
                part.scale,
                part.alpha is None,
            )

        if any(layout(p) != layout(self) or p.mid is not None or p.residual or p.stored_scale for p in there):
            return None
        ranks = tuple(part.rank if part is not None else 0 for part in loras)
        alphas = tuple(part.alpha if part is not None else None for part in loras)
        if all(part.down.same(self.down) and part.alpha == self.alpha for part in there):
            ups = [p.up if p is not None else self.up.zero_rows(n) for p, n in zip(loras, sizes, strict=True)]
            return replace(self, up=stacked(ups), magnitude=magnitude), Blocks(ranks, alphas, shared=True)
        total = sum(ranks)
        alpha = None if self.alpha is None else self.scale * (total**0.5 if self.rslora else total)
        stored = scalar_like(alpha, self.stored_alpha)
        if self.stored_alpha is not None and stored is None:
            stored = scalar_like(alpha, Tensor("F32", self.stored_alpha.shape, b""))
        up, down = self._block_diagonal(loras, sizes, total), stacked([part.down for part in there])
        fused = replace(self, up=up, down=down, alpha=alpha, stored_alpha=stored, magnitude=magnitude)
        return fused, Blocks(ranks, alphas, shared=False)

    def _block_diagonal(self, parts: Sequence[Lora | None], sizes: Sequence[int], total: int) -> Tensor:
        item, column = self.up.itemsize, 0
        pieces: list[bytes | memoryview] = []
        for part, size in zip(parts, sizes, strict=True):
            if part is None:
                pieces.append(bytes(size * total * item))
                continue
            data, width = memoryview(part.up.data), part.rank * item
            before, after = bytes(column * item), bytes((total - column - part.rank) * item)
            for i in range(0, len(data), width):
                pieces += (before, data[i : i + width], after)
            column += part.rank
        return Tensor(self.up.dtype, (sum(sizes), total, *self.up.shape[2:]), b"".join(pieces))

    def swapped(self) -> Factors | None:
        if self.groups != 1:
            return None
        return replace(self, up=self.up.halves_exchanged(), magnitude=swapped_magnitude(self.magnitude))


def block_count(up: Sequence[int], down: Sequence[int]) -> int:
    """Return the number of diagonal blocks for factors of these shapes; 0 if the two ranks do not fit."""
    inner, rank = up[1] if len(up) > 1 else 0, down[0]
    if inner == 0 or rank == 0 or rank % inner or up[0] % (rank // inner):
        return 0
    return rank // inner
