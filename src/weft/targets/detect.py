"""Which base model an adapter was made for.

Every known base is scored by the number of modules that exist there with matching shapes; the highest
score wins. Metadata only breaks ties: it is often wrong, shapes never are. Two quick looks keep this
cheap: bases of families that know none of the names are not scored, and an exact tie is reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from weft.adapter import Adapter, Entry
from weft.targets.bases import KNOWN, Known, known_index, listing
from weft.targets.locate import fits
from weft.targets.resolve import resolve
from weft.targets.rules import RuleTable
from weft.targets.tables import TABLES

_NUMBER = re.compile(r"\d+")
_UNET = re.compile(
    r"(down_blocks|up_blocks|input_blocks|output_blocks)_#_|mid_block_|middle_block_#|time_embed|add_embedding|label_emb|conv_in|conv_out|out_#"
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
    scores = {known.name: _score(known, entries) for known in candidates}
    best = max(scores.values(), default=0)
    if best == 0:
        return Detection(None, 0.0, ("no known base has these modules",), scores, len(entries))
    tied = [name for name, score in scores.items() if score == best]
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


def _score(known: Known, entries: list[Entry]) -> int:
    index = known_index(known.name)
    return sum(1 for entry in entries if fits(entry, index))


def _break_tie(tied: list[str], metadata: Mapping[str, str]) -> tuple[str, list[str]]:
    for field_name in _MARKS:
        said = metadata.get(field_name, "").lower()
        for known in KNOWN if said else ():
            if known.name in tied and any(said.startswith(mark) for mark in known.marks):
                return known.name, [f"{field_name} says {metadata[field_name]}"]
    return tied[0], []


def _candidates(entries: list[Entry]) -> list[Known]:
    """Bases of the families whose names occur, cheap to find because only name forms are compared."""
    forms: dict[tuple[bool, str], int] = {}
    for entry in entries:
        key = entry.ref.component.startswith("te"), _NUMBER.sub("#", entry.ref.name.replace(".", "_"))
        forms[key] = forms.get(key, 0) + 1
    families = {
        name: sum(n for (te, form), n in forms.items() if not te and knows(form)) for name, knows in _families().items()
    }
    best = max(families.values(), default=0)
    if best > 0:
        kept = {name for name, count in families.items() if count * 2 >= best}
        return [known for known in KNOWN if _family(known) in kept]
    return [
        known
        for known in KNOWN
        if known.parts[0].component != "unet" or known.name in ("sd1.5", "sd2.1", "sdxl", "sd3.5-large", "flux1-dev")
    ]


def _family(known: Known) -> str:
    part = known.parts[0]
    return part.listing if part.table == "own" else part.table


def _families() -> dict[str, Callable[[str], bool]]:
    found: dict[str, Callable[[str], bool]] = {"unet": lambda form: _UNET.match(form) is not None}
    for name, table in TABLES.items():
        if isinstance(table, RuleTable) and name != "openclip":
            found[name] = table.module_forms().__contains__
    for known in KNOWN:
        part = known.parts[0]
        if part.table == "own" and part.component != "te1" and part.component != "te3":
            found[part.listing] = _listing_forms(part.listing).__contains__
    return found


def _listing_forms(name: str) -> set[str]:
    forms = set()
    for tensor in listing(name):
        module = tensor.rpartition(".")[0] or tensor
        for spelt in (module, module.partition(".")[2]):
            forms.add(_NUMBER.sub("#", spelt.replace(".", "_")))
    return forms


def _listed(adapter: Adapter, entries: list[Entry]) -> Detection:
    """Numbered lists carry no names: the count and order of layers of SD 1.5 is the only one known."""
    scores: dict[str, int] = {}
    for name in ("sd1.5", "sd2.1"):
        report = resolve(adapter, known_index(name), strict=False).report
        scores[name] = report.modules
    best = max(scores, key=lambda name: scores[name])
    said = "the recorded classes" if adapter.metadata.get("unet") else "the order of the layers"
    evidence = f"{scores[best]} of {len(entries)} numbered layers fit {best} by shape and {said}"
    return Detection(best, round(0.9 * scores[best] / len(entries), 3), (evidence,), scores, len(entries))
