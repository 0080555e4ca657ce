"""Scores of an adapter against each known base: counted by forms of names, so that 100 bases take milliseconds.

    placed        modules that exist in the base with matching shapes
    contradicted  modules whose name exists in the base but whose shape or block number does not fit
    whole         share of the stacks of blocks that the adapter covers from the first block to the last
    complete      share of the modules with the file's leaves (to_q, to_k) that the file has
    short         the file stops before the end of a stack: a shorter model has these names too

A file made for a base has no modules that the base lacks, and nothing contradicted. The other three distinguish
bases that all have the file's modules: trainers change every block and every module that a target names, so a base
whose blocks are all covered, and that has no further modules of these names, is likelier than a larger one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

from inweave.adapter import Entry, Factors
from inweave.targets.bases import Known
from inweave.targets.fit import fitted, stacked_shape, uses_of, widened
from inweave.targets.forms import FormIndex, FormModule, form_index, form_of, numbers_in
from inweave.targets.links import Naming


@dataclass(frozen=True, slots=True)
class Score:
    placed: int = 0
    contradicted: int = 0
    whole: float = 0.0
    complete: float = 1.0
    short: bool = False


@dataclass(slots=True)
class EntryGroup:
    """Entries that differ in their numbers only: one comparison serves them all."""

    component: str
    form: str
    flat: bool
    param: str
    part: int | None
    factors: Factors
    peft: bool = False
    numbers: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def encoder(self) -> bool:
        return self.component.startswith("te")


def grouped(entries: Iterable[Entry]) -> list[EntryGroup]:
    """Return the groups of ``entries``, in the order of their first members."""
    groups: dict[Hashable, EntryGroup] = {}
    for entry in entries:
        ref, factors = entry.ref, entry.factors
        form, param = form_of(ref.name), entry.param.removesuffix("?")
        kind = "te" if ref.component.startswith("te") else ref.component
        peft = entry.dialect == "peft"
        key = (kind, form, ref.flat, param, ref.part, factors.fit_key(), peft)
        group = groups.setdefault(key, EntryGroup(kind, form, ref.flat, param, ref.part, factors, peft))
        group.numbers.append(numbers_in(ref.name))
    return list(groups.values())


def score(known: Known, groups: list[EntryGroup], namings: tuple[Naming, ...]) -> Score:
    """Return how well all groups fit one base."""
    two_denoisers = {"unet", "unet2"} <= {group.component for group in groups}
    placed = contradicted = 0
    stacks: dict[tuple[str, str], tuple[set[str], set[str]]] = {}  # (component, form) -> the file's blocks, the base's
    trained: dict[str, tuple[FormIndex, dict[str, set[tuple[str, ...]]]]] = {}  # component -> form -> modules
    for group in groups:
        left, exists = group.numbers, False
        if group.component == "unet2" and two_denoisers and known.experts < 2:
            continue
        for index in _indexes(known, group):
            each = ("diffusers",) if group.encoder else namings
            form, modules = index.look_up(group.form, flat=group.flat, namings=each)
            slots = form.count("#")
            exists = exists or bool(modules)
            if modules and not group.encoder:
                name = index.component.name
                trained.setdefault(name, (index, {}))[1].setdefault(form, set()).update(group.numbers)
                if slots and _is_stack(form, modules):
                    mine, theirs = stacks.setdefault((name, form), (set(), set()))
                    mine.update(numbers[len(numbers) - slots] for numbers in group.numbers)
                    theirs.update(*(module.numbers[0] for module in modules))
            for module in modules:
                if left and _fits(group, index, module):
                    left = [numbers for numbers in left if not module.has(numbers[len(numbers) - slots :])]
        placed += len(group.numbers) - len(left)
        contradicted += len(left) if exists else 0
    whole = sum(1 for mine, theirs in stacks.values() if mine == theirs)
    possible = sum(index.count_siblings(forms, namings) for index, forms in trained.values())
    there = sum(len(numbers) for _, forms in trained.values() for numbers in forms.values())
    complete = min(1.0, there / possible) if possible else 1.0
    own_names = known.parts[0].table == "unet"  # no other architecture has them
    short = not own_names and any(_stops_early(*pair) for pair in stacks.values())
    return Score(placed, contradicted, whole / len(stacks) if stacks else 0.0, complete, short)


def _is_stack(form: str, modules: list[FormModule]) -> bool:
    """Return whether the first number of a form counts blocks: the 2 of `linear_2` does not."""
    return "block" in form or "layer" in form or sum(len(module.numbers[0]) for module in modules) > 4


def _stops_early(mine: set[str], theirs: set[str]) -> bool:
    """Return whether the file changes the first blocks of a stack, without a gap, and not the last ones."""
    return mine < theirs and mine == set(map(str, range(len(mine))))


def _indexes(known: Known, group: EntryGroup) -> list[FormIndex]:
    return [
        form_index(part)
        for part in known.networks
        if not group.component or part.component == "model" or group.encoder == part.component.startswith("te")
    ]


def _fits(group: EntryGroup, index: FormIndex, module: FormModule) -> bool:
    uses = uses_of(module.spelling, group.param)
    if uses is not None and group.part is not None:
        uses = uses[group.part : group.part + 1] or None
    if uses is None:
        return False
    shape = stacked_shape(index.component, uses)
    factors = group.factors
    if fitted(factors, shape) is not None or widened(factors, shape, uses) is not None:
        return True
    return group.peft and fitted(replace(factors, transposed=not factors.transposed), shape) is not None
