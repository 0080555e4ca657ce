"""Resize and combine: adapters as one LoRA of another rank, without ever building the full matrix.

    [s1*up1 s2*up2 ..] = Qu Ru     [down1; down2; ..]^T = Qd Rd       s = strength * scale
    Ru Rd^T = U diag(sigma) V^T                                       a core as small as the ranks together
    up = Qu U_r sqrt(sigma_r)      down = sqrt(sigma_r) V_r^T Qd^T    the best rank-r product there is
    kept energy = sum_(i <= r) sigma_i^2 / sum_i sigma_i^2

A Tucker core is contracted into `down` first, groups become a block-diagonal `up`. Scales and strengths are
folded in: the result's alpha is its rank (none, where no source had one), so its scale is 1.

One file at strength 1: modules that are small enough keep their bits, and so do those that are not low-rank pairs
(LoHa, LoKr, DoRA, rotations, differences), which are listed. Several files, or another strength: differences add
up, and every other kind is an error that names its modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard

import torch

from inweave.adapter import Adapter, Entry, Factors, Full, Lokr, Lora, Tensor
from inweave.errors import ConfigError, TargetError
from inweave.exchange.convert import Conversion
from inweave.formats.dialects.base import CANDLE_ALPHA, DIFFUSERS_CONFIG, PEFT_CONFIG, STORED_ALPHA
from inweave.ops.tensors.decode import DTYPE_NAMES, TORCH, decode, encode
from inweave.targets.index import Component, ModelIndex
from inweave.targets.links import Naming
from inweave.targets.plan import Placement
from inweave.targets.respell import BLOCKS, respell
from inweave.weights.stack import Strength

_PLAIN = ("F64", "F32", "F16", "BF16")
_NOISE = 1e-7  # singular values below this share of the largest are rounding errors
#: metadata that describes the old factors, or hashes them
_STALE = (BLOCKS, STORED_ALPHA, CANDLE_ALPHA, PEFT_CONFIG, DIFFUSERS_CONFIG, "lora_adapter_metadata",
          "sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256")  # fmt: skip
#: metadata of the first file that a combination keeps
_MODEL = ("modelspec.architecture", "ss_base_model_version", "base_model", "ot_model_type")


@dataclass(frozen=True, slots=True)
class Row:
    """One module: the sum of its ranks before, its rank now, and the share of the squared norm that is kept."""

    module: str
    before: int
    rank: int
    energy: float
    norm: float  # squared, of the whole change


@dataclass(slots=True)
class Resized:
    """The result of `resize`. ``rows``: each module with the energy that its rank keeps.

    ``unchanged``: modules of a single file that are not low-rank pairs and were left unchanged.
    """

    adapter: Adapter
    rows: list[Row] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    base: str | None = None  # its name, if it has one
    saved: Conversion = field(default_factory=Conversion)  # empty until it is written

    @property
    def energy(self) -> float:
        """The kept share of the squared norm of all modules."""
        total = sum(row.norm for row in self.rows)
        return sum(row.energy * row.norm for row in self.rows) / total if total else 1.0


def encode_finite(values: torch.Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return the values stored as ``dtype``; raise if it cannot hold them."""
    rounded = values.detach().to(dtype)
    if not bool(torch.isfinite(rounded).all()):
        raise TargetError(f"{name}: a factor would overflow {DTYPE_NAMES[dtype]}; choose a wider dtype")
    return encode(rounded)


def chosen_rank(sigma: torch.Tensor, total: float, rank: int | None, energy: float | None) -> int:
    """Return the fewest singular values that reach ``energy`` of ``total``, at most ``rank``."""
    squares = sigma.double().square()
    count = max(1, int((sigma > _NOISE * sigma[0]).sum()))
    if energy is not None:
        reached = torch.cumsum(squares, 0) >= energy * total * (1 - 1e-9)
        count = min(count, int(reached.to(torch.int64).argmax()) + 1 if bool(reached.any()) else len(sigma))
    return min(count, rank or count)


