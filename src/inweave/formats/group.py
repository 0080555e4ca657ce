"""The tensors one module has in a file, and taking them apart role by role.

What every algorithm may have besides its own factors is taken here: alpha, an explicit scale, a DoRA
magnitude, a sparse residual, a widened base; with what the file's configuration says about them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from inweave.adapter import Factors, Magnitude, Problem, Ref, Residual, Tensor
from inweave.formats.config import PeftConfig, is_true, network_args
from inweave.formats.grammar import Key, unwrapped
from inweave.formats.shapes import shape_problem

_ZERO = Tensor("F32", (), bytes(4))

SHARED_ROLES = (
    "alpha",
    "scale",
    "dora_scale",
    "magnitude",
    "reshape_weight",
    "bias_indices",
    "bias_values",
    "bias_size",
)


@dataclass(slots=True)
class Group:
    """Everything a file stores for one module, by role."""

    ref: Ref
    prefix: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    families: set[str] = field(default_factory=set)
    module: str = ""
    has_adapter_name: bool = False

    def add(self, role: str, key: Key, tensor: Tensor) -> None:
        self.tensors[role] = tensor
        self.keys[role] = key.raw
        self.module = self.module or key.module
        self.has_adapter_name = self.has_adapter_name or key.name is not None
        if key.family:
            self.families.add(key.family)


@dataclass(slots=True)
class Context:
    """What the whole file says about its groups."""

    metadata: Mapping[str, str]
    peft: PeftConfig | None
    components: Mapping[str, PeftConfig]
    trainer_exact: bool = False
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    used_shared: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)
    projection_keys: tuple[str | None, str | None] | None = None

    def projections(self) -> tuple[str | None, str | None]:
        """The keys of VeRA's shared pair."""
        if self.projection_keys is None:
            down, up = (next((key for key in self.shared if key.endswith(end)), None) for end in (".vera_A", ".vera_B"))
            self.projection_keys = down, up
        return self.projection_keys

    def config_of(self, group: Group) -> PeftConfig | None:
        return self.peft or self.components.get(group.ref.component or "unet") or self.components.get("")

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


def single(tensor: Tensor) -> float | None:
    """The only number of a tensor, or None if it does not hold exactly one that can be read."""
    if tensor.numel != 1:
        return None
    try:
        return tensor.item()
    except ValueError:
        return None


