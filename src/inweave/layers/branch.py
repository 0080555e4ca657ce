"""The contribution of one adapter to one layer: its trained factors and the weight change they define.

    change = scale * product          product: (out, all inputs)

An algorithm is one subclass, named by `Factors.layer`: `initial` creates new factors for a module, `from_factors`
takes those of a file, and `to_factors` converts them back. The formula is the one used for merging
(`Factors.formula`), applied to live parameters.

`out` and `into` refer to the layer's weight viewed as (out, into...), regardless of its storage layout. The product of
a fresh branch is zero, so the layer's output is initially unchanged. Its values depend only on the seed and the
module's name, not on torch's global generator, the device, or the order of modules.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypedDict, Unpack

import torch
from torch import nn

from inweave.adapter import Factors, Magnitude, Tensor, imported, scale
from inweave.errors import TargetError
from inweave.layers.dropout import MODULE, OUTPUTS, RANKS, module_dropout, output_dropout, output_mask
from inweave.layers.spec import DROPOUTS, AdapterSpec
from inweave.ops.kinds import LayerKind
from inweave.ops.kinds.offloaded import numbers
from inweave.ops.linear import Rounded
from inweave.ops.quantized import weight_like
from inweave.ops.tensors.decode import Reader, encode


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of the layer that a branch is added to."""

    out: int
    into: tuple[int, ...]
    groups: int = 1
    embedding: bool = False
    experts: int = 0  # of a bare parameter; 0: a layer's weight
    inputs_first: bool = False  # it is stored as (experts, in, out)

    @property
    def columns(self) -> int:
        return math.prod(self.into)

    @property
    def wide(self) -> bool:
        """Whether it is a convolution wider than 1x1."""
        return any(size > 1 for size in self.into[1:])


class Scaling(TypedDict, total=False):
    """The optional properties that any branch may have besides its factors; see `inweave.adapter.factors`."""

    magnitude: torch.Tensor | None
    alpha: float | None
    rslora: bool
    dropout: float
    hidden_dropout: float
    rank_dropout: float
    module_dropout: float
    output_dropout: float
    stored_alpha: Tensor | None
    stored_scale: Tensor | None


@dataclass(frozen=True, slots=True)
class Start:
    """The inputs for a fresh branch: the layer, the rank on it, and the device and dtype of the parameters."""

    geometry: Geometry
    rank: int
    usual_rank: int  # the adapter's rank, without rank_pattern
    spec: AdapterSpec
    name: str
    device: torch.device
    dtype: torch.dtype


