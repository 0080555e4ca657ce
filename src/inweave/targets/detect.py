"""Which base model an adapter was made for.

Every known base is scored by the number of modules that exist there with matching shapes; the highest
score wins. Metadata only breaks ties: it is often wrong, shapes never are. Two quick looks keep this
cheap: bases of families that know none of the names are not scored, and an exact tie is reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from inweave.adapter import Adapter, Entry
from inweave.targets.bases import KNOWN, Known, known_index, listed_modules
from inweave.targets.index import DENOISER_TABLES
from inweave.targets.links import Naming
from inweave.targets.locate import fits
from inweave.targets.resolve import resolve
from inweave.targets.rules import RuleTable
from inweave.targets.tables import SPELLINGS, TABLES

_NUMBER = re.compile(r"\d+")
_UNET = re.compile(
    r"(down_blocks|up_blocks)_#_[a-z]|(input_blocks|output_blocks)_#_|mid_block_|middle_block_#|time_embed|add_embedding|label_emb|conv_in|conv_out|out_#"
)
_MARKS = (
    "modelspec.architecture",
    "ss_base_model_version",
    "ss_sd_model_name",
    "base_model",
    "baseModel",
    "ot_model_type",
)


@dataclass(frozen=True, slots=True)
class Detection:
    base: str | None
    confidence: float
    evidence: tuple[str, ...] = ()
    scores: Mapping[str, int] = field(default_factory=dict)
    total: int = 0

    def fits_as_well(self, base: str) -> bool:
        """Whether ``base`` scores as high as the detected one."""
        return self.base is not None and self.scores.get(base, -1) == self.scores[self.base]


def detect(adapter: Adapter) -> Detection:
    """The most likely base, how sure that is, and why."""
    entries = [e for e in adapter.entries if e.param == "weight" and not e.ref.below]
    if not entries:
        return Detection(None, 0.0, ("no modules to go by",))
    candidates = _candidates(entries)
    if any(e.ref.name.startswith("#") for e in entries):
        return _listed(adapter, entries)
    scores = _scores(candidates, entries)
    best = max(scores.values(), default=0)
    if best == 0:
        return Detection(None, 0.0, ("no known base has these modules",), scores, len(entries))
    tied = [name for name, score in scores.items() if score == best]
    if best * 2 < len(entries):
        name = tied[0]
        return Detection(
            None,
            0.0,
            (f"only {best} of {len(entries)} modules exist in {name}, the nearest base",),
            scores,
            len(entries),
        )
    chosen, evidence = _break_tie(tied, adapter.metadata)
    by_metadata = bool(evidence)
    variants = {known.name: known.variant_of for known in KNOWN}
    evidence.insert(0, f"{best} of {len(entries)} modules exist in {chosen} with matching shapes")
    behind = [(score, name) for name, score in scores.items() if score < best]
    if behind:
        score, name = max(behind)
        evidence.append(f"next: {name} with {score}")
    if len(tied) > 1:
        evidence.append(f"fits equally: {', '.join(name for name in tied if name != chosen)}")
    models = {variants.get(name) or name for name in tied}
    certainty = 1.0 if len(models) == 1 else 0.9 if by_metadata else 0.6
    confidence = best / len(entries) * certainty
    return Detection(chosen, round(confidence, 3), tuple(evidence), scores, len(entries))


def _scores(candidates: list[Known], entries: list[Entry]) -> dict[str, int]:
    """Modules that fit, by base. A variant differs in its input layer only: unless that is named, it scores alike."""
    encoders = [entry for entry in entries if entry.ref.component.startswith("te")]
    others = [entry for entry in entries if not entry.ref.component.startswith("te")]
    namings = _namings(others)
    input_named = any(_INPUT.search(entry.ref.name) for entry in others)
    scores: dict[str, int] = {}
    for known in candidates:
        if known.variant_of in scores and not input_named and known.name != "flux1-schnell":
            scores[known.name] = scores[known.variant_of]
            continue
        index = known_index(known.name)
        score = sum(1 for entry in others if fits(entry, index, namings))
        scores[known.name] = score + sum(1 for entry in encoders if fits(entry, index, ("diffusers",)))
    return scores


_INPUT = re.compile(r"conv_in|input_blocks[._]0[._]|x_embedder|img_in|pos_embed|patch_embedding")
_LDM = re.compile(r"(input|output)_blocks[._]|middle_block[._]|time_embed[._]\d|label_emb|out[._]\d")


def _namings(entries: list[Entry]) -> tuple[Naming, ...]:
    """The namings that occur; a UNet's are told apart by their first word, so that one need not be built."""
    unet = [entry for entry in entries if _UNET.match(_NUMBER.sub("#", entry.ref.name.replace(".", "_")))]
    if len(unet) * 2 < len(entries) or not entries:
        return ("diffusers", "original")
    original = sum(1 for entry in unet if _LDM.match(entry.ref.name))
    if original == 0:
        return ("diffusers",)
    return ("original",) if original == len(entries) else ("diffusers", "original")


