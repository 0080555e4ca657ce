"""The base class of all algorithms: the change of one target tensor.

An algorithm is one class in each of three packages; everything else depends only on these classes:

    inweave.adapter     a subclass of `Factors`: its tensors by role, how files spell them, shapes, cutting and joining
    inweave.ops.delta   the formula, named by ``formula`` (a product of the factors) or ``replacement`` (a new weight)
    inweave.layers      the trainable branch, named by ``layer``

    change(strength) = strength * delta                       additive algorithms
    delta            = scale * product(factors)               scale: see `inweave.adapter.scale`
    with a magnitude:  V = W + delta;  delta = V * magnitude / |V| - W      (DoRA)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from inweave.adapter.contract import Blocks, Form, Parts, PeftSettings
from inweave.adapter.magnitude import Magnitude, joined_magnitude, magnitude_rows, swapped_magnitude
from inweave.adapter.residual import Residual
from inweave.adapter.scale import scale
from inweave.adapter.tensor import Tensor, int_list, scalar, stacked


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Fields common to all algorithms; a subclass adds its tensors as fields and defines their names in files.

    ``alpha`` is None if the file has none. ``stored_alpha`` and ``stored_scale`` are the tensors that held those
    numbers, so that writing reproduces the same bits. ``transposed`` marks a change for a base that stores the weight
    as (in, out): embeddings and transformers' Conv1D. ``widen`` is the shape that the base weight is zero-padded to
    before anything is added.

    A new algorithm sets ``kind``, ``suffixes``, ``written``, ``formula`` and, to be trained, ``layer``; it implements
    `rank`, `shape` and `recognize`, and overrides other methods whose defaults do not fit.
    """

    alpha: float | None = None
    stored_alpha: Tensor | None = None
    stored_scale: Tensor | None = None
    rslora: bool = False
    magnitude: Magnitude | None = None
    residual: Residual | None = None
    transposed: bool = False
    widen: tuple[int, ...] | None = None

    #: the algorithm's name
    kind: ClassVar[str] = ""
    #: "module:function" of the product of the factors, which are passed by field name
    formula: ClassVar[str] = ""
    #: "module:function" (factors, reader, base weight, strength) -> change, of an algorithm that sets the new weight
    replacement: ClassVar[str] = ""
    #: "module:class" of the trainable `Branch`; empty if it cannot be a layer
    layer: ClassVar[str] = ""

    #: family of dialects -> {suffix: role}, everything that is read
    suffixes: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    #: suffixes after which PEFT may leave an adapter's name
    named_suffixes: ClassVar[tuple[str, ...]] = ()
    #: ends of keys that all modules of a file share, and the reason to report if no module uses them
    file_suffixes: ClassVar[tuple[str, ...]] = ()
    unused_file_tensors: ClassVar[str] = ""
    #: role -> the reason to report if it is left over
    orphans: ClassVar[Mapping[str, str]] = {}
    #: the roles whose shapes begin with the outputs and end with the inputs, to determine the axis of a magnitude
    sides: ClassVar[tuple[str, str] | None] = None
    #: field -> suffix in kohya's family of dialects; empty if that family has none
    written: ClassVar[Mapping[str, str]] = {}
    #: the type of a PEFT directory that holds it
    peft_type: ClassVar[str] = ""
    #: the name tables of the families whose loaders in diffusers read it, in files that hold nothing else
    diffusers_families: ClassVar[tuple[str, ...]] = ()

    #: each output row of the change depends on that row of the weight alone
    row_local: ClassVar[bool] = True
    #: the change is a multiple of the strength and needs no base weight
    additive: ClassVar[bool] = True
    whole: ClassVar[bool] = False  # the values themselves are stored, not factors of a product
    #: without factors to be a layer: in a live model the result takes the parameter's place
    takes_place: ClassVar[bool] = False
    #: alpha limits a rotation and is never a scale
    constraint: ClassVar[bool] = False
    #: a convolution's kernel is in the columns of its factors
    kernel_in_columns: ClassVar[bool] = False
    #: control adapters of this algorithm may have twice the base's input channels
    widens_inputs: ClassVar[bool] = False
    #: made for a bare parameter of a module, which is not the weight of a layer
    of_parameter: ClassVar[bool] = False
    #: files number the parts of a fused module
    numbers_parts: ClassVar[bool] = False

    # the change

    @property
    def rank(self) -> int | None:
        """The rank; None if the algorithm has none."""
        return None

    @property
    def scale_rank(self) -> int | None:
        """The number that alpha is divided by; None if alpha scales nothing."""
        return self.rank

    @property
    def peft_rank(self) -> int | None:
        """The rank in PEFT's configuration; None if PEFT does not scale this algorithm."""
        return self.rank if self.peft_type else None

    @property
    def scale(self) -> float:
        """The number that multiplies the product."""
        if self.constraint:
            return 1.0
        explicit = self.stored_scale.item() if self.stored_scale else None
        return scale(self.alpha, self.scale_rank, rslora=self.rslora, explicit=explicit)

    @property
    def algorithm(self) -> str:
        """The name for users: "lora", "locon", "dora", "lokr", "norm", ..."""
        return self.kind if self.magnitude is None else f"dora-{self.kind}"

    @property
    def replaces(self) -> bool:
        """Whether it sets the new weight instead of adding to the old one."""
        return bool(self.replacement)

    @property
    def replaced_rows(self) -> tuple[int, ...] | None:
        """The rows that get new values whatever the base has, empty if it only adds; None: all of them."""
        return None if self.replaces else ()

    @property
    def nesting(self) -> tuple[int, tuple[str, ...]] | None:
        """Depth in PEFT's wrappers and the parameters that it may be for; None if the parameter is certain."""
        return None

    def of_leaf(self, leaf: str) -> Factors:
        """Return the change for one of the parameters of `nesting`."""
        return self

    def shape(self) -> tuple[int, ...]:
        """Return the shape of the change, before any arithmetic; `-1` for an axis that depends on the base."""
        raise NotImplementedError(type(self).__name__)

    def tensors(self) -> dict[str, Tensor]:
        """Return the algorithm's tensors by field, without those common to all algorithms (alpha, magnitude, ...)."""
        shared = {f.name for f in fields(Factors)}
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in shared}
        return {role: value for role, value in own.items() if isinstance(value, Tensor)}

    def formula_options(self, shape: Sequence[int] | None, weight: Any) -> dict[str, Any]:
        """Return the arguments of the formula besides the factors; ``weight`` is a torch tensor or None."""
        return {}

    def decisive_tensors(self) -> list[Tensor]:
        """Return the tensors that make the whole change zero if any of them is all zeros."""
        return []

    def needs_base(self) -> bool:
        """Return whether the change depends on the values of the base weight."""
        return self.magnitude is not None or not self.additive

    def shape_problem(self) -> str:
        """Return why the factors have no product, checked when they are read; empty if they have one."""
        return ""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether the change fits a weight of this shape; only flattened shapes are compared."""
        got = self.stored_shape()
        if not shape:
            return False
        if len(shape) == 1:  # a vector receives (IA)^3 scaling only
            return got in ((shape[0], -1), (shape[0],))
        rows, columns = shape[0], math.prod(shape[1:])
        if got[0] not in (-1, rows):
            return False
        if self.magnitude is not None:
            on_rows = (self.magnitude.axis == "out") != self.transposed
            if self.magnitude.tensor.numel != (rows if on_rows else shape[1]):
                return False
        return -1 in got[1:] or math.prod(got[1:]) == columns

    @property
    def weight_inputs(self) -> int | None:
        """The inputs of a weight that the change multiplies; None if it does not depend on the weight."""
        return None

    def fit_key(self) -> tuple[object, ...]:
        """Return everything that decides whether the change fits a shape, as a cache key."""
        magnitude = self.magnitude and (self.magnitude.axis, self.magnitude.tensor.numel)
        return type(self), self.shape(), self.transposed, self.widen, magnitude

    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape of the change in the layout of the weight."""
        shape = self.shape()
        return shape[::-1] if self.transposed and len(shape) == 2 else shape

    def oriented(self, shape: Sequence[int], siblings: Sequence[Sequence[int]]) -> Factors:
        """Return the change as it applies to a weight that it fits; ``siblings``: the shapes of the module's others."""
        return self

    # reading

    @classmethod
    def recognize(cls, parts: Parts) -> None:
        """Take this algorithm's roles out of a module's tensors, if they are complete, and make entries of them."""
        raise NotImplementedError(cls.__name__)

    @classmethod
    def missing(cls, config: PeftSettings, modules: Collection[str]) -> str:
        """Return a warning about tensors that a PEFT configuration lists and the file lacks; empty if there is none.

        ``modules``: those that have this algorithm.
        """
        return ""

    # writing

    def spelled(self, form: Form, param: str, *, paired: bool = False) -> dict[str, Tensor] | str:
        """Return the tensors by the suffixes of a dialect, or why it cannot express them.

        ``param``: the changed parameter of the module; ``paired``: a LoRA of the same scale is on the same module.
        """
        if form.family == "peft":
            if form.peft_type not in ("LORA", self.kind.upper()):
                return f"a file of PEFT's type {form.peft_type} holds nothing else"
            if self.residual is not None or self.stored_scale is not None:
                return "a sparse residual or an explicit scale cannot be expressed in this dialect"
            return self.peft_tensors(form, param, paired)
        if self.transposed:
            return "a change for a transposed weight (embedding, Conv1D) cannot be expressed in this dialect"
        return self.kohya_tensors(form, param)

    def kohya_tensors(self, form: Form, param: str) -> dict[str, Tensor] | str:
        """Return the tensors by kohya's or LyCORIS' suffix, or the reason why there are none."""
        suffixes = self.kohya_suffixes()
        if not suffixes:
            return f"{self.kind} as PEFT stores it cannot be expressed in this dialect"
        tensors = {suffixes[role]: tensor for role, tensor in self.tensors().items()} | self.alpha_tensor()
        if self.stored_scale is not None:
            tensors["scale"] = self.stored_scale
        if self.magnitude is not None:
            tensors["dora_scale"] = self.kohya_magnitude()
        if self.residual is not None:
            residual = self.residual
            tensors |= {"bias_indices": residual.indices, "bias_values": residual.values, "bias_size": residual.size}
        if self.widen is not None:
            if not form.widens:
                return "a widened base weight cannot be expressed in this dialect"
            tensors["reshape_weight"] = int_list(self.widen)
        return tensors

    def peft_tensors(self, form: Form, param: str, paired: bool) -> dict[str, Tensor] | str:
        """Return the tensors by PEFT's suffix, or the reason why there are none."""
        return f"{self.kind} cannot be expressed in this dialect"

    def peft_form(self) -> Factors:
        """Return the same change in the form that PEFT stores, where that is another one."""
        return self

    def within_groups(self, shape: Sequence[int]) -> Factors | None:
        """Return the same change for the weight of a grouped convolution, read in PEFT's form, or None."""
        return None

    @classmethod
    def peft_options(cls, entries: Sequence[Factors]) -> dict[str, object]:
        """Return the fields of an adapter_config.json that only this algorithm has."""
        return {}

    def kohya_suffixes(self) -> Mapping[str, str]:
        """Return the suffixes by field for these factors; ``written`` by default."""
        return self.written

    def report_suffixes(self) -> Mapping[str, str]:
        """Return {field: the suffix of its tensor in reports}: PEFT's, or LyCORIS' if PEFT has none."""
        return {**self.written, "magnitude": "dora_scale"}

    def alpha_tensor(self) -> dict[str, Tensor]:
        """Return the stored alpha, or one made from the number if the source stored it elsewhere."""
        if self.stored_alpha is not None and not self.rslora:
            return {"alpha": self.stored_alpha}
        if self.alpha is None:
            return {}
        alpha = self.alpha
        if self.rslora and self.rank:
            alpha = self.scale * self.rank  # the kohya family has no rs-LoRA: folded, as LyCORIS does it
        try:
            return {"alpha": scalar(alpha, "F32")}
        except ValueError:
            return {"alpha": scalar(alpha, "F64")}

    def kohya_magnitude(self) -> Tensor:
        """Return the magnitude as (out, 1, ...) or (1, in, ...), with as many axes as the change has."""
        assert self.magnitude is not None
        tensor, size = self.magnitude.tensor, self.magnitude.tensor.numel
        if self.magnitude.axis == "in":
            return tensor if len(tensor.shape) > 1 else tensor.reshaped((1, size))
        axes = max(len(self.shape()), len(tensor.shape), 2)
        return tensor.reshaped((size,) + (1,) * (axes - 1))

    # rows: cutting fused changes apart, joining them, exchanging halves; None if that is not exact

    def row_roles(self) -> Mapping[str, int]:
        """Return the factors that hold the output rows: field -> output rows per row of its tensor."""
        return {}

    def rows(self, start: int, length: int) -> Self | None:
        """Return the same algorithm restricted to some output rows."""
        units = self.row_roles()
        if not units or not self.cuttable() or any(start % unit or length % unit for unit in units.values()):
            return None
        own = self.tensors()
        pieces: dict[str, Any] = {role: own[role].rows(start // unit, length // unit) for role, unit in units.items()}
        magnitude = magnitude_rows(self.magnitude, self.shape()[0], start, length)
        return replace(self, **pieces, magnitude=magnitude)

    def cut(self, sizes: Sequence[int], made: Blocks | None = None) -> list[Factors | None] | None:
        """Return the parts of a fused change, None for a part that ``made`` records as absent."""
        known = made is not None and made.shared and made.describes(len(sizes))
        ranks = made.ranks if made is not None and known else (1,) * len(sizes)
        starts = (sum(sizes[:i]) for i in range(len(sizes)))
        parts = [self.rows(a, n) if rank else None for a, n, rank in zip(starts, sizes, ranks, strict=True)]
        return parts if all(p is not None or not r for p, r in zip(parts, ranks, strict=True)) else None

    def joined(self, parts: Sequence[Factors | None], sizes: Sequence[int]) -> tuple[Factors, Blocks] | None:
        """Return the fused change of parts of this class: row factors are stacked, all others must be equal.

        ``self`` is the first part that is not None.
        """
        units, magnitude, own = (
            self.row_roles(),
            joined_magnitude([part.magnitude if part else None for part in parts]),
            self.tensors(),
        )
        if not units or magnitude is False:
            return None
        for part in filter(None, parts):
            if part.tensors().keys() != own.keys() or part.alpha != self.alpha or part.residual or part.stored_scale:
                return None
            if any(not part.tensors()[role].same(tensor) for role, tensor in own.items() if role not in units):
                return None
        stacks: dict[str, Any] = {
            role: stacked(
                [
                    part.tensors()[role] if part is not None else own[role].zero_rows(size // unit)
                    for part, size in zip(parts, sizes, strict=True)
                ]
            )
            for role, unit in units.items()
        }
        made = Blocks(tuple(1 if p is not None else 0 for p in parts), (self.alpha,) * len(parts), shared=True)
        return replace(self, **stacks, magnitude=magnitude), made

    def swapped(self) -> Factors | None:
        """Return the change with the two halves of its output rows exchanged: (shift, scale) <-> (scale, shift)."""
        own, roles = self.tensors(), self.row_roles()
        if not roles or not self.cuttable() or any(own[role].shape[0] % 2 for role in roles):
            return None
        halves: dict[str, Any] = {role: own[role].halves_exchanged() for role in roles}
        return replace(self, **halves, magnitude=swapped_magnitude(self.magnitude))

    def reshaped(self, shape: tuple[int, ...]) -> Factors:
        """Return whole values in another shape; factors are unchanged."""
        return self

    def cuttable(self) -> bool:
        """Return whether the rows are independent: no input-axis magnitude and no sparse residual."""
        return self.residual is None and (self.magnitude is None or self.magnitude.axis == "out")

    def rows_are_local(self) -> bool:
        """Return whether a slice of rows can be computed from only the same rows of the base."""
        return self.row_local and (self.magnitude is None or self.magnitude.axis == "out")


def join(parts: Sequence[Factors | None], sizes: Sequence[int]) -> tuple[Factors, Blocks] | None:
    """Return one fused change of the parts that are not None, or None if no exact form exists."""
    there = [part for part in parts if part is not None]
    if any(type(part) is not type(there[0]) for part in there):
        return None
    return there[0].joined(parts, sizes)


def flat_shape(tensor: Tensor) -> tuple[int, int]:
    """Return (first axis, product of the rest): the shape of a weight in every formula."""
    return tensor.shape[0], math.prod(tensor.shape[1:])


def product_shape(left: Tensor, right: Tensor, core: Tensor | None) -> tuple[int, ...] | None:
    """Return the shape of left @ right, or of the Tucker product with a core; None if the ranks differ."""
    if core is None:
        meets = math.prod(left.shape[1:]) == right.shape[0] > 0
        return (left.shape[0], math.prod(right.shape[1:])) if meets else None
    flat = len(left.shape) == len(right.shape) == 2 and len(core.shape) > 2
    meets = flat and core.shape[:2] == (left.shape[0], right.shape[0]) and 0 not in core.shape[:2]
    return (left.shape[1], right.shape[1], *core.shape[2:]) if meets else None