class Branch(nn.Module, ABC):
    """Parameters by role with their scaling, and a `magnitude` if the adapter has one (DoRA)."""

    magnitude: nn.Parameter | None
    #: the same algorithm as data
    factors_type: ClassVar[type[Factors]]
    #: the product of the factors, which are passed by role
    formula: ClassVar[Callable[..., torch.Tensor]]
    #: whether it supports embeddings
    takes_embeddings: ClassVar[bool] = False
    #: whether it is a low-rank pair `up` and `down`, applied in two steps
    is_pair: ClassVar[bool] = False
    #: the values of the training setting `network` that create such branches; empty: only the algorithm's name
    variants: ClassVar[tuple[str, ...]] = ()
    #: the fields of `AdapterSpec` that only this algorithm uses
    options: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.formula = staticmethod(imported(cls.factors_type.formula))

    def __init__(self, roles: Mapping[str, torch.Tensor | None], rank: int | None, **scaling: Unpack[Scaling]) -> None:
        super().__init__()
        for role, value in (*roles.items(), ("magnitude", scaling.get("magnitude"))):
            self.register_parameter(role, None if value is None else nn.Parameter(value))
        self._shapes = {role: value.shape for role, value in self._parameters.items() if value is not None}
        self._rested: tuple[str, ...] = ()  # roles that require gradients while the adapter is active
        self.rank = rank
        self.alpha = scaling.get("alpha")
        self.rslora = scaling.get("rslora", False)
        self.dropout = scaling.get("dropout", 0.0)
        self.hidden_dropout = scaling.get("hidden_dropout", 0.0)
        self.rank_dropout = scaling.get("rank_dropout", 0.0)
        self.module_dropout = scaling.get("module_dropout", 0.0)
        self.output_dropout = scaling.get("output_dropout", 0.0)
        self.row_seeds: torch.Tensor | None = None  # of the batch being computed; see `inweave.layers.dropout`
        self.layer_number: int | torch.Tensor = 0  # of the layer that has this branch
        self.rounded: Mapping[str, Rounded] = {}  # by role, during a training step; see `inweave.layers.fused`
        self.stored_alpha = _owned(scaling.get("stored_alpha"))
        self.stored_scale = _owned(scaling.get("stored_scale"))
        explicit = None if self.stored_scale is None else self.stored_scale.item()
        self.scale = scale(self.alpha, rank, rslora=self.rslora, explicit=explicit)

    # construction

    @classmethod
    @abstractmethod
    def initial(cls, start: Start, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return new factors by role, in float32 on the CPU."""

    @classmethod
    def fresh(cls, start: Start, **scaling: Unpack[Scaling]) -> Self:
        """Return a new branch for a module."""
        values = cls.initial(start, seeded(start.spec.seed, start.name))
        roles: dict[str, Any] = {role: value.to(start.device, start.dtype) for role, value in values.items()}
        return cls(**roles, **scaling)

    @classmethod
    def from_factors(cls, factors: Factors, geometry: Geometry, read: Reader, **scaling: Unpack[Scaling]) -> Self:
        """Return a branch with the values of a file; the factors must fit the layer (`obstacle`)."""
        roles: dict[str, Any] = {role: read(tensor) for role, tensor in factors.tensors().items()}
        return cls(**roles, **scaling)

    @classmethod
    def obstacle(cls, factors: Factors, geometry: Geometry) -> str | None:
        """Return why these factors do not fit the layer, or None if they do; runs the formula on meta tensors."""
        try:
            roles = {role: torch.empty(tensor.shape, device="meta") for role, tensor in factors.tensors().items()}
            shape = cls.formula(**roles).flatten(1).shape
        except (TargetError, RuntimeError, IndexError) as error:
            return f"its factors do not fit together ({str(error).splitlines()[0]})"
        return changes_another_shape(shape, geometry)

    # description

    @classmethod
    def network(cls) -> str:
        """Return the name of the algorithm, as used in a file's metadata and in `AdapterSpec.network`."""
        return cls.factors_type.kind

    def variant(self) -> str:
        """Return the value of the training setting `network` for such a branch; an algorithm may have several."""
        return self.network()

    def roles(self) -> dict[str, nn.Parameter]:
        """Return the factors by role, without the magnitude."""
        return {role: value for role, value in self._parameters.items() if value is not None and role != "magnitude"}

    def to_factors(self, *, transposed: bool, embedding: bool = False, groups: int = 1) -> Factors:
        """Return the branch as canonical factors, bit-identical to the parameters."""
        values = {role: encode(self._numbers(role)) for role, value in self._parameters.items() if value is not None}
        magnitude = values.pop("magnitude", None)
        return self.factors_type(
            **values,  # type: ignore[arg-type]
            **self.further_fields(embedding, groups),
            magnitude=None if magnitude is None else Magnitude(magnitude, "out"),
            alpha=self.alpha,
            stored_alpha=self.stored_alpha,
            stored_scale=self.stored_scale,
            rslora=self.rslora,
            transposed=transposed,
        )

    def _numbers(self, role: str) -> torch.Tensor:
        value = numbers(self, role)
        if value is None or value.is_meta:
            raise TargetError(f"{role} is on the meta device, so it has no numbers; load them first")
        if value.shape != (expected := self._shapes.get(role, value.shape)):
            raise TargetError(
                f"{role} has the shape {list(value.shape)} here instead of {list(expected)}: a part of it, as FSDP "
                "shows it; gather the parameters first (FSDP.summon_full_params), or use fully_shard"
            )
        return value

    def further_fields(self, embedding: bool, groups: int) -> dict[str, Any]:
        """Return the fields of the canonical factors that are not tensors."""
        return {}

    # gradients

    def rest(self, resting: bool) -> None:
        """Stop requiring gradients while the adapter is not active; afterwards the same parameters require them."""
        for role in self._parameters if resting else self._rested:
            value = self._parameters[role]
            if value is not None and value.requires_grad is resting:
                value.requires_grad_(not resting)
                self._rested = (*self._rested, role) if resting else self._rested
        self._rested = self._rested if resting else ()

    # computation

    def forward(self, compute: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Return compute(branch, *inputs). A layer's forward pass reads the parameters inside of this call only, since
        offloading, FSDP and the like load a module's parameters when it is called.
        """
        return compute(self, *inputs)

    def product(self) -> torch.Tensor:
        """Return the product as (out, all inputs), in float32 (float64 for float64 factors), differentiable."""
        return type(self).formula(**{role: exact(value) for role, value in self.roles().items()}).flatten(1)

    def product_norm(self) -> torch.Tensor:
        """Return the Frobenius norm of the product."""
        norm: torch.Tensor = torch.linalg.vector_norm(self.product())
        return norm

    @property
    def drops_hidden(self) -> bool:
        """Whether it has a dropout behind its input: between its factors, or of what it adds (`left_out`)."""
        return bool(self.hidden_dropout or self.rank_dropout or self.module_dropout or self.output_dropout)

    @property
    def drops_between(self) -> bool:
        """Whether it has a dropout between two factors."""
        return False

    @property
    def drops(self) -> bool:
        """Whether it has any dropout."""
        return bool(self.dropout or self.drops_hidden)

    def left_out(self, kind: LayerKind, module: nn.Module, change: torch.Tensor) -> torch.Tensor:
        """Return what it adds in training, without the outputs and examples that are dropped.

        A low-rank pair drops ranks and examples between its factors instead, unless it has a magnitude; with one, the
        layer leaves outputs out before it applies the magnitude.
        """
        if self.output_dropout and self.magnitude is None:
            change = change * self.output_mask(kind, module, change)
        if self.is_pair and self.magnitude is None:
            return change
        axis = -kind.along_outputs(module, change.new_empty(1)).dim()
        if self.rank_dropout:
            number = self.layer_number + RANKS
            change = output_dropout(change, self.rank_dropout, axis, self.row_seeds, number)
        if self.module_dropout:
            change = module_dropout(change, self.module_dropout, axis, self.row_seeds, self.layer_number + MODULE)
        return change

    def output_mask(self, kind: LayerKind, module: nn.Module, change: torch.Tensor) -> torch.Tensor:
        """Return 0 for the outputs of the change that `output_dropout` leaves out, and 1 for the others."""
        axis, number = -kind.along_outputs(module, change.new_empty(1)).dim(), self.layer_number + OUTPUTS
        return output_mask(change, self.output_dropout, axis, self.row_seeds, number)

    def output(
        self, kind: LayerKind, module: nn.Module, x: torch.Tensor, dtype: torch.dtype, training: bool = False
    ) -> torch.Tensor:
        """Return the addition to the module's output, before scaling; the product is rounded once to ``dtype``.

        ``training`` enables dropout between the factors; the layer itself applies the dropout of ``x``.
        """
        out, into = kind.shape(weight_like(module))
        return kind.apply(module, x, self.product().to(dtype).reshape(out, *into))

    def added_to(self, weight: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the weight with ``factor`` times the product added, in its dtype; for a bare parameter."""
        return torch.add(weight, self.product().to(weight.dtype).view_as(weight), alpha=factor)

    def extra_repr(self) -> str:
        parts = ["full" if self.rank is None else f"rank={self.rank}"]
        parts += [] if self.alpha is None else [f"alpha={self.alpha:g}"]
        parts += [name for name, is_set in (("rslora", self.rslora), ("dora", self.magnitude is not None)) if is_set]
        return ", ".join([*parts, *(f"{name}={p:g}" for name in DROPOUTS if (p := getattr(self, name)))])


def changes_another_shape(shape: tuple[int, ...], geometry: Geometry) -> str | None:
    """Return a message if a change of this shape does not fit the layer, else None."""
    expected = (geometry.out, geometry.columns)
    return None if tuple(shape) == expected else f"it changes {list(shape)}, the layer has {list(expected)}"


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the dtype that products are computed in: at least float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def seeded(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def kaiming(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Return values uniform within 1 / sqrt(fan in): Kaiming with a = sqrt(5), torch's default for its layers."""
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _owned(tensor: Tensor | None) -> Tensor | None:
    """Return a copy that is not a view of a mapped file, so that a model with adapters can be copied and pickled."""
    return None if tensor is None else Tensor(tensor.dtype, tensor.shape, bytes(tensor.data))
