"""Whole values: `Full` adds to or replaces a tensor, `TokenRows` some of its rows.

Full, add:  W' = W + strength * scale * value
Full, set:  W' = value                               strength is ignored
TokenRows:  W'[indices] = value                      strength is ignored; PEFT's trainable_token_indices
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from inweave.adapter.contract import Blocks, Form, Parts, PeftSettings
from inweave.adapter.factors import Factors
from inweave.adapter.tensor import Tensor, int_list, stacked

#: role -> the parameter it changes, how, and whether it belongs to a norm
_ROLES: dict[str, tuple[str, Literal["add", "set"], bool]] = {
    "diff": ("weight", "add", False), "diff_b": ("bias", "add", False),
    "w_norm": ("weight", "add", True), "b_norm": ("bias", "add", True),
    "set_weight": ("weight", "set", False), "set_bias": ("bias", "set", False),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Full(Factors):
    """A whole value; ``bias_rank`` is set for a LoRA's own bias, which shares its scale (alpha / rank)."""

    value: Tensor
    mode: Literal["add", "set"] = "add"
    norm: bool = False
    bias_rank: int | None = None
    inside: bool = False  # PEFT stores it under the wrapped layer, as `base_layer.bias`

    kind: ClassVar[str] = "full"
    formula: ClassVar[str] = "inweave.ops.delta.full:product"
    replacement: ClassVar[str] = "inweave.ops.delta.full:replaced"
    suffixes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "": {
            "diff": "diff", "diff_b": "diff_b", "bias.diff": "diff_b", "diff_m": "diff_modulation",
            "set_weight": "set_weight", "set_bias": "set_bias", "weight": "plain_weight", "bias": "plain_bias",
        },
        "lycoris": {"w_norm": "w_norm", "b_norm": "b_norm"},
        "peft": {"base_layer.bias": "inner_bias"},
    }  # fmt: skip
    orphans: ClassVar[Mapping[str, str]] = {
        "plain_weight": "a plain weight, not an adapter tensor", "plain_bias": "a plain bias, not an adapter tensor",
    }  # fmt: skip
    whole: ClassVar[bool] = True
    takes_place: ClassVar[bool] = True

    @property
    def algorithm(self) -> str:
        name = "norm" if self.norm else self.kind
        return name if self.magnitude is None else f"dora-{name}"

    @property
    def scale_rank(self) -> int | None:
        return self.bias_rank

    @property
    def replaces(self) -> bool:
        return self.mode == "set"

    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def needs_base(self) -> bool:
        return self.magnitude is not None or self.mode == "set"

    def fits(self, shape: tuple[int, ...]) -> bool:
        got = self.stored_shape()
        return math.prod(got) == math.prod(shape) and (
            len(got) <= 1 or len(shape) <= 1 or got[0] == shape[0] or 1 in (got[0], shape[0])
        )

    @classmethod
    def recognize(cls, parts: Parts) -> None:
        left = parts.left
        for role, (param, mode, norm) in _ROLES.items():
            if role not in left:
                continue
            fields: dict[str, Any] = {}
            keys: tuple[str, ...] = ()
            if role == "diff":  # a full difference may be decomposed, and may widen the base
                shared, keys = parts.shared(cls, configured=False)
                names = ("magnitude", "widen", "alpha", "stored_alpha")
                fields = {name: shared[name] for name in names if name in shared}
            made = cls(value=left[role], mode=mode, norm=norm, **fields)
            parts.make(made, parts.take(role) + keys, param)
        if "diff_modulation" in left:  # named by its block: the table of shifts and scales in it is a bare parameter
            parts.make(cls(value=left["diff_modulation"]), parts.take("diff_modulation"), inner="modulation")
        if "scale" in left and left["scale"].numel > 1:
            parts.make(cls(value=left["scale"], mode="set"), parts.take("scale"), "scale")
        if "inner_bias" in left:
            parts.make(cls(value=left["inner_bias"], mode="set", inside=True), parts.take("inner_bias"), "bias")
        for role, param in (("plain_weight", "weight"), ("plain_bias", "bias")) if parts.is_peft else ():
            if role in left:
                parts.make(cls(value=left[role], mode="set"), parts.take(role), param)

    @classmethod
    def missing(cls, config: PeftSettings, modules: Collection[str]) -> str:
        if not config.modules_to_save or any(map(config.saves, modules)):
            return ""
        names = ", ".join(config.modules_to_save[:5])
        return f"modules_to_save lists {names}, but the file has no weights of them: the base's own are used"

    # writing

    def kohya_tensors(self, form: Form, param: str) -> dict[str, Tensor] | str:
        if self.mode == "set":
            if not form.replaces:
                return "a value that replaces the base's cannot be expressed in this dialect"
            return {"set_weight" if param != "bias" else "set_bias": self.value}
        if self.scale != 1.0:
            return f"a bias scaled by {self.scale:g} cannot be expressed in this dialect"
        norm = form.norms and (self.norm or (param == "weight" and len(self.value.shape) == 1))
        if param == "bias":
            return {"b_norm" if norm else "diff_b": self.value}
        tensors = {"w_norm" if norm else "diff": self.value} | self.alpha_tensor()
        if self.magnitude is not None:
            tensors["dora_scale"] = self.kohya_magnitude()
        if self.widen is not None:
            tensors["reshape_weight"] = int_list(self.widen)
        return tensors

    def peft_tensors(self, form: Form, param: str, paired: bool) -> dict[str, Tensor] | str:
        if param == "bias" and self.mode == "add" and paired:
            return {"lora_B.bias": self.value}
        if self.mode == "set" and param == "scale" and form.norm_scales:
            return {"scale": self.value}
        if self.bias_rank is not None:
            return "the bias of a LoRA cannot be expressed in this dialect without that LoRA"
        if self.mode == "add" or not form.replaces:
            return "whole-weight changes cannot be expressed in this dialect"
        if self.inside and param != "bias":
            return f"the module's {param} was trained along with the adapter, and PEFT would read the base's instead"
        return {f"base_layer.{param}" if self.inside else param: self.value}

    # rows

    def rows(self, start: int, length: int) -> Self | None:
        return None if self.magnitude is not None else replace(self, value=self.value.rows(start, length))

    def joined(self, parts: Sequence[Factors | None], sizes: Sequence[int]) -> tuple[Factors, Blocks] | None:
        there = [part for part in parts if isinstance(part, Full)]

        def layout(part: Full) -> object:
            return part.mode, part.value.dtype, part.scale, part.value.shape[1:]

        if any(layout(part) != layout(self) for part in there) or (len(there) < len(parts) and self.mode == "set"):
            return None
        values = [
            part.value if isinstance(part, Full) else self.value.zero_rows(size)
            for part, size in zip(parts, sizes, strict=True)
        ]
        made = Blocks(tuple(1 if part is not None else 0 for part in parts), (None,) * len(parts), shared=True)
        return replace(self, value=stacked(values)), made

    def swapped(self) -> Factors | None:
        return replace(self, value=self.value.halves_exchanged())

    def reshaped(self, shape: tuple[int, ...]) -> Factors:
        return replace(self, value=self.value.reshaped(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows(Factors):
    """New rows of an embedding, for the tokens ``indices``."""

    value: Tensor
    indices: tuple[int, ...]

    kind: ClassVar[str] = "tokens"
    replacement: ClassVar[str] = "inweave.ops.delta.full:token_rows"
    suffixes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "peft": {"token_adapter.trainable_tokens_delta": "token_rows", "trainable_tokens_delta": "token_rows"}
    }
    additive: ClassVar[bool] = False
    takes_place: ClassVar[bool] = True

    @property
    def replaced_rows(self) -> tuple[int, ...]:
        return self.indices

    def shape(self) -> tuple[int, ...]:
        return (-1, self.value.shape[1])

    def fits(self, shape: tuple[int, ...]) -> bool:
        inside = max(self.indices, default=0) < shape[0] if shape else False
        return len(shape) == 2 and shape[1] == self.value.shape[1] and inside

    def fit_key(self) -> tuple[object, ...]:
        return (*Factors.fit_key(self), max(self.indices, default=0))

    @classmethod
    def recognize(cls, parts: Parts) -> None:
        if not parts.has("token_rows"):
            return
        value = parts.left["token_rows"]
        keys = parts.take("token_rows")
        indices = parts.config.tokens_of(parts.config_name) if parts.config else None
        if indices is None:
            reason = "trained tokens, but no adapter_config.json names their ids (trainable_token_indices)"
            parts.unsupported(keys, reason)
        elif len(value.shape) != 2 or value.shape[0] != len(indices):
            reason = f"{list(value.shape)} for {len(indices)} tokens; one row per token was expected"
            parts.malformed(keys, reason)
        else:
            parts.make(cls(value=value, indices=indices), keys)

    @classmethod
    def missing(cls, config: PeftSettings, modules: Collection[str]) -> str:
        if modules or not config.token_indices:
            return ""
        return "trainable_token_indices lists tokens, but the file has no rows for them: the base's are used"

    def peft_tensors(self, form: Form, param: str, paired: bool) -> dict[str, Tensor] | str:
        if not form.replaces:
            return f"{self.kind} cannot be expressed in this dialect"
        return {"token_adapter.trainable_tokens_delta": self.value}
