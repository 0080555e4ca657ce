"""Place every entry of an adapter on a base model: (tensor, rows, permutation), or say why not.

1. which module, and so which parts of the model (`inweave.targets.locate`)
2. does it fit: the change's flattened shape must equal that of the parts together (`inweave.targets.fit`)
3. where: each part's home in the given files; neighboring rows of one tensor become one placement
4. no two entries change the same rows
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cached_property

from inweave.adapter import Adapter, Entry, Factors, Ref
from inweave.errors import TargetError
from inweave.targets.converter_order import name_layers
from inweave.targets.fit import either_way, fitted, misfit, stacked_shape, uses_of, widened
from inweave.targets.index import Component, ModelIndex, Use
from inweave.targets.links import Shape
from inweave.targets.locate import Locator, Match, is_saved_module
from inweave.targets.nearest import NearestNames
from inweave.targets.plan import Finding, Piece, Placement, Plan, Report

_MAX_NEAREST = 8  # a file for another model has thousands of names; the first ones are enough


def resolve(adapter: Adapter, index: ModelIndex, *, strict: bool = True) -> Plan:
    """Place ``adapter`` on ``index``; with ``strict`` anything left over raises `TargetError`."""
    adapter = name_layers(adapter, index)
    resolver, located = _located(adapter, index)
    if resolver.turned and not resolver.straight:  # no shape agrees with fan_in_fan_out, which square layers follow
        adapter = replace(adapter, entries=tuple(_in_other_layout(entry) for entry in adapter.entries))
        resolver, located = _located(adapter, index)
        resolver.warn(
            "fan_in_fan_out of the configuration contradicts every layer whose shape tells; square layers follow these"
        )
    report = resolver.report
    accepted = _without_conflicts(located, resolver.in_original, report)
    _count(accepted, adapter, report)
    plan = Plan(adapter, tuple(placement for _, placements in accepted for placement in placements), report)
    if strict and not report.clean:
        raise TargetError(_summary(adapter, index, report))
    return plan


def _located(adapter: Adapter, index: ModelIndex) -> tuple[_Resolver, list[tuple[Entry, list[Placement]]]]:
    """Return (the resolver with its report, the entries that have a place) of an adapter."""
    report = Report(tensors=len(adapter.tensors), carried=len(adapter.carried), warnings=list(adapter.warnings))
    resolver = _Resolver(adapter, index, report)
    located = [(entry, resolver.place(entry)) for entry in adapter.entries]
    return resolver, [(entry, placements) for entry, placements in located if placements is not None]


def _of_embedding(factors: Factors) -> bool:
    """Return whether factors are those of an embedding, which are always stored the other way round."""
    return bool(getattr(factors, "embedding", False))


def _in_other_layout(entry: Entry) -> Entry:
    factors = entry.factors
    if entry.dialect != "peft" or factors.whole or _of_embedding(factors):
        return entry
    return replace(entry, factors=replace(factors, transposed=not factors.transposed))


class _Resolver:
    def __init__(self, adapter: Adapter, index: ModelIndex, report: Report) -> None:
        self.adapter = adapter
        self.index = index
        self.report = report
        self.locator = Locator(adapter, index)
        self.nearest_left = _MAX_NEAREST
        self.names: dict[tuple[str, ...], NearestNames] = {}  # by the components searched
        self._insides: dict[str, dict[str, list[tuple[str, Shape]]]] = {}  # component -> module -> weights inside it
        self._owned: dict[str, dict[str, dict[str, Shape]]] = {}  # component -> module -> its parts
        self._positions: dict[str, dict[str, int]] = {}  # component -> part -> its place in the model
        self.in_original: set[int] = set()  # entries named as in the original model, by identity
        self.turned = self.straight = 0  # layers whose shapes contradict PEFT's fan_in_fan_out, or agree with it

    def place(self, entry: Entry) -> list[Placement] | None:
        ref = entry.ref
        if ref.below:
            return self._place_below(entry)
        entry = self._by_order(entry)
        match = self.locator.match(entry)
        if isinstance(match, str):
            return self._new_module(entry) if is_saved_module(entry) else self._unplaced(entry, match)
        if match.naming == "original":
            self.in_original.add(id(entry))
        if ref.component == "unet2" and match.component.name == "unet":
            self.warn("the file names the second denoiser (transformer_2) alone; the base's only one receives it")
        param = entry.param.removesuffix("?")
        uses = uses_of(match.spelling, param)
        if uses is None:
            if entry.param == "bias?":
                return []
            return self._create(entry, match, param)
        if ref.part is not None:
            if ref.part >= len(uses):
                return self._unplaced(entry, f"the module has {len(uses)} row parts, the file numbers one {ref.part}")
            uses = (uses[ref.part],)
        return self._fit(entry, match.component, uses)

    def _by_order(self, entry: Entry) -> Entry:
        """Return an entry that PEFT nests without its parameter's name under that name, by the live model's order."""
        if entry.factors.nesting is None or not self.index.in_order:
            return entry
        (depth, leaves), owner = entry.factors.nesting, entry.ref.name.rpartition(".")[0]
        present: list[tuple[int, Entry]] = []
        for leaf in leaves:
            other = replace(entry, ref=replace(entry.ref, name=f"{owner}.{leaf}"), factors=entry.factors.of_leaf(leaf))
            match = self.locator.match(other)
            uses = None if isinstance(match, str) else uses_of(match.spelling, entry.param.removesuffix("?"))
            if uses and not isinstance(match, str):
                present.append((self._position(match.component, uses[0].part), other))
        present.sort(key=lambda pair: pair[0])
        return present[-1 - depth][1] if depth < len(present) else entry

    def _position(self, component: Component, part: str) -> int:
        if component.name not in self._positions:
            self._positions[component.name] = {name: number for number, name in enumerate(component.parts)}
        return self._positions[component.name].get(part, -1)

    def _fit(self, entry: Entry, component: Component, uses: tuple[Use, ...]) -> list[Placement] | None:
        absent = [use.part for use in uses if use.part not in component.homes]
        if absent:
            return self._unplaced(entry, f"{absent[0]} is not in this base's {component.naming} files")
        shape = stacked_shape(component, uses)
        if uses[0].transpose:
            shape = shape[::-1]
        entry = _in_layout(entry, component.layouts.get(component.homes[uses[0].part].tensor))
        fit = fitted(entry.factors, shape)
        if fit is entry.factors and len(shape) == 2 and shape[0] != shape[1] and entry.dialect == "peft":
            self.straight += not (fit.whole or _of_embedding(fit))
        if fit is not None and fit.of_parameter:
            fit = fit.oriented(shape, self._neighbors(component, uses[0].part))
        if fit is None and entry.dialect == "peft":
            fit = self._turned(entry, shape)
        if fit is None and (large := widened(entry.factors, shape, uses)):
            fit = entry.factors
            self.report.warnings.append(f"{entry.ref}: the base's {list(shape)} is widened to {list(large)} with zeros")
            shape = large
        if fit is None:
            got = entry.factors.stored_shape()
            reason = misfit(entry.factors, shape)
            self.report.mismatched.append(
                Finding(entry.keys, str(entry.ref), component.name, reason, expected=shape, got=got)
            )
            return None
        return _placements(entry if fit is entry.factors else replace(entry, factors=fit), component, uses, shape)

    def _neighbors(self, component: Component, part: str) -> list[Shape]:
        """Return the shapes of the module's other parameters."""
        owner = part.rpartition(".")[0]
        if component.name not in self._owned:
            owned = self._owned[component.name] = {}
            for name, shape in component.parts.items():
                owned.setdefault(name.rpartition(".")[0], {})[name] = shape
        return [shape for name, shape in self._owned[component.name][owner].items() if name != part]

    def _turned(self, entry: Entry, shape: Shape) -> Factors | None:
        """Try the other orientation: PEFT records fan_in_fan_out once for all layers, although it decides it per
        layer.
        """
        other = replace(entry.factors, transposed=not entry.factors.transposed)
        if fitted(other, shape) is None:
            return None
        self.turned += 1
        self.warn(
            "fan_in_fan_out of the configuration contradicts some layers' shapes; "
            "square layers follow the configuration"
        )
        return other

    def warn(self, warning: str) -> None:
        if warning not in self.report.warnings:
            self.report.warnings.append(warning)

    def _create(self, entry: Entry, match: Match, param: str) -> list[Placement] | None:
        """Place a bias that the base does not have, starting from zeros; anything else cannot be placed."""
        weight = uses_of(match.spelling, "weight")
        factors = entry.factors
        if param != "bias" or weight is None or not factors.whole:
            return self._unplaced(entry, f"the module has no {param}")
        rows = stacked_shape(match.component, weight)[0]
        if (numel := math.prod(factors.shape())) != rows:
            reason = f"a bias of {numel} for {rows} outputs"
            finding = Finding(
                entry.keys, str(entry.ref), match.component.name, reason, expected=(rows,), got=factors.shape()
            )
            self.report.mismatched.append(finding)
            return None
        self.report.warnings.append(f"{entry.ref}: the base has no bias here; one is created from zeros")
        biases = tuple(Use(use.part.removesuffix("weight") + "bias", use.swap) for use in weight)
        made, start = [], 0
        for use, of in zip(biases, weight, strict=True):
            home, length = match.component.homes[of.part], match.component.parts[of.part][0]
            tensor = home.tensor.removesuffix("weight") + "bias"
            target = (home.start, length) if home.length is not None else None
            source = (start, length) if len(biases) > 1 else None
            whole = match.component.tensors[home.tensor][:1]  # as many rows as the weight, which may be fused
            made.append(Placement(match.component.name, tensor, whole, factors, entry.keys, target, source,
                                  swap=use.swap != home.swap, creates=True))  # fmt: skip
            start += length
        return made

    def _place_below(self, entry: Entry) -> list[Placement] | None:
        """Place an entry that names an enclosing module on the one layer in it that fits, if there is one."""
        siblings = self._below_counts[entry.ref]
        where = f"inside {entry.ref.name!r}" if entry.ref.name else "of the whole model"
        if siblings > 1:
            return self._unplaced(entry, f"the file does not record which layer {where} this is, one of {siblings}")
        fits = [
            (component, Use(part))
            for component in self.locator.candidates(entry.ref)
            for part, shape in self._weights_below(component, entry.ref.name)
            if fitted(either_way(entry.factors, shape, part), shape) is not None
        ]
        if len(fits) == 1:
            component, use = fits[0]
            shape = component.parts[use.part]
            return _placements(
                replace(entry, factors=either_way(entry.factors, shape, use.part)), component, (use,), shape
            )
        return self._unplaced(
            entry, f"the file does not record which layer {where} this is ({len(fits)} layers have its shape)"
        )

    @cached_property
    def _below_counts(self) -> Counter[Ref]:
        return Counter(entry.ref for entry in self.adapter.entries if entry.ref.below)

    def _weights_below(self, component: Component, module: str) -> list[tuple[str, Shape]]:
        """Return the weights inside a module of this name."""
        if component.name not in self._insides:
            inside = self._insides[component.name] = {}
            for part, shape in component.parts.items():
                if part.endswith(".weight"):
                    segments = part.split(".")
                    for count in range(len(segments)):
                        inside.setdefault(".".join(segments[:count]), []).append((part, shape))
        return self._insides[component.name].get(module, [])

    def _new_module(self, entry: Entry) -> list[Placement]:
        """Place a module that PEFT saved whole (a classifier head) and the base does not have yet."""
        tensor = f"{entry.ref.name}.{entry.param}"
        self.report.warnings.append(f"{tensor}: not in the base; the adapter brings it (modules_to_save)")
        component = next(iter(self.index.components))
        return [Placement(component, tensor, entry.factors.shape(), entry.factors, entry.keys, creates=True)]

    def _unplaced(self, entry: Entry, reason: str) -> list[Placement] | None:
        nearest = None
        if self.nearest_left > 0 and reason.startswith("no module"):
            self.nearest_left -= 1
            nearest = self._nearest(entry.ref)
        self.report.unplaced.append(Finding(entry.keys, str(entry.ref), entry.ref.component, reason, nearest))
        return None

    def _nearest(self, ref: Ref) -> str | None:
        components = self.locator.candidates(ref)
        searched = tuple(component.name for component in components)
        if searched not in self.names:
            self.names[searched] = NearestNames(name for component in components for name in component.modules())
        return self.names[searched].find(ref.name)


