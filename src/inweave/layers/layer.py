"""A module with adapters: the state of one layer and its forward formula.

    y = base(x) + sum over the live adapters of  strength * scale * apply(dropout(x), product)

    live:  active, with nonzero strength, in a layer that is neither merged nor disabled
    apply: the layer's own function with another weight and no bias (`LayerKind.apply`); a low-rank pair is applied in
           two steps, up(down(x)), without computing its product (`LayerKind.apply_low_rank`)
    DoRA:  V = W + scale * product;  c = magnitude / |V|      |V| over the inputs, no gradient through it
           y = base(x) + strength * ((c - 1) * apply(x, W) + c * scale * apply(dropout(x), product))
           where apply(x, W) = base(x) - bias, unless the module's class is registered and overrides forward

On a GPU a linear layer and its LoRAs are one operation (`inweave.layers.fused`), and so are a convolution and its LoRA
in training (`inweave.layers.fused_conv`): the same formula with fewer roundings. `inweave.layers.qat` computes with W
as merging into a quantized base would store it.

The base output is never scaled, and with no live adapters the layer just calls the base. Dropout applies to the input
for every algorithm, as in LoRA (LyCORIS has none for LoHa and LoKr); a LoRA may also have dropout between its factors
(`inweave.layers.dropout`). The products of LoHa and LoKr are recomputed in each forward pass in float32, and rounded
once to the input's dtype.

A layer takes its module's place in the model and shares its parameter table: the same `Parameter` objects under the
same names (`<module>.weight`), so nothing is copied, and the base's state dict loads and saves as before. Adapter
parameters are `<module>.adapters.<name>.down`, `.up`, or `.w1_a`, ... by role.

    merge    W <- round(W + sum of the changes), computed from the original W in float32; in place, one rounding;
             a quantized W is dequantized, and the sum quantized again (`inweave.ops.quantized`)
    unmerge  W <- the saved bits; nothing is ever subtracted
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn

from inweave.adapter import Factors
from inweave.adapter.strength_spec import finite_strength
from inweave.errors import AlreadyMerged, ConfigError, MergeStateError, NotMerged, TargetError
from inweave.layers.branch import Branch, Geometry
from inweave.layers.dropout import dropout, layer_number
from inweave.layers.fused import FusedLinear, Operation, is_plain_linear
from inweave.layers.fused_conv import FusedConv, is_plain_conv
from inweave.layers.merge_target import merge_target
from inweave.ops.delta import change
from inweave.ops.kinds import STANDARD_FORWARDS, LayerKind, adds_to_output, registered_kind
from inweave.ops.kinds.offloaded import execution_device, numbers
from inweave.ops.merge import all_usable, usable_numbers
from inweave.ops.quantized import QuantizedLayer, QuantizedWeight, requantized, weight_like
from inweave.ops.tensors.subclasses import shares, whole


class LoraLayer(nn.Module):
    """A wrapper for a module of any kind (`inweave.ops.kinds`) that holds any number of named adapters.

    Args:
        base: the wrapped module.
        kind: its kind.
        names: the module's names in the model; several for a shared module.
        tied: another module holds the same weight, so a merge gives this one a separate weight.
    """

    base: nn.Module
    adapters: nn.ModuleDict

    def __init__(self, base: nn.Module, kind: LayerKind, names: Iterable[str] = (), *, tied: bool = False) -> None:
        super().__init__()
        self.__dict__["base"] = base  # not a child: the layer shares its parameters
        self._parameters = base._parameters
        self._buffers = base._buffers
        self._non_persistent_buffers_set = base._non_persistent_buffers_set
        self._modules.update(base._modules)  # a registered module may have children
        self.training = base.training
        self.kind = kind
        self.names = tuple(names)
        self.tied = tied
        self.adapters = nn.ModuleDict()
        self.strengths: dict[str, float] = {}
        self.active: tuple[str, ...] = ()
        self._custom = registered_kind(base) is not None and type(base).forward not in STANDARD_FORWARDS
        convolution = FusedConv(base) if is_plain_conv(base, kind) else None
        self.operation: Operation | None = FusedLinear(base) if is_plain_linear(base, kind) else convolution
        self._off = False
        self._merged = False
        self._pristine: torch.Tensor | None = None
        self._quantized: QuantizedWeight | None = None  # the original bits of a merged, quantized weight
        self._live: tuple[str, ...] = ()
        self._acting: tuple[tuple[Branch, float], ...] = ()  # the same with branches: saves lookups in forward
        self.out, self.into = kind.shape(weight_like(base) if isinstance(base, QuantizedLayer) else self.weight)

    # the wrapped module

    @property
    def device(self) -> torch.device:
        """The device for adapters: the weight's; for one on the meta device that of its offload hook, or the CPU."""
        if isinstance(self.base, QuantizedLayer):
            return self.base.quantized[0].device  # type: ignore[no-any-return]
        device: torch.device = self.weight.device
        return device if device.type != "meta" else execution_device(self.base) or torch.device("cpu")

    def numbers(self, leaf: str = "weight") -> torch.Tensor:
        """Return the weight (or the bias), or what accelerate's offloading keeps in its place.

        Raises:
            TargetError: it is on the meta device, and no hook of this module keeps its numbers.
        """
        for each in (self, self.base):
            if (stored := numbers(each, leaf)) is not None:
                return stored
        raise TargetError(f"{self.label}: its {leaf} is on the meta device, so it has no numbers; load it first")

    def _numbers_beside(self, other: torch.Tensor, leaf: str = "weight") -> torch.Tensor:
        """Return the weight (or the bias) to compute with ``other``: on the meta device, where shapes are, itself."""
        return getattr(self, leaf) if other.is_meta else self.numbers(leaf)

    def _home(self) -> torch.Tensor:
        """Return the tensor to write when merging; raise TargetError if it cannot be written."""
        home = merge_target((self, self.base), self.label, self.kind, (self.out, self.into), tied=self.tied)
        return self.numbers().detach() if home is None else home

    @property
    def transposed(self) -> bool:
        """Whether the weight is stored as (in, out)."""
        return self.kind.transposed

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.out, self.into, self.kind.groups(self.base), self.kind.embedding)

    def rows(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a stored weight as (out, all inputs)."""
        return weight.T if self.kind.transposed else weight.flatten(1)

    @property
    def acting(self) -> tuple[tuple[Branch, float], ...]:
        """The live adapters and their strengths."""
        return self._acting

    # forward

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        fused, acting = self.operation, self._acting
        if fused is not None and acting and not args and not kwargs:
            y = fused.output(x, acting, self.training)
            if y is not None:
                return y
        plain: torch.Tensor = self.base(x, *args, **kwargs)
        result = plain
        for branch, strength in acting:
            factor = strength if branch.magnitude is not None else strength * branch.scale
            result = self.kind.add(result, branch(self._change, x, plain), factor)
        return result

    def _change(self, branch: Branch, x: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
        """Return what a branch adds to the output at strength 1: unscaled, or with DoRA scaled."""
        dropped = branch.dropout and not self.kind.embedding
        inputs = dropout(x, branch.dropout, self.training, branch.row_seeds, branch.layer_number) if dropped else x
        dtype = x.dtype if x.is_floating_point() else plain.dtype
        added = branch.output(self.kind, self.base, inputs, dtype, self.training)
        if isinstance(plain, torch.Tensor):
            added = added.to(plain.dtype)
        change = added if branch.magnitude is None else self._decomposed(x, plain, added, branch)
        return branch.left_out(self.kind, self.base, change) if self.training and branch.drops_hidden else change

    def _decomposed(self, x: torch.Tensor, plain: torch.Tensor, added: torch.Tensor, branch: Branch) -> torch.Tensor:
        """Return (c - 1) * apply(x, W) + c * scale * added."""
        assert branch.magnitude is not None
        factor = self._magnified(branch, self.norms(branch))
        if self._custom:
            weight = self.rows(whole(self._numbers_beside(added))).reshape(self.out, *self.into)
            plain = self.kind.apply(self.base, x, weight.to(added))
        elif self._parameters.get("bias") is not None:
            plain = plain - self.kind.along_outputs(self.base, self._numbers_beside(plain, "bias").to(plain.device))
        change = (factor - 1).to(plain.dtype) * plain + (factor * branch.scale).to(plain.dtype) * added
        if not (self.training and branch.output_dropout):
            return change
        mask = branch.output_mask(self.kind, self.base, change)
        base_factor = self._magnified(branch, self.norms(branch, without_change=True))
        return mask * change + (1 - mask) * (base_factor - 1).to(plain.dtype) * plain

    def _magnified(self, branch: Branch, norms: torch.Tensor) -> torch.Tensor:
        """Return magnitude / norms, one per output."""
        return self.kind.along_outputs(self.base, cast("torch.Tensor", branch.magnitude) / norms)

    @torch.no_grad()
    def norms(self, branch: Branch, *, without_change: bool = False) -> torch.Tensor:
        """Return |W + scale * product| over the inputs, or |W|, one per row, in float32."""
        changed = branch.product() * (0 if without_change else branch.scale)
        weight = self.rows(whole(self._numbers_beside(changed))).to(changed.device, changed.dtype)
        norm: torch.Tensor = torch.linalg.vector_norm(changed + weight, dim=1)
        return norm.clamp_min(torch.finfo(norm.dtype).tiny)

    # adapters

    @property
    def label(self) -> str:
        return " = ".join(self.names) or type(self).__name__

    def branch(self, name: str) -> Branch:
        """Return the branch of the adapter called ``name``."""
        return cast("Branch", self.adapters[name])

    def factors(self, name: str) -> Factors:
        """Return the canonical factors of the adapter called ``name``."""
        kind = self.kind
        try:
            return self.branch(name).to_factors(
                transposed=kind.transposed, embedding=kind.embedding, groups=kind.groups(self.base)
            )
        except TargetError as error:
            raise TargetError(f"{self.label}: adapter {name!r}: {error}") from None

    def add(self, name: str, branch: Branch, strength: float = 1.0) -> None:
        """Add a new adapter and activate it."""
        self.require_unmerged("add an adapter")
        if name in self.adapters:
            raise ConfigError(f"{self.label}: an adapter {name!r} already exists; eject it or choose another name")
        branch.layer_number = layer_number(self.label)
        self.adapters[name] = branch
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
        """Make exactly these adapters active; a mapping also sets their strengths."""
        self.require_unmerged("switch adapters")
        chosen = tuple(dict.fromkeys(names))
        self._require_known(chosen)
        if isinstance(names, Mapping):
            self.strengths |= {name: finite_strength(names[name]) for name in chosen}
        self.active = chosen
        for name in self.adapters:
            self.branch(name).rest(name not in chosen)
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
        # sorted, so that the bits of the sum do not depend on the order of activation
        self._live = () if stopped else tuple(name for name in sorted(self.active) if self.strengths[name] != 0)
        self._acting = tuple((self.branch(name), self.strengths[name]) for name in self._live)
        self._drop_plan()

    def _drop_plan(self) -> None:
        """Drop the inference plan, which holds the memory of the adapters."""
        if isinstance(self.operation, FusedLinear):
            self.operation.plan = None

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

    def _require_mergeable(self) -> None:
        if self._merged:
            raise AlreadyMerged(f"{self.label}: its adapters are merged already")
        if self._off:
            raise MergeStateError(f"{self.label}: cannot merge while its adapters are disabled")

    @torch.no_grad()
    def merge(self) -> None:
        """Merge the live adapters into the weight; the layer then runs at the speed of the base."""
        self._require_mergeable()
        if isinstance(self.base, QuantizedLayer):
            self._merge_quantized(self.base)
            return
        woven = None
        if self._live:
            if self._custom and not adds_to_output(self.base, self.kind):
                raise TargetError(
                    f"{self.label}: {type(self.base).__name__} does more with its weight than its registered kind, so "
                    "merging would change the output; leave it unmerged, or register a LayerKind whose apply computes "
                    "the effect of a weight change"
                )
            home = self._home()
            weight = whole(home)
            wide = weight.float() if weight.dtype.itemsize == 1 else weight  # fp8 has no addition
            woven = self._woven(wide).to(weight.dtype)
            if not all_usable(woven) and bool((~usable_numbers(woven) & usable_numbers(weight)).any()):
                raise TargetError(
                    f"{self.label}: merging {', '.join(self._live)} gives numbers that {weight.dtype} cannot hold; "
                    "nothing was changed"
                )
            self._pristine = self.weight if self.tied else home.clone()
        self._merged = True  # set first, so that unmerge restores the weight even if the next lines raise
        if self.tied and woven is not None:
            self._parameters["weight"] = nn.Parameter(woven, requires_grad=self.weight.requires_grad)
        elif woven is not None:
            home.copy_(shares(woven, home))
        self._refresh()

    def _merge_quantized(self, base: QuantizedLayer) -> None:
        """Quantize the sum again, with new scales; the original bits are kept."""
        stored = base.quantized
        woven = self._woven(stored.dequantized(torch.float32).view(base.shape))
        if not woven.isfinite().all():
            raise TargetError(f"{self.label}: merging {', '.join(self._live)} gives numbers that are not finite")
        merged = requantized(stored, woven.flatten(1), self.label)
        self._quantized, self._merged = type(stored)(*(each.clone() for each in stored)), True  # before it is written
        base.write(merged)
        self._refresh()

    @torch.no_grad()
    def unmerge(self) -> None:
        """Restore the saved weight, bit for bit."""
        if not self._merged:
            raise NotMerged(f"{self.label}: nothing is merged")
        if isinstance(self.base, QuantizedLayer):
            if self._quantized is None:
                raise MergeStateError(f"{self.label}: quantized while merged; only eject(keep_merged=True) is left")
            self.base.write(self._quantized)
            self._quantized = None
        elif isinstance(self._pristine, nn.Parameter):
            self._parameters["weight"] = self._pristine
        elif self._pristine is not None:
            self._home().copy_(self._pristine)
        self._pristine = None
        self._merged = False
        self._refresh()

    def _woven(self, weight: torch.Tensor) -> torch.Tensor:
        total = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
        for name in self._live:
            total += change(self.factors(name), weight, self.strengths[name])
        return total

    # behaving like the wrapped module

    def train(self, mode: bool = True) -> LoraLayer:
        self.base.train(mode)
        return super().train(mode)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> LoraLayer:
        """Convert the parameters: the implementation of `.to`, `.half`, `.cpu` and the like."""
        self._drop_plan()
        if isinstance(self.base, QuantizedLayer):  # it knows which of its tensors a conversion may touch
            self.adapters._apply(fn, recurse)  # type: ignore[no-untyped-call]
            self.base._apply(fn, recurse)
        else:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getattr__(self, name: str) -> Any:
        """Look up `in_features`, `kernel_size`, ... in the base."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "base" not in self.__dict__:
                raise
            return getattr(self.__dict__["base"], name)

    def extra_repr(self) -> str:
        state = "merged" if self._merged else "disabled" if self._off else f"active: {', '.join(self.active) or 'none'}"
        return f"{self.base!r}, {state}"
