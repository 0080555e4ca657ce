"""A module with adapters: the state of one layer, and the one forward formula.

    y = base(x) + sum over the live adapters of  weight * scale * op(dropout(x), product)

    live: active, of a weight other than 0, and the layer neither merged nor disabled
    op:   the layer's own function with another weight and no bias (`through`); a low-rank pair goes in two steps,
          up(down(x)), and its product is never made (`low_rank`)
    DoRA: V = W + scale * product;  c = magnitude / |V|      |V| over the inputs, no gradient through it
          y = base(x) + weight * ((c - 1) * (base(x) - bias) + c * scale * op(dropout(x), product))

The base output is never scaled, and with nothing live the base is called and that is all. Dropout is on the input
for every network: LyCORIS has none for LoHa and LoKr, and this is what LoRA means by it. LoHa's and LoKr's products
are made anew in each forward, in float32, and rounded once to the input's dtype.

A layer takes its module's place in the model and shares its parameter table: the same `Parameter` objects under
the same names (`<module>.weight`), so nothing is copied and a state dict of the base loads and saves as before.
An adapter's own parameters are `<module>.adapters.<name>.down`, `.up`, or `.w1_a`, ... by role.

    merge    W <- round(W + sum of the changes), taken from the original W in float32; in place, one rounding
    unmerge  W <- the saved bits; nothing is ever subtracted
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.nn import functional

from inweave.errors import AlreadyMerged, ConfigError, MergeStateError, NotMerged, TargetError
from inweave.layers.factors import to_factors
from inweave.layers.lora import Pair
from inweave.layers.term import Term
from inweave.ops.delta import change


class LoraLayer(nn.Module):
    """Base of the layer kinds (`inweave.layers.kinds`); holds any number of named adapters.

    ``names``: where the module stands in the model; several for a shared module.
    ``tied``: the weight is also another module's; a merge then gives this one a weight of its own.
    """

    base: nn.Module
    adapters: nn.ModuleDict
    #: the weight is stored as (in, out)
    transposed: ClassVar[bool] = False
    #: inputs are numbers of rows, not vectors
    embedding: ClassVar[bool] = False

    def __init__(self, base: nn.Module, names: Iterable[str] = (), *, tied: bool = False) -> None:
        super().__init__()
        self.__dict__["base"] = base  # not a child: its parameters are ours
        self._parameters = base._parameters
        self._buffers = base._buffers
        self._non_persistent_buffers_set = base._non_persistent_buffers_set
        self.training = base.training
        self.names = tuple(names)
        self.tied = tied
        self.adapters = nn.ModuleDict()
        self.strengths: dict[str, float] = {}
        self.active: tuple[str, ...] = ()
        self._off = False
        self._merged = False
        self._pristine: torch.Tensor | None = None
        self._live: tuple[str, ...] = ()
        self._acting: tuple[tuple[Term, float], ...] = ()  # the same, looked up: forward asks no dictionary
        rows, columns, *kernel = self.weight.shape
        self.out, self.into = (columns, (rows,)) if self.transposed else (rows, (columns, *kernel))

    # what a kind says about itself

    @property
    def device(self) -> torch.device:
        """Where adapters belong: with the weight; on the CPU while the model has no data yet."""
        found: torch.device = self.weight.device
        return torch.device("cpu") if found.type == "meta" else found

    @property
    def groups(self) -> int:
        return 1

    def low_rank(self, x: torch.Tensor, pair: Pair, dtype: torch.dtype) -> torch.Tensor:
        """up(down(x)), without the scale."""
        raise NotImplementedError(type(self).__name__)

    def through(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The layer's own function with this weight (out, into...), without a bias."""
        raise NotImplementedError(type(self).__name__)

    def along_outputs(self, vector: torch.Tensor) -> torch.Tensor:
        """One number an output, so that it broadcasts over the layer's result."""
        return vector

    # forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plain: torch.Tensor = self.base(x)
        result = plain
        for term, strength in self._acting:
            given = functional.dropout(x, term.dropout, self.training) if term.dropout and not self.embedding else x
            dtype = x.dtype if x.is_floating_point() else plain.dtype
            if isinstance(term, Pair):
                branch = self.low_rank(given, term, dtype)
            else:
                branch = self.through(given, term.product().to(dtype).reshape(self.out, *self.into))
            branch = branch.to(plain.dtype)
            if term.magnitude is None:
                result = torch.add(result, branch, alpha=strength * term.scale)
            else:
                result = torch.add(result, self._decomposed(plain, branch, term), alpha=strength)
        return result

    def _decomposed(self, plain: torch.Tensor, branch: torch.Tensor, term: Term) -> torch.Tensor:
        """(c - 1) * (base(x) - bias) + c * scale * branch"""
        assert term.magnitude is not None
        factor = self.along_outputs(term.magnitude / self.norms(term))
        if (bias := self._parameters.get("bias")) is not None:
            plain = plain - self.along_outputs(bias)
        return (factor - 1).to(plain.dtype) * plain + (factor * term.scale).to(plain.dtype) * branch

    @torch.no_grad()
    def norms(self, term: Term) -> torch.Tensor:
        """|W + scale * product| over the inputs, one a row, in float32."""
        changed = term.product() * term.scale
        weight = self.weight.T if self.transposed else self.weight.flatten(1)
        norm: torch.Tensor = torch.linalg.vector_norm(changed + weight, dim=1)
        return norm.clamp_min(torch.finfo(norm.dtype).tiny)

    # adapters

    @property
    def label(self) -> str:
        return " = ".join(self.names) or type(self).__name__

    def term(self, name: str) -> Term:
        """What the adapter called ``name`` adds here."""
        return cast("Term", self.adapters[name])

    def pair(self, name: str) -> Pair:
        """The same, of an adapter that is known to be LoRA."""
        return cast("Pair", self.adapters[name])

    def add(self, name: str, term: Term, strength: float = 1.0) -> None:
        """A new adapter, active from the start."""
        self.require_unmerged("add an adapter")
        if name in self.adapters:
            raise ConfigError(f"{self.label}: an adapter {name!r} is already there; delete it or take another name")
        self.adapters[name] = term
        self.strengths[name] = strength
        self.active = (*self.active, name)
        self._refresh()

    def delete(self, name: str) -> None:
        self.require_unmerged("delete an adapter")
        self._require_known([name])
        del self.adapters[name], self.strengths[name]
        self.active = tuple(other for other in self.active if other != name)
        self._refresh()

    def activate(self, names: Iterable[str] | Mapping[str, float]) -> None:
        """Exactly these adapters act, together; a mapping gives their weights too."""
        self.require_unmerged("switch adapters")
        chosen = tuple(dict.fromkeys(names))
        self._require_known(chosen)
        if isinstance(names, Mapping):
            self.strengths |= {name: finite_strength(names[name]) for name in chosen}
        self.active = chosen
        self._refresh()

    def set_strength(self, name: str, strength: float) -> None:
        self.require_unmerged("change a strength")
        self._require_known([name])
        self.strengths[name] = finite_strength(strength)
        self._refresh()

    @property
    def enabled(self) -> bool:
        return not self._off

    def enable(self, on: bool) -> None:
        self.require_unmerged("enable or disable adapters")
        self._off = not on
        self._refresh()

    def _refresh(self) -> None:
        stopped = self._off or self._merged
        self._live = () if stopped else tuple(name for name in self.active if self.strengths[name] != 0)
        self._acting = tuple((self.term(name), self.strengths[name]) for name in self._live)

    def _require_known(self, names: Iterable[str]) -> None:
        unknown = [name for name in names if name not in self.adapters]
        if unknown:
            known = ", ".join(self.adapters) or "none"
            raise ConfigError(f"{self.label}: no adapter named {unknown[0]!r}; it has {known}")

    # merging

    @property
    def merged(self) -> bool:
        return self._merged

    def require_unmerged(self, action: str) -> None:
        if self._merged:
            raise MergeStateError(f"{self.label}: cannot {action} while merged; unmerge first")

    @torch.no_grad()
    def merge(self) -> None:
        """Put the live adapters into the weight; the layer then costs what the base costs."""
        if self._merged:
            raise AlreadyMerged(f"{self.label}: its adapters are merged already")
        if self._off:
            raise MergeStateError(f"{self.label}: cannot merge while its adapters are disabled")
        woven = None
        if self._live:
            weight = self.weight
            woven = self._woven(weight.detach()).to(weight.dtype)
            if not bool(woven.isfinite().all()) and bool(weight.isfinite().all()):
                raise TargetError(
                    f"{self.label}: merging {', '.join(self._live)} gives numbers that {weight.dtype} cannot hold; "
                    "nothing was changed"
                )
            self._pristine = weight if self.tied else weight.detach().clone()
        self._merged = True  # from here on unmerge restores, whatever happens
        if self.tied and woven is not None:
            self._parameters["weight"] = nn.Parameter(woven, requires_grad=self.weight.requires_grad)
        elif woven is not None:
            self.weight.copy_(woven)
        self._refresh()

    @torch.no_grad()
    def unmerge(self) -> None:
        """Put the saved bits back."""
        if not self._merged:
            raise NotMerged(f"{self.label}: nothing is merged")
        if isinstance(self._pristine, nn.Parameter):
            self._parameters["weight"] = self._pristine
        elif self._pristine is not None:
            self.weight.copy_(self._pristine)
        self._pristine = None
        self._merged = False
        self._refresh()

    def _woven(self, weight: torch.Tensor) -> torch.Tensor:
        total = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
        for name in self._live:
            factors = to_factors(self.term(name), transposed=self.transposed, embedding=self.embedding)
            total += change(factors, weight, self.strengths[name])
        return total

    # being the module it stands for

    def train(self, mode: bool = True) -> LoraLayer:
        self.base.train(mode)
        return super().train(mode)

    def __getattr__(self, name: str) -> Any:
        """`in_features`, `kernel_size`, ... are the base's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "base" not in self.__dict__:
                raise
            return getattr(self.__dict__["base"], name)

    def extra_repr(self) -> str:
        state = "merged" if self._merged else "disabled" if self._off else f"active: {', '.join(self.active) or 'none'}"
        return f"{self.base!r}, {state}"


def finite_strength(strength: float) -> float:
    if not math.isfinite(strength):
        raise ConfigError(f"an adapter's strength must be a finite number, got {strength!r}")
    return float(strength)