def _placements(entry: Entry, component: Component, uses: tuple[Use, ...], shape: Shape) -> list[Placement]:
    """Return one placement per run of neighboring rows."""
    factors = entry.factors
    pieces: list[tuple[Piece, int, int]] = []  # piece, source start, length
    start = 0
    for use in uses:
        home = component.homes[use.part]
        length = component.parts[use.part][0] if component.parts[use.part] else 1
        swap, transpose = use.swap != home.swap, use.transpose != home.transpose
        rows = (home.start, home.length) if home.length is not None else None
        last = pieces[-1][0] if pieces else None
        if (
            last
            and last.tensor == home.tensor
            and last.rows
            and rows
            and sum(last.rows) == rows[0]
            and not (swap or last.swap)
        ):
            merged = Piece(home.tensor, (last.rows[0], last.rows[1] + rows[1]))
            pieces[-1] = (merged, pieces[-1][1], pieces[-1][2] + length)
        else:
            pieces.append((Piece(home.tensor, rows, swap, transpose), start, length))
        start += length
    split = len(pieces) > 1
    whole = tuple(piece for piece, _, _ in pieces) if split and not factors.rows_are_local() else ()
    tensors = component.tensors
    made = []
    for piece, begin, length in pieces:
        base_shape = tensors[piece.tensor]
        covers = piece.rows is None or piece.rows == (0, base_shape[0])
        widen = shape if not split and math.prod(shape) > math.prod(base_shape) else None
        made.append(
            Placement(
                component.name,
                piece.tensor,
                base_shape,
                factors,
                entry.keys,
                target=None if covers else piece.rows,
                source=(begin, length) if split else None,
                swap=piece.swap,
                transpose=piece.transpose,
                widen=widen,
                whole=whole,
            )
        )
    return made


