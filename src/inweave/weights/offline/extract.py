"""Extract: the difference of a fine-tuned checkpoint, as a LoRA.

    D = flat(tuned) - flat(base), (out, in*k*k), float32        matched by the model's own names, in any naming
    Q = qr[Y, D D^T Y, (D D^T)^2 Y, ..], Y = D G                randomized block Krylov, seeded by the tensor's name
    Q^T D = U diag(sigma) V^T                                   exact where that costs hardly more
    up = Q U_r sqrt(sigma_r)     down = sqrt(sigma_r) V_r^T     alpha = r, so the scale is 1
    kept energy = sum_(i <= r) sigma_i^2 / |D|^2

Tensors that do not differ (beyond the rounding of the coarser dtype) are left out. Norms and biases become
differences on request; what differs and cannot be part of a LoRA (embedding tables, bare parameters) is
reported, and counts as lost energy. Both checkpoints are read in pieces, one tensor at a time.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from inweave.adapter import Adapter, Entry, Factors, Full, Lora, Ref, Tensor
from inweave.errors import TargetError
from inweave.exchange.convert import Conversion
from inweave.formats.gguf import is_gguf
from inweave.targets.index import Component, ModelIndex, module_of
from inweave.targets.links import Naming
from inweave.weights.checkpoint_files import Pieces, network_at, networks_in
from inweave.weights.offline.resize import Row, check_size, chosen_rank, encode_finite
from inweave.weights.packed import GgufSource, unpack
from inweave.weights.source import Renamed, Stacked, WeightSource

LOW = 0.8  #: below this kept energy the report warns
_TABLES = re.compile(
    r"(token|position|word|token_type)_embeddings?$|shared$|wte$|wpe$|embed_tokens$|relative_attention_bias$"
)
_ORDER = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # from coarse to fine


@dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    """A model on disk: its index, and where the tensors of each network come from."""

    index: ModelIndex
    sources: Mapping[str, WeightSource]

    def __str__(self) -> str:
        return f"{self.index.source} ({self.index.base or 'a model without a known name'})"


def open_checkpoint(path: Path, index: ModelIndex, folders: Mapping[str, str], opened: ExitStack) -> OpenedCheckpoint:
    """Open a checkpoint; ``folders``: which sub-folders of a diffusers model hold which components of ``index``."""
    if path.is_dir() and folders:
        homes = {component: networks_in(path / name)[0] for name, component in folders.items()}
        return OpenedCheckpoint(index, {name: unpack(Pieces(network, opened), path) for name, network in homes.items()})
    if path.is_file() and is_gguf(path):
        return OpenedCheckpoint(index, dict.fromkeys(index.components, GgufSource(path, torch.float32)))
    network = networks_in(path)[0] if path.is_dir() else network_at(path)
    return OpenedCheckpoint(index, dict.fromkeys(index.components, unpack(Pieces(network, opened), path)))


@dataclass(slots=True)
class Extracted:
    """The result of `extract`. ``rows``: modules of the adapter; ``left_out``: differences that are not in it."""

    adapter: Adapter
    rows: list[Row] = field(default_factory=list)
    left_out: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    base: str | None = None  # its name, if it has one
    saved: Conversion = field(default_factory=Conversion)  # empty until it is written

    @property
    def energy(self) -> float:
        """The kept share of the squared norm of everything that differs."""
        total = sum(row.norm for row in (*self.rows, *self.left_out))
        return sum(row.energy * row.norm for row in self.rows) / total


def extract_difference(
    tuned: OpenedCheckpoint,
    base: OpenedCheckpoint,
    naming_of: Callable[[Component], Naming],
    *,
    rank: int = 32,
    energy: float | None = None,
    full_norms: bool = False,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Extracted:
    """Return the difference of two checkpoints at ``rank``, or at the lower rank that keeps ``energy``.

    Modules are those of the naming that ``naming_of`` chooses, so a fused layer gets one pair where it is written
    as one.
    """
    check_size(rank, energy)
    done = Extracted(Adapter(()))
    entries: list[Entry] = []
    tensors: dict[str, Tensor] = {}
    pairs = _pairs(tuned, base, done.notes)
    views = [
        (mine, _view(tuned, theirs, naming_of(mine)), _view(base, mine, naming_of(mine))) for theirs, mine in pairs
    ]
    work = [(component, after, before, name) for component, after, before in views for name in before.names()]
    for number, (component, after, before, name) in enumerate(work):
        progress(number, len(work))
        if name not in after.names() or not before.spec(name).dtype.is_floating_point:
            continue
        change = _minus(after, before, name, device)
        if change is None:
            continue
        module, param = module_of(name)
        weight = name.removesuffix("bias") + "weight"
        weight_shape = before.spec(weight).shape if weight in before.names() else ()
        norm = change.dim() == 1 and (param != "bias" or len(weight_shape) == 1)
        label = f"{component.name}:{name}"
        factors, row = _factors(label, change, rank, energy, full_norms, dtype, norm)
        if factors is None:
            done.left_out.append(row)
            continue
        done.rows.append(row)
        own = {f"{label}.{role}": tensor for role, tensor in factors.tensors().items()}
        entries.append(Entry(Ref(component.name, module), param, factors, tuple(own), "kohya"))
        tensors |= own
    if not entries:
        raise TargetError(f"nothing to extract: {tuned} and {base} do not differ in any layer")
    done.adapter = Adapter(tuple(entries), tensors=tensors)
    if done.energy < LOW:
        done.notes.append(f"only {done.energy:.0%} of the difference is kept; use a higher rank to keep more")
    return done


def _pairs(tuned: OpenedCheckpoint, base: OpenedCheckpoint, notes: list[str]) -> list[tuple[Component, Component]]:
    """Match the networks that both have, as (tuned's, base's), by content; a denoiser must agree in every tensor."""
    pairs, unpaired = list[tuple[Component, Component]](), list[tuple[str, str]]()
    for mine in base.index:
        encoder = mine.name.startswith("te")
        rivals = [other for other in tuned.index if other.name.startswith("te") == encoder]
        theirs = min(rivals, key=lambda other: (len(_unlike(other, mine)), other.name != mine.name), default=None)
        unlike = _unlike(theirs, mine) if theirs else list(mine.parts)
        if theirs and unlike and not encoder:
            shapes = " and ".join(str(list(side.parts.get(unlike[0], ())) or "nothing") for side in (theirs, mine))
            raise TargetError(
                f"{tuned} and {base} are different models: {len(unlike)} tensors of the {mine.name} differ in name or "
                f"shape, {unlike[0]} first ({shapes})"
            )
        if theirs is None or 2 * len(unlike) > len(mine.parts):
            unpaired.append((mine.name, base.index.source))
            continue
        if unlike:
            notes.append(f"{mine.name}: {len(unlike)} tensors are in one of the two only, {unlike[0]} first")
        pairs.append((theirs, mine))
    if not pairs:
        raise TargetError(f"{tuned} and {base} are different models: no network is in both")
    used = {theirs.name for theirs, _ in pairs}
    unpaired += [(each.name, tuned.index.source) for each in tuned.index if each.name not in used]
    notes += [f"{name} is only in {where}; it was not compared" for name, where in unpaired]
    return pairs


def _unlike(one: Component, two: Component) -> list[str]:
    """Return the parts that only one of them has, or that differ in flattened shape."""
    left, right = ({part: (s[:1], math.prod(s)) for part, s in side.parts.items()} for side in (one, two))
    return [part for part in dict.fromkeys((*left, *right)) if left.get(part) != right.get(part)]


def _view(checkpoint: OpenedCheckpoint, component: Component, naming: Naming) -> WeightSource:
    parts = Renamed(checkpoint.sources[component.name], component)
    return Stacked(parts, component) if naming == "original" else parts


def _minus(after: WeightSource, before: WeightSource, name: str, device: torch.device | str) -> torch.Tensor | None:
    """Return the difference in float32; None if the two agree as far as the coarser dtype can tell."""
    old = before.get(name, device=device)
    new = after.get(name, device=device).reshape(old.shape)
    coarse = min(old.dtype, new.dtype, key=lambda dtype: _ORDER.index(dtype) if dtype in _ORDER else -1)
    wide = torch.float64 if torch.float64 in (old.dtype, new.dtype) else torch.float32
    if torch.equal(old.to(coarse).to(wide), new.to(coarse).to(wide)):
        return None
    change = (new.to(wide) - old.to(wide)).float()
    if not bool(torch.isfinite(change).all()):
        raise TargetError(f"{name}: one of the checkpoints contains NaN or infinity here")
    return change


def _factors(
    name: str, change: torch.Tensor, rank: int, energy: float | None, full: bool, dtype: torch.dtype, norm: bool
) -> tuple[Factors | None, Row]:
    """Return the factors of one tensor; None if a LoRA has no place for it."""
    total = float(torch.linalg.vector_norm(change, dtype=torch.float64)) ** 2
    module = name.rpartition(".")[0]
    if change.dim() == 1 and full:
        return Full(value=encode_finite(change, dtype, name), norm=norm), Row(name, 0, 0, 1.0, total)
    if change.dim() < 2 or not name.endswith(".weight") or _TABLES.search(module):
        return None, Row(name, 0, 0, 0.0, total)
    left, sigma, right = truncated_svd(change.flatten(1), rank, zlib.crc32(name.encode()))
    chosen = chosen_rank(sigma, total, rank, energy)
    root = sigma[:chosen].sqrt()
    up = (left[:, :chosen] * root).reshape(len(change), chosen, *[1] * (change.dim() - 2))
    down = (root[:, None] * right[:chosen]).reshape(chosen, *change.shape[1:])
    share = min(1.0, float(sigma[:chosen].double().square().sum()) / total)
    made = Lora(up=encode_finite(up, dtype, name), down=encode_finite(down, dtype, name), alpha=float(chosen))
    return made, Row(name, min(len(change), change[0].numel()), chosen, share, total)


def truncated_svd(matrix: torch.Tensor, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return U, sigma, V^T of at least ``rank`` values, if there are that many; deterministic for a seed."""
    width, steps = rank + 8, 6
    if 2 * width * (steps + 1) >= min(matrix.shape):
        u, sigma, vh = torch.linalg.svd(matrix, full_matrices=False)
        return u, sigma, vh
    start = torch.randn(matrix.shape[1], width, generator=torch.Generator().manual_seed(seed))
    blocks, captured = [torch.linalg.qr(matrix @ start.to(matrix)).Q], 0.0
    for _ in range(steps):
        back = matrix.T @ blocks[-1]
        before, captured = captured, float(torch.linalg.vector_norm(back)) ** 2
        if captured <= 1.001 * before:
            break  # another step would find nothing new
        blocks.append(torch.linalg.qr(matrix @ back).Q)
    basis = torch.linalg.qr(torch.cat(blocks, 1)).Q
    u, sigma, vh = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    return basis @ u, sigma, vh
