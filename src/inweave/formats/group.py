"""The tensors of one module in a file, and their separation by role.

The fields that all algorithms share are read here, together with their configuration: alpha, an explicit scale, a DoRA
magnitude, a sparse residual, a widened base.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from inweave.adapter import Factors, KeyProblem, Magnitude, Ref, Residual, Tensor
from inweave.formats.config import PeftConfig, is_true, network_args, unnested
from inweave.formats.grammar import Key, is_number, unwrapped

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

#: the end of the name under which PEFT stores the output projection of torch's MultiheadAttention
PACKED = ".base_layer.out_proj"


@dataclass(slots=True)
class Group:
    """The tensors that a file stores for one module, by role."""

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
    """The properties of a whole file that its groups depend on."""

    metadata: Mapping[str, str]
    peft: PeftConfig | None
    components: Mapping[str, PeftConfig]
    trainer_exact: bool = False
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    used_shared: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)
    packed: frozenset[str] = frozenset()  # modules that are torch's MultiheadAttention
    _file_keys: dict[str, str | None] = field(default_factory=dict)

    def file_tensor(self, suffix: str) -> tuple[str, Tensor] | None:
        """Return the key and the tensor that all modules share under a suffix."""
        if suffix not in self._file_keys:
            self._file_keys[suffix] = next((key for key in self.shared if key.endswith(suffix)), None)
        key = self._file_keys[suffix]
        return None if key is None else (key, self.shared[key])

    def config_of(self, group: Group) -> PeftConfig | None:
        return self.peft or self.components.get(group.ref.component or "unet") or self.components.get("")

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


def packed_modules(groups: Iterable[Group], context: Context) -> frozenset[str]:
    """Return the modules that are torch's MultiheadAttention: PEFT adapts both of its projections."""
    names = {group.ref.name for group in groups}
    inner = {name.removesuffix(PACKED) for name in names if name.endswith(PACKED)}
    bare = context.peft.target_parameters if context.peft else ()
    return frozenset(name for name in inner & names if not any(each.startswith(f"{name}.") for each in bare))