def _break_tie(tied: list[str], metadata: Mapping[str, str]) -> tuple[str, list[str]]:
    for field_name in _MARKS:
        value = metadata.get(field_name, "").lower()
        for known in KNOWN if value else ():
            if known.name in tied and any(value.startswith(mark) for mark in known.marks):
                return known.name, [f"{field_name} says {metadata[field_name]}"]
    return tied[0], []


def _candidates(entries: list[Entry]) -> list[Known]:
    """Bases of the families whose names occur, cheap to find because only name forms are compared."""
    forms: dict[str, int] = {}
    for entry in entries:
        if not entry.ref.component.startswith("te"):
            form = _NUMBER.sub("#", entry.ref.name.replace(".", "_"))
            forms[form] = forms.get(form, 0) + 1
    total = sum(forms.values())
    counts: dict[str, int] = {}
    for name, knows in _families():
        counts[name] = sum(n for form, n in forms.items() if knows(form))
        if counts[name] == total > 0 and name == "unet":
            break  # no other family shares a UNet's names
    best = max(counts.values(), default=0)
    if best > 0:
        families = {name for name, count in counts.items() if count * 2 >= best}
        return [known for known in KNOWN if _family(known) in families]
    return [known for known in KNOWN if known.parts[0].component != "unet" or known.name in _WITH_ENCODERS]


#: one base for each set of text encoders, for adapters that train nothing else
_WITH_ENCODERS = ("sd1.5", "sd2.1", "sdxl", "sd3.5-large", "flux1-dev")


def _family(known: Known) -> str:
    part = known.parts[0]
    return part.listing if part.table == "own" else part.table


def _families() -> Iterator[tuple[str, Callable[[str], bool]]]:
    """(family, does it know this form), the UNets first."""
    yield "unet", lambda form: _UNET.match(form) is not None
    for name, table in TABLES.items():
        if isinstance(table, RuleTable) and name in DENOISER_TABLES and not name.endswith("-comfy"):
            further = (TABLES[other] for other in SPELLINGS.get(name, ()))
            forms = table.module_forms().union(*(t.module_forms() for t in further if isinstance(t, RuleTable)))
            yield name, forms.__contains__
    for known in KNOWN:
        part = known.parts[0]
        if part.table == "own" and not part.component.startswith("te"):
            yield part.listing, _listing_forms(part.listing).__contains__


def _listing_forms(name: str) -> set[str]:
    modules = listed_modules(name)
    return {form.replace(".", "_") for module in modules for form in (module, module.partition(".")[2])}


def _listed(adapter: Adapter, entries: list[Entry]) -> Detection:
    """Numbered lists carry no names: the count and order of layers of SD 1.5 is the only one known."""
    scores: dict[str, int] = {}
    for name in ("sd1.5", "sd2.1"):
        report = resolve(adapter, known_index(name), strict=False).report
        scores[name] = report.modules
    best = max(scores, key=lambda name: scores[name])
    basis = "the recorded classes" if adapter.metadata.get("unet") else "the order of the layers"
    evidence = f"{scores[best]} of {len(entries)} numbered layers fit {best} by shape and {basis}"
    return Detection(best, round(0.9 * scores[best] / len(entries), 3), (evidence,), scores, len(entries))