class Work:
    """One group being taken apart: roles are taken once, made entries collect."""

    def __init__(self, group: Group, context: Context) -> None:
        self.group = group
        self.context = context
        self.left = dict(group.tensors)
        self.made: list[tuple[Ref, str, Factors, tuple[str, ...]]] = []
        self.problems: list[Problem] = []

    def has(self, *roles: str) -> bool:
        return all(map(self.left.__contains__, roles))

    def take(self, *roles: str) -> tuple[str, ...]:
        return tuple(self.group.keys[role] for role in roles if self.left.pop(role, None) is not None)

    def take_all(self) -> tuple[str, ...]:
        return self.take(*tuple(self.left))

    def make(self, factors: Factors, keys: tuple[str, ...], param: str = "weight", part: int | None = None) -> None:
        if wrong := shape_problem(factors):
            self.malformed(keys, wrong)
            return
        ref = self.group.ref if part is None else replace(self.group.ref, part=part)
        self.made.append((ref, param, factors, keys))

    def malformed(self, keys: tuple[str, ...], reason: str) -> None:
        self.problems.append(Problem("malformed", keys, f"{self.group.ref}: {reason}"))

    def shared(self, config: PeftConfig | None, *, constraint: bool = False) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The fields every algorithm may have, taken from the group and the configuration."""
        left, group = self.left, self.group
        fields: dict[str, Any] = {}
        keys = self.take_keys("alpha")
        if "alpha" in left:
            alpha = left.pop("alpha")
            number = single(alpha)
            if number is None or not math.isfinite(number):
                self.malformed(keys, f"alpha is {alpha if number is None else number}; one finite number was expected")
            else:
                fields["alpha"], fields["stored_alpha"] = number, alpha
                if fields["alpha"] == 0 and not constraint:
                    self.context.warn(
                        "alpha 0 is read as alpha = rank (scale 1), as the trainers that write it mean it"
                    )
        elif config and config.peft_type in ("LORA", "LOHA", "LOKR"):
            fields["alpha"] = config.alpha_of(self.config_name())
            if fields["alpha"] == 0:
                fields["stored_scale"] = _ZERO
                self.context.warn("alpha is 0 in adapter_config.json: scaled by 0 as PEFT does, so it changes nothing")
        if config:
            fields["rslora"] = config.rslora
            fields["transposed"] = config.fan_in_fan_out
        if "scale" in left and left["scale"].numel == 1:
            own_keys = self.take_keys("scale")
            stated = left.pop("scale")
            number = single(stated)
            if number is None or not math.isfinite(number):
                self.malformed(
                    own_keys, f"scale is {stated if number is None else number}; one finite number was expected"
                )
            else:
                fields["stored_scale"] = stated
                keys += own_keys
        if magnitude := self._magnitude():
            fields["magnitude"], magnitude_keys = magnitude
            keys += magnitude_keys
        elif config and config.dora and not constraint:
            self.problems.append(
                Problem(
                    "orphan",
                    tuple(self.group.keys.values()),
                    f"{group.ref}: adapter_config.json has use_dora, but the file has no magnitude (lora_magnitude_vector) here",
                )
            )
        if self.has("bias_indices", "bias_values", "bias_size"):
            fields["residual"] = Residual(left["bias_indices"], left["bias_values"], left["bias_size"])
            keys += self.take("bias_indices", "bias_values", "bias_size")
        if "reshape_weight" in left:
            sizes = left["reshape_weight"]
            own_keys = self.take("reshape_weight")
            if sizes.dtype[0] in "IU" and 0 < sizes.numel <= 8:
                fields["widen"] = sizes.ints()
                keys += own_keys
            else:
                self.malformed(own_keys, f"reshape_weight is {sizes}; a short list of whole numbers was expected")
        if self.context.trainer_exact and is_true(network_args(self.context.metadata).get("split_qkv")):
            parts = 4 if group.ref.name.endswith("linear1") else 3 if group.ref.name.endswith("qkv") else 1
            if parts > 1 and fields.get("alpha") is not None:
                fields["alpha"], fields["stored_alpha"] = fields["alpha"] * parts, None
        return fields, keys

    def take_keys(self, role: str) -> tuple[str, ...]:
        return (self.group.keys[role],) if role in self.left else ()

    def config_name(self) -> str:
        """The module path that PEFT's patterns are written for."""
        module = unwrapped(self.group.module)
        return module.removeprefix("base_model.model.") if self.context.peft else self.group.ref.name

    def _magnitude(self) -> tuple[Magnitude, tuple[str, ...]] | None:
        """PEFT's vector always has one number per row; `dora_scale` tells its axis by shape, (1, in) or (out, 1)."""
        if "magnitude" in self.left:
            tensor = self.left["magnitude"]
            return Magnitude(tensor, "out"), self.take("magnitude")
        if "dora_scale" in self.left:
            tensor = self.left["dora_scale"]
            on_input = len(tensor.shape) > 1 and tensor.shape[0] == 1
            if len(tensor.shape) == 1 and (width := self._width()) is not None:
                out, into = width
                on_input = tensor.numel != out and tensor.numel == into
            return Magnitude(tensor, "in" if on_input else "out"), self.take("dora_scale")
        return None

    def _width(self) -> tuple[int, int] | None:
        tensors = self.group.tensors
        for left, right in (("up", "down"), ("w1_a", "w1_b")):
            if left in tensors and right in tensors and tensors[left].shape and len(tensors[right].shape) > 1:
                return tensors[left].shape[0], tensors[right].shape[1]
        return None
