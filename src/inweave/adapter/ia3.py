"""(IA)^3: one trained number per row or column, in two opposite conventions.

offset (LyCORIS):  delta = W * v          over the outputs, or over the inputs with `on_input`
factor (PEFT):     W'    = W * l          `l` starts at one; output scaling also scales the bias
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from inweave.adapter.contract import Form, Parts
from inweave.adapter.factors import Factors
from inweave.adapter.tensor import Tensor, scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Ia3(Factors):
    """One vector along the outputs or the inputs."""

    vector: Tensor
    on_input: bool
    convention: Literal["offset", "factor"]
    stored_on_input: Tensor | None = None

    kind: ClassVar[str] = "ia3"
    replacement: ClassVar[str] = "inweave.ops.delta.ia3:replaced"
    written: ClassVar[Mapping[str, str]] = {"vector": "weight", "stored_on_input": "on_input"}
    suffixes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "lycoris": {"on_input": "on_input"},
        "peft": {"ia3_l": "ia3_l"},
    }
    named_suffixes: ClassVar[tuple[str, ...]] = ("ia3_l",)
    orphans: ClassVar[Mapping[str, str]] = {"on_input": "the (IA)^3 vector is missing"}
    additive: ClassVar[bool] = False

    def shape(self) -> tuple[int, ...]:
        return (-1, self.vector.numel) if self.on_input else (self.vector.numel, -1)

    def fits(self, shape: tuple[int, ...]) -> bool:
        return Factors.fits(self, shape) or (len(shape) > 2 and Factors.fits(self, shape[:2]))

    def kohya_suffixes(self) -> Mapping[str, str]:
        return self.written if self.convention == "offset" else {}

    def kohya_tensors(self, form: Form, param: str) -> dict[str, Tensor] | str:
        tensors = Factors.kohya_tensors(self, form, param)
        flag = {} if isinstance(tensors, str) or "on_input" in tensors else {"on_input": scalar(self.on_input, "F32")}
        return tensors if isinstance(tensors, str) else tensors | flag

    @classmethod
    def recognize(cls, parts: Parts) -> None:
        if parts.has("plain_weight", "on_input"):
            vector, flag = parts.left["plain_weight"], parts.left["on_input"]
            keys = parts.take("plain_weight", "on_input")
            if (number := flag.number()) is None:
                parts.malformed(keys, f"on_input is {flag}; one number was expected")
                return
            made = cls(vector=vector, on_input=bool(number), convention="offset", stored_on_input=flag)
            parts.make(made, keys)
        if parts.has("ia3_l"):
            vector, config = parts.left["ia3_l"], parts.config
            keys, shape = parts.take("ia3_l"), vector.shape
            on_input = config.is_feedforward(parts.config_name) if config else len(shape) > 1 and shape[0] == 1
            transposed = config.fan_in_fan_out if config else False
            made = cls(vector=vector, on_input=on_input, convention="factor", transposed=transposed)
            parts.make(made, keys)
            if not on_input:  # PEFT scales the layer's output, so the bias as well; skipped if there is none
                parts.make(replace(made, transposed=False), keys, "bias?")
