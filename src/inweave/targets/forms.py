"""A network's modules by the form of their names: enough to count matches without listing every block.

    form       a flat module name with `#` for each number:      transformer_blocks_#_attn_to_q
    numbers    which numbers each `#` may be, one set per slot:  ({0 .. 18},)

    leaf       the end of a dotted name, as trainers write their targets: attn.to_q -> to_q, attn.to_out.0 -> to_out.#

The shipped listings write a stack of blocks as one range, and the range of the outermost stack stays one here: a
transformer of 60 blocks is indexed as if it had one, in both namings, by the tables that index the whole network.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

from inweave.targets.bases import KnownNetwork, condensed_component
from inweave.targets.compact import numbers_of
from inweave.targets.index import Component, Spelling, stacked
from inweave.targets.links import Naming
from inweave.targets.spellings import alternatives, fused_leaves

_SLOT = re.compile(r"\d+|\[[0-9,-]+\]")
_LEAF = re.compile(r"[^.]+(?:\.#)*$")
_COMMON = ("proj", "linear", "linear_#", "lin", "#")  # leaves that say too little without what is before them


@dataclass(frozen=True, slots=True)
class FormModule:
    """The modules that share one form and one shape, with their numbers and the parts each covers."""

    numbers: tuple[frozenset[str], ...]
    spelling: Spelling

    @property
    def count(self) -> int:
        """The number of modules."""
        return math.prod(map(len, self.numbers))

    def has(self, numbers: tuple[str, ...]) -> bool:
        return all(number in allowed for number, allowed in zip(numbers, self.numbers, strict=True))


class FormIndex:
    """The modules of one network, by form, in either naming."""

    def __init__(self, component: Component) -> None:
        self.component = component
        self._forms: dict[Naming, dict[str, list[FormModule]]] = {}
        self._leaves: dict[Naming, dict[str, str]] = {}

    def look_up(self, form: str, *, flat: bool, namings: tuple[Naming, ...]) -> tuple[str, list[FormModule]]:
        """Return the form under which the network knows a name, and the modules of that form; empty if it knows none.

        ``form`` is dotted unless ``flat``: the roots of wrappers are ignored, as for whole names.
        """
        any_root = self.component.table.name == "own"
        for spelled in (form, *alternatives(form, flat=flat, any_root=any_root)):
            plain = spelled.replace(".", "_")
            modules = [module for naming in namings for module in self._modules(plain, naming)]
            if modules:
                return plain, modules
        return form, []

    def count_siblings(self, forms: Collection[str], namings: tuple[Naming, ...]) -> int:
        """Return the number of modules whose leaf is that of one of ``forms``: what a trainer with these targets
        trains.
        """
        naming = max(namings, key=lambda each: sum(form in self._leaves.get(each, ()) for form in forms))
        leaves = self._leaves.get(naming, {})
        targets = {leaves[form] for form in forms if form in leaves}
        return sum(m.count for form, leaf in leaves.items() if leaf in targets for m in self._forms[naming][form])

    def _modules(self, form: str, naming: Naming) -> list[FormModule]:
        if naming not in self._forms:
            component = self.component
            spellings = component.by_diffusers if naming == "diffusers" else component.by_original
            self._forms[naming] = _by_form(spellings)
            self._leaves[naming] = {form.replace(".", "_"): leaf_of(form) for form in map(form_of, spellings)}
        modules = self._forms[naming].get(form)
        if modules is None and naming == "diffusers" and (leaves := fused_leaves(form)):
            return self._fused(leaves)
        return modules or []

    def _fused(self, leaves: tuple[str, ...]) -> list[FormModule]:
        """Return the projections that stack ``leaves`` of the same blocks."""
        first, *others = (self._forms["diffusers"].get(leaf, []) for leaf in leaves)
        fused = []
        for module in first:
            rows = [module, *(next((m for m in each if m.numbers == module.numbers), None) for each in others)]
            spelling = stacked([m.spelling for m in rows if m is not None], self.component.parts)
            if None not in rows and spelling is not None:
                fused.append(FormModule(module.numbers, spelling))
        return fused


@lru_cache(maxsize=256)
def form_index(part: KnownNetwork) -> FormIndex:
    """Return the forms of one network of a known base."""
    return FormIndex(condensed_component(part))


def form_of(name: str) -> str:
    """Return a name with `#` for each number."""
    return _SLOT.sub("#", name)


def leaf_of(form: str) -> str:
    """Return the end of a dotted form that trainers name as a target."""
    match = _LEAF.search(form)
    leaf = match[0] if match else form
    return ".".join(form.split(".")[-3:]) if leaf in _COMMON else leaf


def numbers_in(name: str) -> tuple[str, ...]:
    """Return the numbers of a name, in order."""
    return tuple(_SLOT.findall(name))


def _by_form(spellings: Mapping[str, Spelling]) -> dict[str, list[FormModule]]:
    forms: dict[str, list[FormModule]] = {}
    for name, spelling in spellings.items():
        numbers = tuple(_numbers(slot) for slot in _SLOT.findall(name))
        forms.setdefault(form_of(name.replace(".", "_")), []).append(FormModule(numbers, spelling))
    return forms


@lru_cache(maxsize=4096)
def _numbers(slot: str) -> frozenset[str]:
    return frozenset(numbers_of(slot[1:-1]) if slot[0] == "[" else (slot,))
