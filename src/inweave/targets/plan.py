"""The result of resolving: where every tensor of an adapter goes, and the report on those that do not.

    Placement: change(factors)[source rows] , swapped or transposed, is added to tensor[target rows]

    source: rows of the adapter's own change that belong here (None: all of them)
    target: rows of the base tensor that receive them (None: all of them)

`whole` is set where the algorithm cannot compute those rows from the same rows of the base alone (an
input-axis DoRA or a rotation that crosses a fused border): it lists the pieces of the base that, stacked,
are the weight the adapter was made for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from inweave.adapter import Adapter, Factors
from inweave.targets.links import Shape

Rows = tuple[int, int]  # start, length


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of one base tensor, as the adapter's naming orders them."""

    tensor: str
    rows: Rows | None = None
    swap: bool = False
    transpose: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    component: str
    tensor: str
    shape: Shape  # of the whole base tensor
    factors: Factors
    keys: tuple[str, ...]
    target: Rows | None = None
    source: Rows | None = None
    swap: bool = False
    transpose: bool = False
    widen: Shape | None = None  # the shape the base tensor is zero-padded to first
    creates: bool = False  # the base lacks the tensor; it starts from zeros
    whole: tuple[Piece, ...] = ()

    def rows(self) -> range:
        """Return the rows of the base tensor this placement changes."""
        start, length = self.target or (0, self.shape[0] if self.shape else 1)
        return range(start, start + length)

    def as_dict(self) -> dict[str, object]:
        row: dict[str, object] = {
            "keys": list(self.keys), "component": self.component, "tensor": self.tensor, "shape": list(self.shape),
            "algorithm": self.factors.algorithm,
        }  # fmt: skip
        if self.target is not None:
            row["rows"] = list(self.target)
        if self.creates:
            row["creates"] = True
        return row


@dataclass(frozen=True, slots=True)
class Finding:
    """Keys that could not be used, the reason, and what would fit."""

    keys: tuple[str, ...]
    module: str
    component: str
    reason: str
    nearest: str | None = None
    expected: Shape | None = None
    got: Shape | None = None

    def as_dict(self) -> dict[str, object]:
        row: dict[str, object] = {
            "keys": list(self.keys), "module": self.module, "component": self.component, "reason": self.reason,
        }  # fmt: skip
        for name in ("nearest", "expected", "got"):
            if (value := getattr(self, name)) is not None:
                row[name] = list(value) if isinstance(value, tuple) else value
        return row


@dataclass(slots=True, repr=False)
class Report:
    """The outcome for every key; the counts sum to the number of tensors."""

    tensors: int = 0
    placed: int = 0
    carried: int = 0
    modules: int = 0
    file_modules: int = 0  # modules of the adapter, of which `modules` have a place
    components: dict[str, dict[str, int]] = field(default_factory=dict)
    unplaced: list[Finding] = field(default_factory=list)
    mismatched: list[Finding] = field(default_factory=list)
    orphans: list[Finding] = field(default_factory=list)
    duplicates: list[Finding] = field(default_factory=list)
    unsupported: list[Finding] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        faults = ", ".join(f"{len(findings)} {kind}" for kind, findings in self.findings().items() if findings)
        return f"<Report: {self.placed} of {self.tensors} tensors placed{', ' + faults if faults else ''}>"

    @property
    def clean(self) -> bool:
        faults = (self.unplaced, self.mismatched, self.orphans, self.duplicates, self.unsupported)
        return self.placed > 0 and not any(faults) and self.placed + self.carried == self.tensors

    def findings(self) -> Mapping[str, list[Finding]]:
        return {
            "unplaced": self.unplaced, "mismatched": self.mismatched, "orphans": self.orphans,
            "duplicates": self.duplicates, "unsupported": self.unsupported,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """Where every tensor of an adapter goes on a model; made by `resolve`, used by `Weaver`, `MergedSource` and `bake`.

    ``placements`` are the tensors of the model that change and what each receives; ``report`` counts them and lists
    what could not be placed.
    """

    adapter: Adapter
    placements: tuple[Placement, ...]
    report: Report

    def __repr__(self) -> str:
        return f"<Plan: {len(self.placements)} placements of {self.adapter!r}>"

    def by_tensor(self) -> dict[tuple[str, str], list[Placement]]:
        """Map (component, tensor) to what it receives."""
        received: dict[tuple[str, str], list[Placement]] = {}
        for placement in self.placements:
            received.setdefault((placement.component, placement.tensor), []).append(placement)
        return received