def _in_layout(entry: Entry, transposed: bool | None) -> Entry:
    """Return an entry for a weight whose layout is known, whatever PEFT's fan_in_fan_out says about all layers."""
    factors = entry.factors
    if transposed in (None, factors.transposed) or factors.whole or _of_embedding(factors):
        return entry
    return replace(entry, factors=replace(factors, transposed=transposed))


def _without_conflicts(
    located: list[tuple[Entry, list[Placement]]], in_original: set[int], report: Report
) -> list[tuple[Entry, list[Placement]]]:
    """Drop entries that land on rows already taken; of two the finer (fewer rows, unfused names) stays."""

    def coarseness(number: int) -> tuple[int, bool, tuple[str, ...]]:
        entry, placements = located[number]
        return sum(len(p.rows()) for p in placements), id(entry) in in_original, entry.keys

    order = sorted(range(len(located)), key=coarseness)
    occupied: dict[tuple[str, str], list[tuple[range, Entry]]] = {}
    dropped: set[int] = set()
    for number in order:
        entry, placements = located[number]
        rival = next(
            (
                other
                for p in placements
                for rows, other in occupied.get((p.component, p.tensor), ())
                if _overlap(rows, p.rows())
            ),
            None,
        )
        if rival is not None:
            dropped.add(number)
            reason = f"the same rows also receive {rival.keys[0]} ({rival.factors.algorithm})"
            report.duplicates.append(Finding(entry.keys, str(entry.ref), placements[0].component, reason))
            continue
        for p in placements:
            occupied.setdefault((p.component, p.tensor), []).append((p.rows(), entry))
    return [pair for number, pair in enumerate(located) if number not in dropped]


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def _count(accepted: list[tuple[Entry, list[Placement]]], adapter: Adapter, report: Report) -> None:
    used: set[str] = set()
    modules: set[tuple[str, Ref]] = set()
    for entry, placements in accepted:
        used.update(entry.keys)
        name = placements[0].component if placements else entry.ref.component
        if placements:
            modules.add((name, entry.ref))
    for finding in (f for group in report.findings().values() for f in group):
        used.difference_update(finding.keys)
    for problem in adapter.problems:
        finding = Finding(problem.keys, "", "", problem.reason)
        target = {"orphan": report.orphans, "duplicate": report.duplicates, "malformed": report.mismatched,
                  "unsupported": report.unsupported}.get(problem.fault, report.unplaced)  # fmt: skip
        target.append(finding)
        used.difference_update(problem.keys)
    report.placed = len(used)
    report.modules = len(modules)
    report.file_modules = len({entry.ref for entry in adapter.entries})
    for name, _ in modules:
        row = report.components.setdefault(name, {"modules": 0, "tensors": 0})
        row["modules"] += 1
    for entry, placements in accepted:
        if placements:
            report.components[placements[0].component]["tensors"] += len(entry.keys)


def _summary(adapter: Adapter, index: ModelIndex, report: Report) -> str:
    where = index.base or index.source or "this model"
    lines = [f"{report.placed} of {report.tensors} tensors have a place on {where}"]
    for kind, findings in report.findings().items():
        for finding in findings[:3]:
            near = f" (nearest: {finding.nearest})" if finding.nearest else ""
            lines.append(f"{kind}: {finding.keys[0]}: {finding.reason}{near}")
        if len(findings) > 3:
            lines.append(f"{kind}: and {len(findings) - 3} more")
    return "\n".join(lines)
