"""The canonical adapter: every dialect is read into it and written from it.

Adapter = entries + carried tensors + metadata + problems found while reading
Entry   = Ref (the module), param (its weight or bias), Factors (its change), keys (their source in the file)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from inweave.adapter.factors import Factors
from inweave.adapter.tensor import Tensor

#: faults of a file by itself, before any model is involved
Fault = Literal["orphan", "unknown", "unsupported", "duplicate", "malformed"]


@dataclass(frozen=True, slots=True)
class Ref:
    """A module as the file names it.

    ``component``: "unet" (the denoiser, of any kind), "te", "te1", "te2", "te3", or "" if unknown.
    ``flat``: dots were replaced by underscores, so ``name`` can only be looked up.
    ``part``: one row part of a fused module, where the file numbers the parts.
    ``below``: the file names only an enclosing module; the layer is one of those inside it.
    """

    component: str
    name: str
    flat: bool = False
    part: int | None = None
    below: bool = False

    def __str__(self) -> str:
        name = f"{self.component}:{self.name}" if self.component else self.name
        return name if self.part is None else f"{name}[{self.part}]"


@dataclass(frozen=True, slots=True)
class Entry:
    ref: Ref
    param: str
    factors: Factors
    keys: tuple[str, ...]
    dialect: str


@dataclass(frozen=True, slots=True)
class KeyProblem:
    """One fault of some of a file's keys, with the reason."""

    fault: Fault
    keys: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, repr=False)
class Adapter:
    """An adapter in canonical form, independent of the file format; iterating yields its entries.

    ``entries``    the change of each target tensor: a reference and its factors
    ``carried``    tensors that no target receives, such as textual-inversion embeddings; they are written again
    ``metadata``   of the file; ``config`` is PEFT's adapter_config.json
    ``problems``   tensors that could not be read, each with its reason; ``warnings`` are notes about the others
    ``tensors``    every tensor of the file by its key
    ``assumed_alphas``  modules whose alpha is in a missing configuration: alpha = rank is assumed
    """

    entries: tuple[Entry, ...]
    carried: Mapping[str, Tensor] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, object] | None = None
    problems: tuple[KeyProblem, ...] = ()
    warnings: tuple[str, ...] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    places: Mapping[str, tuple[Path, int]] = field(default_factory=dict)  # file and offset of each tensor's bytes
    assumed_alphas: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        names = "+".join(self.dialects) or "no dialect"
        return f"<Adapter: {names}, {', '.join(self.algorithms) or 'nothing'} for {len(self)} tensors of a model>"

    @property
    def dialects(self) -> tuple[str, ...]:
        """Names of the dialects found, the most frequent first."""
        return _by_frequency(e.dialect for e in self.entries)

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Names of the algorithms used, the most frequent first: lora, loha, lokr, ..."""
        return _by_frequency(e.factors.algorithm for e in self.entries)


def _by_frequency(names: Iterator[str]) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return tuple(sorted(counts, key=lambda name: (-counts[name], name)))