class ModuleParts:
    """The view of one group for algorithms (`inweave.adapter.contract.Parts`), which collects entries and problems."""

    def __init__(self, group: Group, context: Context) -> None:
        self.group = group
        self.context = context
        self.config = context.config_of(group)
        self.left = dict(group.tensors)
        self.depth, self.candidates = -1, tuple[str, ...]()
        self.parameter = self._parameter()
        name = group.ref.name
        #: PEFT (to 0.21) adds the change of a MultiheadAttention's out_proj twice: merged by its layer and by the outer
        self.twice = name.removesuffix(PACKED) in context.packed and name.endswith(PACKED)
        if name in context.packed:
            group.ref = replace(group.ref, name=f"{name}.in_proj")
        elif ".base_layer." in name and self.is_peft:
            group.ref = replace(group.ref, name=name.replace(".base_layer.", "."))
        self.made: list[tuple[Ref, str, Factors, tuple[str, ...]]] = []
        self.problems: list[KeyProblem] = []
        self.warn = context.warn
        self.file_tensor = context.file_tensor

    def _parameter(self) -> str:
        """Return the bare parameter that the tensors are for, by PEFT's configuration; empty for a layer's weight."""
        config, group = self.config, self.group
        if config is None or not config.target_parameters or not self.has("down", "up"):
            return ""
        rows = self.left["down"].shape[0] if self.left["down"].shape else 0
        leaves, (name, depth) = config.parameters_of(group.ref.name, rows), unnested(group.ref.name)
        if depth >= len(leaves) or leaves[-1 - depth] == "weight":
            return ""
        group.ref = replace(group.ref, name=name)
        self.depth, self.candidates = (depth, tuple(leaves)) if len(leaves) > 1 else (-1, ())
        return leaves[-1 - depth]

    @property
    def config_name(self) -> str:
        """The path that PEFT's patterns are written for: of the module, or of the parameter."""
        module = unwrapped(self.group.module)
        name = module.removeprefix("base_model.model.") if self.context.peft else self.group.ref.name
        if self.parameter:
            return f"{unnested(name)[0]}.{self.parameter}"
        return name.partition(".base_layer.")[0]  # the inner layer of a MultiheadAttention has its rank and alpha

    @property
    def rslora(self) -> bool:
        """Whether the metadata specifies rs-LoRA."""
        metadata = self.context.metadata
        return is_true(network_args(metadata).get("rs_lora")) or is_true(metadata.get("rs_lora"))

    @property
    def dimension(self) -> int:
        """The rank that kohya's metadata states; 0 if there is none."""
        text = self.context.metadata.get("ss_network_dim", "")
        return int(text) if is_number(text) and int(text) < 10_000 else 0

    @property
    def is_peft(self) -> bool:
        """Whether PEFT wrote these tensors."""
        return self.context.peft is not None or self.group.prefix == "peft" or "peft" in self.group.families

    def has(self, *roles: str) -> bool:
        """Return whether all of these roles are left."""
        return all(map(self.left.__contains__, roles))

    def take(self, *roles: str) -> tuple[str, ...]:
        """Remove these roles and return their keys."""
        return tuple(self.group.keys[role] for role in roles if self.left.pop(role, None) is not None)

    def make(
        self,
        factors: Factors,
        keys: tuple[str, ...],
        param: str = "weight",
        *,
        part: int | None = None,
        inner: str = "",
    ) -> bool:
        """Add an entry, or a problem if the shapes do not fit together; return whether it was added."""
        residual = factors.residual
        if wrong := factors.shape_problem() or (residual.shape_problem(factors.shape()) if residual else ""):
            sizes = ", ".join(f"{role} {list(tensor.shape)}" for role, tensor in factors.tensors().items())
            self.malformed(keys, f"{wrong}: {sizes}")
            return False
        ref = self.group.ref if part is None else replace(self.group.ref, part=part)
        if inner:
            ref = replace(ref, name=f"{ref.name}_{inner}" if ref.flat else f"{ref.name}.{inner}")
        self.made.append((ref, param, factors, keys))
        if self.context.shared:
            self.context.used_shared.update(keys)
        return True

    def malformed(self, keys: tuple[str, ...], reason: str) -> None:
        """Report tensors with wrong values or shapes."""
        self.problems.append(KeyProblem("malformed", keys, f"{self.group.ref}: {reason}"))

    def unsupported(self, keys: tuple[str, ...], reason: str) -> None:
        """Report tensors that cannot be applied."""
        self.problems.append(KeyProblem("unsupported", keys, reason))

    def shared(self, algorithm: type[Factors], *, configured: bool = True) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Take the fields every algorithm may have from the group and, if ``configured``, from the configuration."""
        left, group, config = self.left, self.group, self.config if configured else None
        fields: dict[str, Any] = {}
        keys: tuple[str, ...] = ()
        if "alpha" in left:
            alpha, keys = left["alpha"], self.take("alpha")
            if (number := self._finite("alpha", alpha, keys)) is not None:
                fields["alpha"], fields["stored_alpha"] = number, alpha
                if number == 0 and not algorithm.constraint:
                    self.warn("alpha 0 is read as alpha = rank (scale 1), as the trainers that write it mean it")
        elif config and config.peft_type in ("LORA", "LOHA", "LOKR"):
            fields["alpha"] = config.alpha_of(self.config_name)
            if fields["alpha"] == 0:
                fields["stored_scale"] = _ZERO
                self.warn("alpha is 0 in adapter_config.json: scaled by 0 as PEFT does, so it changes nothing")
        if self.twice and fields.get("alpha"):
            fields["alpha"], fields["stored_alpha"] = fields["alpha"] * 2, None
        if config:
            fields["rslora"] = config.rslora
            fields["transposed"] = config.fan_in_fan_out
        if "scale" in left and left["scale"].numel == 1:
            stated, own_keys = left["scale"], self.take("scale")
            if self._finite("scale", stated, own_keys) is not None:
                fields["stored_scale"] = stated
                keys += own_keys
        if magnitude := self._magnitude(algorithm):
            fields["magnitude"], magnitude_keys = magnitude
            keys += magnitude_keys
        elif config and config.dora and not algorithm.constraint:
            self.problems.append(
                KeyProblem(
                    "orphan",
                    tuple(self.group.keys.values()),
                    f"{group.ref}: adapter_config.json has use_dora, "
                    "but the file has no magnitude (lora_magnitude_vector) here",
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

    def _finite(self, name: str, tensor: Tensor, keys: tuple[str, ...]) -> float | None:
        """Return the only number of a tensor; report it if there is none or it is not finite."""
        number = tensor.number()
        if number is not None and math.isfinite(number):
            return number
        self.malformed(keys, f"{name} is {tensor if number is None else number}; one finite number was expected")
        return None

    def _magnitude(self, algorithm: type[Factors]) -> tuple[Magnitude, tuple[str, ...]] | None:
        """Take the magnitude: PEFT's has one number per row; for `dora_scale` the shape is (1, in) or (out, 1)."""
        if "magnitude" in self.left:
            return Magnitude(self.left["magnitude"], "out"), self.take("magnitude")
        if "dora_scale" not in self.left:
            return None
        tensor, tensors = self.left["dora_scale"], self.group.tensors
        on_input = len(tensor.shape) > 1 and tensor.shape[0] == 1
        if len(tensor.shape) == 1 and algorithm.sides is not None:
            left, right = (tensors[role].shape if role in tensors else () for role in algorithm.sides)
            if left and len(right) > 1:
                on_input = tensor.numel != left[0] and tensor.numel == right[1]
        return Magnitude(tensor, "in" if on_input else "out"), self.take("dora_scale")
