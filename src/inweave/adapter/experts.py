"""LoRA on a bare parameter: the stacked experts of a mixture of experts, as PEFT's `target_parameters` stores it.

    delta[e] = scale * up[:, :, e] @ down[e]          down (experts * r, in)     up (out, r * experts)
    W (experts, out, in), or (experts, in, out) with `inputs_first`; a matrix (out, in) if there is one expert

PEFT nests the pairs of several parameters of one module without their names, in the module's order of them. A file
gives the depth (0: outermost, the last parameter); `of_leaf` is the change when the model has shown which one it is.

`down` holds the experts' rows one after the other, `up` the experts' columns interleaved, as PEFT lays them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from inweave.adapter.contract import Form, Parts
from inweave.adapter.factors import Factors
from inweave.adapter.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLora(Factors):
    """A low-rank pair for every expert, in two tensors.

    ``depth`` and ``candidates`` are -1 and empty where the parameter is certain; else what the pair is for each
    parameter that it may be for, by the configuration: (name, experts, alpha).
    """

    down: Tensor
    up: Tensor
    experts: int = 1
    inputs_first: bool = False
    depth: int = -1
    candidates: tuple[tuple[str, int, float | None], ...] = ()

    kind: ClassVar[str] = "expert-lora"
    formula: ClassVar[str] = "inweave.ops.delta.experts:product"
    layer: ClassVar[str] = "inweave.layers.experts:ExpertBranch"
    of_parameter: ClassVar[bool] = True
    peft_type: ClassVar[str] = "LORA"

    @property
    def rank(self) -> int:
        return self.down.shape[0] // self.experts

    @property
    def algorithm(self) -> str:
        return "lora"

    def shape(self) -> tuple[int, ...]:
        out, into = self.up.shape[0], self.down.shape[1]
        return (self.experts, *((into, out) if self.inputs_first else (out, into))) if self.experts > 1 else (out, into)

    def fits(self, shape: tuple[int, ...]) -> bool:
        return tuple(shape) in (self.shape(), self.turned().shape())

    @property
    def nesting(self) -> tuple[int, tuple[str, ...]] | None:
        return (self.depth, tuple(leaf for leaf, *_ in self.candidates)) if self.depth >= 0 else None

    def of_leaf(self, leaf: str) -> ExpertLora:
        """Return the change as that of one of the candidates."""
        experts, alpha = next((experts, alpha) for name, experts, alpha in self.candidates if name == leaf)
        return replace(self, experts=experts, alpha=alpha, depth=-1, candidates=())

    def turned(self) -> ExpertLora:
        """Return the same change for experts that are stored the other way round."""
        return replace(self, inputs_first=self.experts > 1 and not self.inputs_first)

    def oriented(self, shape: Sequence[int], siblings: Sequence[Sequence[int]]) -> ExpertLora:
        """Return the change for a weight of this shape; where it is square, as others of the module are stored.

        Where one of two projections is square, the other one has more outputs than inputs: gate and up in one
        (2 * n, n), or down (2 * n, n) beside a square pair of these.
        """
        turned = self.turned()
        if tuple(shape) != self.shape():
            return turned
        if self.experts > 1 and shape[1] == shape[2]:
            for size in siblings:
                if len(size) == 3 and size[0] == shape[0] and size[1] != size[2] and shape[1] in size[1:]:
                    return replace(self, inputs_first=size[1] < size[2])
        return self

    def formula_options(self, shape: Sequence[int] | None, weight: Any) -> dict[str, Any]:
        return {"experts": self.experts, "inputs_first": self.inputs_first}

    def decisive_tensors(self) -> list[Tensor]:
        return [self.up]

    def shape_problem(self) -> str:
        up, down = self.up.shape, self.down.shape
        if len(up) != 2 or len(down) != 2 or up[1] != down[0] or self.experts < 1 or down[0] % self.experts:
            return "the factors of a parameter's LoRA must be matrices of the same rank for every expert"
        return ""

    @classmethod
    def recognize(cls, parts: Parts) -> None:
        """Take the pair of a parameter that the configuration names; its tensors are named as those of a LoRA."""
        if not (parts.parameter and parts.config and parts.has("down", "up")):
            return
        rank = parts.config.rank_of(parts.config_name) or 1
        down, up = parts.left["down"], parts.left["up"]
        fields, keys = parts.shared(cls)
        keys = parts.take("down", "up") + keys
        rows = down.shape[0] if down.shape else 0
        if rows % rank or fields.get("magnitude") is not None:
            parts.malformed(keys, f"{rows} rows are not a LoRA of rank {rank} for every expert of {parts.parameter}")
            return
        if parts.candidates and fields.get("stored_alpha") is None:
            owner = parts.config_name.removesuffix(parts.parameter)
            paths = {leaf: owner + leaf for leaf in parts.candidates}
            ranks = {leaf: parts.config.rank_of(path) or 1 for leaf, path in paths.items()}
            fields["candidates"] = tuple(
                (leaf, max(rows // ranks[leaf], 1), parts.config.alpha_of(path)) for leaf, path in paths.items()
            )
            fields["depth"] = parts.depth
        parts.make(cls(down=down, up=up, experts=max(rows // rank, 1), **fields), keys, inner=parts.parameter)

    def peft_tensors(self, form: Form, param: str, unscaled: bool) -> dict[str, Tensor] | str:
        if not form.replaces:
            return "a LoRA on a bare parameter cannot be expressed in this dialect"
        return {"lora_A.weight": self.down, "lora_B.weight": self.up}

    def report_suffixes(self) -> Mapping[str, str]:
        return {"down": "lora_A.weight", "up": "lora_B.weight"}
