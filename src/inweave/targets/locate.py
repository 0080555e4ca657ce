"""Find the module of a model that an entry of an adapter names.

1. the component: the one the file names; text encoders also by content, because trainers number them
   differently ("te2" is bigG, T5 or nothing, depending on the trainer)
2. the module: looked up among the model's own names, in both namings; where the two disagree about a
   name, the naming most of the file's other names belong to decides
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

from inweave.adapter import Adapter, Entry, Ref
from inweave.targets.bases import same_names
from inweave.targets.fit import fitted, stacked_shape, uses_of
from inweave.targets.index import Component, ModelIndex, Spelling
from inweave.targets.links import Naming
from inweave.targets.order import encoder_order, unet_order


@dataclass(slots=True)
class Match:
    component: Component
    spelling: Spelling
    naming: str = "diffusers"


class Locator:
    """Looks entries of one adapter up in one index."""

    def __init__(self, adapter: Adapter, index: ModelIndex) -> None:
        self.adapter = adapter
        self.index = index
        components = {entry.ref.component for entry in adapter.entries}
        self.two_denoisers = "unet2" in components and bool(components & {"unet", ""})
        self.prefer = self._vote("unet"), self._vote("te")
        self.orders: dict[str, list[str]] = {}

    def _vote(self, network: str) -> Naming:
        """Return the naming that most of the file's names belong to exclusively; it decides names both namings have."""
        votes: Counter[str] = Counter()
        entries = [entry for entry in self.adapter.entries if entry.ref.component.startswith("te") == (network == "te")]
        for entry in entries:
            for component in self.candidates(entry.ref):
                readings = component.readings_of(entry.ref.name, flat=entry.ref.flat)
                if len(readings) == 1:
                    votes.update(readings.keys())
        return "original" if votes["original"] > votes["diffusers"] else "diffusers"

    def candidates(self, ref: Ref) -> list[Component]:
        index = self.index
        generic = index.components.get("model")
        if ref.component == "unet" or not ref.component:
            denoisers = [c for c in (index.denoiser, generic) if c]
            return denoisers + (index.encoders if not ref.component or not denoisers else [])
        if ref.component == "unet2":
            second = index.components.get("unet2") or (None if self.two_denoisers else index.denoiser)
            return [second] if second else []
        own = index.components.get(ref.component)
        others = [c for c in index.encoders if c is not own]
        return ([own] if own else []) + others + ([generic] if generic else [])

    def match(self, entry: Entry) -> Match | str:
        """Return the component and module an entry names, or the reason there is none."""
        ref = entry.ref
        if ref.name.startswith("#"):
            return self._match_listed(entry)
        candidates = self.candidates(ref)
        if not candidates and ref.component == "unet2":
            return (
                "the file changes two denoisers (transformer_2 is the second expert, for low noise), the base has one; "
                "use a model that holds both, or split the file by its prefixes"
            )
        if not candidates:
            return f"the base has no component {ref.component!r} (it has {', '.join(self.index.components)})"
        prefer = self.prefer[ref.component.startswith("te")]
        hits = [
            Match(component, *reading)
            for component in candidates
            if (reading := component.look_up(ref.name, flat=ref.flat, prefer=prefer)) is not None
        ]
        if not hits:
            return f"no module of this name in the base{self._unknown_names(candidates)}"
        exact = [hit for hit in hits if hit.component.name == ref.component]
        if ref.component in ("unet", "") and hits[0].component.name in ("unet", "model"):
            exact = hits[:1]
        if exact and (ref.component != "te" or len(hits) == 1):
            return exact[0]
        if len(hits) == 1:
            return hits[0]
        fitting = [hit for hit in hits if self._fits(entry, hit)]
        if len(fitting) == 1:
            return fitting[0]
        names = ", ".join(hit.component.name for hit in hits)
        return f"the file does not say which text encoder is meant, and it fits several ({names})"

    def _unknown_names(self, candidates: list[Component]) -> str:
        """Return that a denoiser's original names are not known, where no table and no listing gives them."""
        known = same_names(self.index)
        if any(c.name == "unet" and c.table.name == "own" for c in candidates) and not (
            known and known.parts[0].one_naming
        ):
            return ", of which inweave knows diffusers' names alone: a file in the original names cannot be placed"
        return ""

    def _match_listed(self, entry: Entry) -> Match | str:
        """List files number their layers; the order is that of the program that wrote them."""
        component = self.candidates(entry.ref)[0] if self.candidates(entry.ref) else None
        if component is None:
            return f"the base has no component {entry.ref.component!r}"
        if component.name not in self.orders:
            modules = component.by_diffusers
            self.orders[component.name] = (
                unet_order(modules, extended=self._extended()) if component.name == "unet" else encoder_order(modules)
            )
        order, number = self.orders[component.name], int(entry.ref.name[1:])
        if number >= len(order):
            return f"the file numbers a layer {number}, the base has {len(order)} in list order"
        return Match(component, component.by_diffusers[order[number]])

    def _extended(self) -> bool:
        if recorded := self.adapter.metadata.get("unet"):
            try:
                classes = json.loads(recorded)
            except (ValueError, RecursionError):
                classes = None
            if isinstance(classes, list):
                return "ResnetBlock2D" in classes
        return any(not e.factors.whole and len(e.factors.shape()) > 2 for e in self.adapter.entries)

    def _fits(self, entry: Entry, hit: Match) -> bool:
        uses = uses_of(hit.spelling, entry.param.removesuffix("?"))
        return uses is not None and fitted(entry.factors, stacked_shape(hit.component, uses)) is not None


def is_saved_module(entry: Entry) -> bool:
    """Return whether PEFT saved the module whole, such as a classifier's head: it may be new to the base."""
    return entry.dialect == "peft" and entry.factors.whole and entry.factors.replaces