def check_size(rank: int | None, energy: float | None) -> None:
    """Raise unless the rank and the energy are possible values."""
    if rank is not None and not (isinstance(rank, int) and rank >= 1):
        raise ConfigError(f"rank must be a whole number, 1 or more, got {rank!r}")
    if energy is not None and not (isinstance(energy, int | float) and 0 < energy <= 1):
        raise ConfigError(f"energy must be above 0 and up to 1, got {energy!r}")


def resize_stack(
    stack: Sequence[tuple[Adapter, Strength]],
    index: ModelIndex,
    naming_of: Callable[[Component], Naming],
    *,
    rank: int | None = None,
    energy: float | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Resized:
    """Make one adapter out of a stack, at ``rank`` at most or with ``energy`` of each module; neither: exact.

    Modules are those of the naming that ``naming_of`` chooses, so a rank counts for the file as it is written.
    ``dtype``: of the new factors (None: that of the old ones, float32 where they differ).
    """
    check_size(rank, energy)
    if any(strength.blocks for _, strength in stack):
        raise ConfigError("strengths by block cannot be written into an adapter here; give one strength per component")
    single = len(stack) == 1 and stack[0][1] == Strength()
    groups: dict[tuple[str, str, int | None, str], list[tuple[Entry, float]]] = {}
    for adapter, strength in stack:
        for entry in _on_model(adapter if single else _unscaled(adapter), index, naming_of):
            ref = entry.ref
            weight = strength.at(Placement(ref.component, "", (), entry.factors, entry.keys), {})
            if weight != 0.0:
                groups.setdefault((ref.component, ref.name, ref.part, entry.param), []).append((entry, weight))
    every = [entry.factors for adapter, _ in stack for entry in adapter.entries]
    stored = {tensor.dtype for factors in every if isinstance(factors, Lora) for tensor in (factors.up, factors.down)}
    usual = TORCH[stored.pop()] if len(stored) == 1 and stored <= set(_PLAIN) else torch.float32
    has_alpha = any(factors.alpha is not None for factors in every)
    work = _Work(rank, energy, dtype or usual, torch.device(device), single, has_alpha)
    pairs_first = sorted(groups.values(), key=lambda parts: isinstance(parts[0][0].factors, Full))
    entries = [work.module(parts) for parts in pairs_first]
    if work.problems:
        listing = "\n  ".join([f"{len(work.problems)} modules cannot be combined:", *work.problems[:5]])
        raise TargetError(listing + ("\n  and more" if len(work.problems) > 5 else ""))
    if not entries:
        raise TargetError("nothing to write: every strength is zero")
    return Resized(_adapter(stack, entries, single), work.rows, work.unchanged)


def _on_model(adapter: Adapter, index: ModelIndex, naming_of: Callable[[Component], Naming]) -> list[Entry]:
    """Return the entries under the model's own names; raise for one that has none."""
    respelling = respell(adapter, index, naming_of)
    lost = [(finding.keys, finding.reason) for finding in respelling.lost] + [
        (p.keys, p.reason) for p in adapter.problems
    ]
    if lost:
        where, more = index.base or index.source, f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        raise TargetError(f"{lost[0][0][0]}: {lost[0][1]}, on {where}{more}")
    return respelling.entries


def _unscaled(adapter: Adapter) -> Adapter:
    """Fold the scale of all pairs and differences in, as float32, so that parts of a fused module can always join."""
    entries = []
    for entry in adapter.entries:
        factors, name = entry.factors, str(entry.ref)
        if is_pair(factors):
            up, down = _pair(factors, torch.device("cpu"))
            factors = _made(up * factors.scale, down, factors, torch.float32, name)
        elif _is_difference(factors):
            value = encode_finite(decode(factors.value) * factors.scale, torch.float32, name)
            factors = Full(value=value, norm=factors.norm)
        entries.append(replace(entry, factors=factors))
    return replace(adapter, entries=tuple(entries))


def _made(
    up: torch.Tensor, down: torch.Tensor, like: Lora, dtype: torch.dtype, name: str, alpha: float | None = None
) -> Lora:
    """Return a plain pair for the same weight as ``like``: (out, r, 1...) and (r, in, k...)."""
    shape = like.shape()
    new_up = encode_finite(up.reshape(len(up), -1, *[1] * (len(shape) - 2)), dtype, name)
    new_down = encode_finite(down.reshape(-1, *shape[1:]), dtype, name)
    pair = replace(like, up=new_up, down=new_down, mid=None, alpha=alpha)
    return replace(pair, stored_alpha=None, stored_scale=None, rslora=False)


def is_pair(factors: Factors) -> TypeGuard[Lora]:
    """Return whether factors are a product of two, with or without a core, that needs no base weight."""
    if not isinstance(factors, Lora) or factors.magnitude is not None or factors.residual is not None:
        return False
    return factors.mid is not None or factors.groups > 0


def _is_difference(factors: Factors) -> TypeGuard[Full]:
    return isinstance(factors, Full) and factors.mode == "add" and factors.magnitude is None


def _pair(factors: Lora, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, r) and (r, in*k*k) in float64, scale not included."""
    up = decode(factors.up, dtype=torch.float64, device=device).flatten(1)
    down = decode(factors.down, dtype=torch.float64, device=device)
    if factors.mid is not None:
        core = decode(factors.mid, dtype=torch.float64, device=device)
        down = torch.einsum("ab...,bi->ai...", core, down.flatten(1))
    elif factors.groups > 1:
        up = torch.block_diag(*up.chunk(factors.groups))  # type: ignore[no-untyped-call]
    return up, down.flatten(1)


@dataclass(slots=True)
class _Work:
    rank: int | None
    energy: float | None
    dtype: torch.dtype
    device: torch.device
    single: bool
    has_alpha: bool
    rows: list[Row] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    new_ranks: dict[tuple[str, str], int] = field(default_factory=dict)

    def module(self, parts: Sequence[tuple[Entry, float]]) -> Entry:
        """Combine all that the stack has for one module into one entry."""
        first = parts[0][0]
        pairs = [(entry.factors, weight) for entry, weight in parts if is_pair(entry.factors)]
        differences = [(entry.factors, weight) for entry, weight in parts if _is_difference(entry.factors)]
        if len(pairs) == len(parts):
            return replace(first, factors=self._pair(first, pairs))
        scaled = differences and differences[0][0].bias_rank and (first.ref.component, first.ref.name) in self.new_ranks
        if len(differences) == len(parts) and (
            scaled or not self.single
        ):  # without its pair: only the bias of a pair that changed
            return replace(first, factors=self._difference(first, differences))
        if self.single:
            self.unchanged.append(f"{first.ref}.{first.param}")
            return first
        kinds = ", ".join(dict.fromkeys(entry.factors.algorithm for entry, _ in parts))
        self.problems.append(f"{first.keys[0]}: {kinds}; only plain LoRA pairs and differences can be combined")
        return first

    def _pair(self, entry: Entry, terms: Sequence[tuple[Lora, float]]) -> Lora:
        first, name = terms[0][0], str(entry.ref)
        if len({(f.shape()[0], math.prod(f.shape()[1:]), f.transposed, f.embedding, f.widen) for f, _ in terms}) > 1:
            self.problems.append(f"{name}: the adapters disagree about this weight's layout (transposed or widened)")
            return first
        before = sum(max(factors.rank, factors.up.shape[1]) for factors, _ in terms)
        parts = [_pair(factors, self.device) for factors, _ in terms]
        up = torch.cat([part[0] * (f.scale * weight) for part, (f, weight) in zip(parts, terms, strict=True)], 1)
        down = torch.cat([part[1] for part in parts])
        left, small = torch.linalg.qr(up)
        right, core = torch.linalg.qr(down.T)
        turn, sigma, back = torch.linalg.svd(small @ core.T)
        squares = sigma.square()
        total = float(squares.sum())
        if self.single and self.energy is None and (self.rank is None or before <= self.rank):
            self.rows.append(Row(name, before, before, 1.0, total))
            return first
        rank = chosen_rank(sigma, total, self.rank, self.energy)
        share = float(squares[:rank].sum()) / total if total else 1.0
        self.rows.append(Row(name, before, rank, share, total))
        root = sigma[:rank].sqrt()
        self.new_ranks[entry.ref.component, entry.ref.name] = rank
        new_up, new_down = left @ turn[:, :rank] * root, root[:, None] * back[:rank] @ right.T
        return _made(new_up, new_down, first, self.dtype, name, float(rank) if self.has_alpha else None)

    def _difference(self, entry: Entry, terms: Sequence[tuple[Full, float]]) -> Full:
        """Return sum_i strength_i * scale_i * value_i; next to a pair it is that pair's bias, at the pair's scale 1."""
        first = terms[0][0]
        shape = first.value.shape
        total = torch.stack([decode(f.value).reshape(shape) * (f.scale * weight) for f, weight in terms]).sum(0)
        made = Full(value=encode_finite(total, self.dtype, str(entry.ref)), norm=first.norm)
        rank = self.new_ranks.get((entry.ref.component, entry.ref.name))
        if rank is None or not self.has_alpha or entry.param != "bias":
            return made
        return replace(made, bias_rank=rank, alpha=float(rank))


def _adapter(stack: Sequence[tuple[Adapter, Strength]], entries: Sequence[Entry], single: bool) -> Adapter:
    """Return the entries as an adapter, with the source metadata that still applies."""
    renamed, tensors, carried = list[Entry](), dict[str, Tensor](), dict[str, Tensor]()
    for entry in entries:
        own = {f"{entry.ref}.{entry.param}.{role}": tensor for role, tensor in entry.factors.tensors().items()}
        renamed.append(replace(entry, keys=tuple(own)))
        tensors |= own
    for adapter, _ in stack:
        for key, tensor in adapter.carried.items():
            if not carried.setdefault(key, tensor).same(tensor):
                raise TargetError(f"{key}: two of the files carry different tensors of this name")
    source = stack[0][0]
    metadata = {key: value for key, value in source.metadata.items() if key not in _STALE and (single or key in _MODEL)}
    metadata |= {key: a.metadata[key] for a, _ in stack for key in a.carried if key in a.metadata}  # marks them as such
    loras = [entry.factors for entry in renamed if isinstance(entry.factors, Lora)]
    if loras and not any(
        isinstance(entry.factors, Lokr) for entry in renamed
    ):  # whose scale may need the old dimension
        for key, numbers in (
            ("ss_network_dim", {f.rank for f in loras}),
            ("ss_network_alpha", {f.alpha for f in loras}),
        ):
            metadata |= {key: str(numbers.pop()) if len(numbers) == 1 else "Dynamic"} if key in metadata else {}
    config = _config(source.config, loras) if single else None
    return Adapter(tuple(renamed), carried, metadata, config, tensors=tensors | carried)


def _config(config: Mapping[str, object] | None, loras: Sequence[Lora]) -> dict[str, object] | None:
    """Return PEFT's configuration if one rank and alpha describe every module; otherwise its writer makes a new one."""
    settings = {(factors.rank, factors.alpha, factors.rslora) for factors in loras}
    if config is None or len(settings) != 1:
        return None
    ((rank, alpha, rslora),) = settings
    patterns: dict[str, object] = {"rank_pattern": {}, "alpha_pattern": {}, "use_rslora": rslora}
    return {**config, "r": rank, "lora_alpha": alpha, **patterns} if alpha is not None else None
