"""What one adapter adds on one layer: its trained factors, and the change they make.

    change = scale * product          product: (out, all inputs)

An algorithm is one subclass, named by `Factors.layer`: `initial` gives new factors for a module, `from_factors` takes
those of a file, and `to_factors` gives them back. The formula is the one merging uses (`Factors.formula`), on live
parameters.

`out` and `into` are those of the layer's weight seen as (out, into...), whichever way it is stored. A fresh branch's
product is zero, so that the layer's output does not change yet. Its values depend on the seed and the module's name
alone: not on torch's global generator, the device, or the order of modules.
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
from inweave.layers.spec import DROPOUTS, AdapterSpec
from inweave.ops.kinds import LayerKind
from inweave.ops.linear import Rounded
from inweave.ops.tensors.decode import Reader, encode


@dataclass(frozen=True, slots=True)
class Geometry:
    """Of the layer that a branch goes on."""

    out: int
    into: tuple[int, ...]
    groups: int = 1
    embedding: bool = False

    @property
    def columns(self) -> int:
        return math.prod(self.into)

    @property
    def wide(self) -> bool:
        """Whether it is a convolution wider than 1x1."""
        return any(size > 1 for size in self.into[1:])


class Scaling(TypedDict, total=False):
    """What every branch may have besides its factors; see `inweave.adapter.factors`."""

    magnitude: torch.Tensor | None
    alpha: float | None
    rslora: bool
    dropout: float
    hidden_dropout: float
    rank_dropout: float
    stored_alpha: Tensor | None
    stored_scale: Tensor | None


@dataclass(frozen=True, slots=True)
class Start:
    """What a fresh branch is made from: the layer, its rank there, and where the parameters will be."""

    geometry: Geometry
    rank: int
    usual_rank: int  # of the adapter as a whole
    spec: AdapterSpec
    name: str
    device: torch.device
    dtype: torch.dtype


class Branch(nn.Module, ABC):
    """Parameters by role, and where the adapter has one a `magnitude`; with their scaling."""

    magnitude: nn.Parameter | None
    #: the same algorithm as data
    factors_type: ClassVar[type[Factors]]
    #: its product of factors, passed by role
    formula: ClassVar[Callable[..., torch.Tensor]]
    #: whether it can look up rows of a table
    takes_embeddings: ClassVar[bool] = False
    #: whether it is a low-rank pair `up` and `down`, applied in two steps
    is_pair: ClassVar[bool] = False
    #: the values of the training setting `network` that make such branches; empty: the algorithm's name alone
    variants: ClassVar[tuple[str, ...]] = ()
    #: the fields of `AdapterSpec` that only this algorithm has
    options: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.formula = staticmethod(imported(cls.factors_type.formula))

    def __init__(self, roles: Mapping[str, torch.Tensor | None], rank: int | None, **scaling: Unpack[Scaling]) -> None:
        super().__init__()
        for role, value in (*roles.items(), ("magnitude", scaling.get("magnitude"))):
            self.register_parameter(role, None if value is None else nn.Parameter(value))
        self.rank = rank
        self.alpha = scaling.get("alpha")
        self.rslora = scaling.get("rslora", False)
        self.dropout = scaling.get("dropout", 0.0)
        self.hidden_dropout = scaling.get("hidden_dropout", 0.0)
        self.rank_dropout = scaling.get("rank_dropout", 0.0)
        self.row_seeds: torch.Tensor | None = None  # of the batch being computed; see `inweave.layers.dropout`
        self.layer_number: int | torch.Tensor = 0  # of the layer it is on
        self.rounded: Mapping[str, Rounded] = {}  # by role, while a training step computes; see `inweave.layers.fused`
        self.stored_alpha = _owned(scaling.get("stored_alpha"))
        self.stored_scale = _owned(scaling.get("stored_scale"))
        explicit = None if self.stored_scale is None else self.stored_scale.item()
        self.scale = scale(self.alpha, rank, rslora=self.rslora, explicit=explicit)

    # where it comes from

    @classmethod
    @abstractmethod
    def initial(cls, start: Start, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """New factors by role, in float32 on the CPU."""

    @classmethod
    def fresh(cls, start: Start, **scaling: Unpack[Scaling]) -> Self:
        """A new branch for a module."""
        values = cls.initial(start, seeded(start.spec.seed, start.name))
        roles: dict[str, Any] = {role: value.to(start.device, start.dtype) for role, value in values.items()}
        return cls(**roles, **scaling)

    @classmethod
    def from_factors(cls, factors: Factors, geometry: Geometry, read: Reader, **scaling: Unpack[Scaling]) -> Self:
        """A branch with a file's numbers; the factors fit the layer, see `obstacle`."""
        roles: dict[str, Any] = {role: read(tensor) for role, tensor in factors.tensors().items()}
        return cls(**roles, **scaling)

    @classmethod
    def obstacle(cls, factors: Factors, geometry: Geometry) -> str | None:
        """Why these factors do not fit the layer, or None if they do. The formula itself is tried, without data."""
        try:
            roles = {role: torch.empty(tensor.shape, device="meta") for role, tensor in factors.tensors().items()}
            shape = cls.formula(**roles).flatten(1).shape
        except (TargetError, RuntimeError, IndexError) as error:
            return f"its factors do not meet ({str(error).splitlines()[0]})"
        return changes_another_shape(shape, geometry)

    # what it is

    @classmethod
    def network(cls) -> str:
        """The name of the algorithm, as a file's metadata and `AdapterSpec.network` have it."""
        return cls.factors_type.kind

    def variant(self) -> str:
        """The value of the training setting `network` that makes such a branch: an algorithm may have several."""
        return self.network()

    def roles(self) -> dict[str, nn.Parameter]:
        """The factors it has, without the magnitude."""
        return {role: value for role, value in self._parameters.items() if value is not None and role != "magnitude"}

    def to_factors(self, *, transposed: bool, embedding: bool = False) -> Factors:
        """The same numbers as data, with the parameters' own bits."""
        return self.factors_type(
            **{role: encode(value) for role, value in self.roles().items()},  # type: ignore[arg-type]
            **self.further_fields(embedding),
            magnitude=None if self.magnitude is None else Magnitude(encode(self.magnitude), "out"),
            alpha=self.alpha,
            stored_alpha=self.stored_alpha,
            stored_scale=self.stored_scale,
            rslora=self.rslora,
            transposed=transposed,
        )

    def further_fields(self, embedding: bool) -> dict[str, Any]:
        """Fields of the canonical factors that are no tensors."""
        return {}

    # what it computes

    def product(self) -> torch.Tensor:
        """(out, all inputs), in float32 (float64 where the factors are), with a gradient."""
        return type(self).formula(**{role: exact(value) for role, value in self.roles().items()}).flatten(1)

    def product_norm(self) -> torch.Tensor:
        """The Frobenius norm of the product."""
        norm: torch.Tensor = torch.linalg.vector_norm(self.product())
        return norm

    @property
    def drops_hidden(self) -> bool:
        """Whether it has a dropout between its factors, which a low-rank pair alone can have: `hidden_dropout_problem`."""
        return bool(self.hidden_dropout or self.rank_dropout)

    @property
    def drops(self) -> bool:
        """Whether it has any dropout."""
        return bool(self.dropout or self.drops_hidden)

    def output(
        self, kind: LayerKind, module: nn.Module, x: torch.Tensor, dtype: torch.dtype, training: bool = False
    ) -> torch.Tensor:
        """What it adds to the module's output, before the scale; the product is rounded once to ``dtype``.

        ``training``: whether a dropout inside of it acts; that of ``x`` is the layer's.
        """
        out, into = kind.shape(module.weight)  # type: ignore[arg-type]
        return kind.apply(module, x, self.product().to(dtype).reshape(out, *into))

    def extra_repr(self) -> str:
        parts = ["full" if self.rank is None else f"rank={self.rank}"]
        parts += [] if self.alpha is None else [f"alpha={self.alpha:g}"]
        parts += [name for name, is_set in (("rslora", self.rslora), ("dora", self.magnitude is not None)) if is_set]
        return ", ".join([*parts, *(f"{name}={p:g}" for name in DROPOUTS if (p := getattr(self, name)))])


def changes_another_shape(shape: tuple[int, ...], geometry: Geometry) -> str | None:
    expected = (geometry.out, geometry.columns)
    return None if tuple(shape) == expected else f"it changes {list(shape)}, the layer has {list(expected)}"


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """In the dtype products are made in: at least float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def seeded(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def kaiming(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Uniform within 1 / sqrt(fan in): kaiming with a = sqrt 5, as torch initializes its own layers."""
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _owned(tensor: Tensor | None) -> Tensor | None:
    """Without a view into a mapped file, so that a model with adapters can be copied and sent elsewhere."""
    return None if tensor is None else Tensor(tensor.dtype, tensor.shape, bytes(tensor.data))
