"""Detect the base model that an adapter was made for, with a confidence.

Every known base is scored by the number of modules that exist there with matching shapes (`inweave.targets.scores`).
A file made for a base has no module that the base lacks: a name that is not there weighs like a shape that does not
fit, and the nearest base of a file that fits none is not its base. Names and shapes prove more than metadata, which is
often wrong, so metadata only chooses among bases that fit equally; if it names another one
(`inweave.targets.declared`), that is reported and lowers the confidence.

    confidence = certainty of the choice  x  a half where the metadata names another family
                 x  less than a half, and 10 % less per 1 % of the modules, where some do not fit; none from 5 % on

    certainty    1      one model fits, maybe with variants of it (inpainting)
                 0.9    several fit equally, metadata says which
                 0.8    several fit equally, one of them is changed from its first block to its last, and the others
                        have more modules with the file's leaves
                 0.7    several of one architecture fit equally (versions, image-to-video)
                 1 / n  bases of n architectures fit equally
                 0.4    at most, where the file stops before the end of a stack of blocks, as those of a shorter model

Bases of families that know none of the names are not scored. ``proven`` is a confidence of a half and more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from inweave.adapter import Adapter, Entry
from inweave.targets.bases import KNOWN, Known, known_index, listed_modules
from inweave.targets.catalog import load_outside_bases
from inweave.targets.declared import Declaration, contradicts, declarations, family_of, model_of
from inweave.targets.index import DENOISER_TABLES
from inweave.targets.links import Naming
from inweave.targets.locate import is_saved_module
from inweave.targets.resolve import resolve
from inweave.targets.rules import RuleTable
from inweave.targets.scores import EntryGroup, Score, grouped, score
from inweave.targets.spellings import alternatives, fused_leaves
from inweave.targets.tables import SPELLINGS, TABLES

_UNET = re.compile(
    r"(down_blocks|up_blocks)_#_[a-z]|(input_blocks|output_blocks)_#_|mid_block_|middle_block_#|time_embed|add_embedding|label_emb|conv_in|conv_out|out_#"
)


#: with a smaller share of the modules that its names target, a file is of a part of the model: the share says nothing
_MOST = 0.5
_FEW = 0.05  # share of modules that may not fit the base that is named


@dataclass(frozen=True, slots=True)
class Detection:
    """The likeliest base; ``equals``: other bases that the tensors fit as well; ``warnings``: evidence against it.

    ``rivals``: those of the equals that neither metadata nor the blocks and modules rule out.
    """

    base: str | None
    confidence: float
    evidence: tuple[str, ...] = ()
    scores: Mapping[str, int] = field(default_factory=dict)
    total: int = 0
    equals: tuple[str, ...] = ()
    declared: tuple[Declaration, ...] = ()
    warnings: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Return the fields of the documented JSON that describe the base."""
        return {
            "detected": self.base,
            "confidence": self.confidence,
            "evidence": list(self.evidence),
            "fits_equally": list(self.equals),
            "declared": [
                {"field": each.field, "value": each.label, "bases": list(each.bases)}
                for each in self.declared
                if not each.hint
            ],
        }

    @property
    def proven(self) -> bool:
        """Whether the base is certain enough for work that depends on it."""
        return self.base is not None and self.confidence >= 0.5

    def fits_as_well(self, base: str) -> bool:
        """Return whether ``base`` scores as high as the detected one."""
        return self.base is not None and self.scores.get(base, -1) == self.scores[self.base]


@dataclass(frozen=True, slots=True)
class Fit:
    """The fit of an adapter's tensors to each base, by names and shapes alone, so that files of one layout share it.

    ``fixed``: the detection, if no metadata can change it.
    """

    scores: Mapping[str, Score] = field(default_factory=dict)
    entries: int = 0
    encoders: int = 0  # entries of text encoders
    fixed: Detection | None = None

    def decide(self, declared: tuple[Declaration, ...]) -> Detection:
        """Return the likeliest base, with what the metadata declares."""
        if self.fixed is not None:
            return self.fixed
        counts = {name: each.placed for name, each in self.scores.items()}
        best = max(counts.values(), default=0)
        known = tuple(map(str, _known(declared)))
        if best == 0:
            wrong = max((each.contradicted for each in self.scores.values()), default=0)
            reason = "no known base has these modules"
            if wrong:
                near = [name for name, each in self.scores.items() if each.contradicted == wrong]
                names = ", ".join(near[:3]) + (f" and {len(near) - 3} more" if len(near) > 3 else "")
                reason = f"{wrong} of {self.entries} modules have names of {names}, and shapes of no known base"
            return Detection(None, 0.0, (reason, *known), counts, self.entries, declared=declared)
        nearest = max(counts, key=lambda base: counts[base])
        total = self.entries - (self.encoders if self.encoders < self.entries and not _has_encoder(nearest) else 0)
        if total - best > _FEW * total:
            wrong = self.scores[nearest].contradicted
            shapes = f"; {wrong} have names of it and other shapes or blocks" if wrong else ""
            reason = f"only {best} of {total} modules exist in {nearest}, the nearest base{shapes}"
            return Detection(None, 0.0, (reason, *known), counts, total, declared=declared)
        return _choose(self.scores, best, total, declared)


def detect(adapter: Adapter) -> Detection:
    """Return the most likely base, the confidence, and the reasons."""
    return fit(adapter).decide(tuple(declarations(adapter.metadata, adapter.config)))


def fit(adapter: Adapter) -> Fit:
    """Return the scores of an adapter's tensors, before its metadata is considered."""
    entries = [e for e in adapter.entries if e.param == "weight" and not e.ref.below and not is_saved_module(e)]
    if not entries:
        return Fit(fixed=Detection(None, 0.0, ("no modules to go by",)))
    if any(e.ref.name.startswith("#") for e in entries):
        return Fit(fixed=_listed(adapter, entries))
    groups = grouped(entries)
    scores = _scores(_candidates(groups), groups)
    most = max((each.placed for each in scores.values()), default=0)
    if most < len(entries) and load_outside_bases():
        scores = _scores(_candidates(groups), groups)
    return Fit(scores, len(entries), sum(len(group.numbers) for group in groups if group.encoder))


def _has_encoder(base: str) -> bool:
    """Return whether the tensors of the base's text encoder are known; if not, modules of one prove nothing."""
    return any(part.component.startswith("te") for known in KNOWN if known.name == base for part in known.networks)


def _unlikely(score: Score) -> tuple[float, ...]:
    """Return the order of bases that all have a file's modules; of equal ones the first in the catalog is chosen."""
    return score.contradicted, -score.whole, -score.complete if score.complete >= _MOST else 0.0


def _choose(scores: Mapping[str, Score], best: int, total: int, declared: tuple[Declaration, ...]) -> Detection:
    tied = [name for name, each in scores.items() if each.placed == best]
    tied.sort(key=lambda name: _unlikely(scores[name]))
    likely, source = tied, None
    for each in declared:
        agreeing = [name for name in likely if name in each.bases]
        if agreeing and len(agreeing) < len(likely):
            likely, source = agreeing, source or each
    narrowed = ""
    most = max(scores[name].complete for name in likely)
    whole = "every block of {} is changed", [name for name in likely if scores[name].whole == 1]
    most_of_them = [name for name in likely if scores[name].complete >= max(_MOST, 0.8 * most)]
    complete = "the others have more modules with these names", most_of_them
    for reason, names in (whole, complete):
        rest = [name for name in names if name in likely]
        if len({model_of(name) for name in likely}) > 1 and 0 < len(rest) < len(likely):
            likely, narrowed = rest, reason
    chosen, families = likely[0], {family_of(name) for name in likely}
    evidence = [f"{best} of {total} modules exist in {chosen} with matching shapes"]
    if narrowed:
        evidence.append(narrowed.format(chosen))
    if len({model_of(name) for name in tied}) == 1:
        certainty = 1.0
    elif len({model_of(name) for name in likely}) == 1:
        certainty = 0.8 if narrowed else 0.9
    else:
        certainty = 0.7 if len(families) == 1 else max(0.2, 1 / len(families))
    warnings, belief = _against(chosen, declared)
    if certainty <= 0.7:
        warnings.insert(0, f"several bases fit equally: {', '.join(likely)}")
    if scores[chosen].short and source is None:
        certainty = min(certainty, 0.4)
        evidence.append(f"the last blocks of {chosen} are not changed: the file may be for a shorter model")
    if source is not None:
        evidence.append(str(source))
    behind = [(each.placed, name) for name, each in scores.items() if each.placed < best]
    if behind:
        placed, name = max(behind)
        evidence.append(f"next: {name} with {placed}")
    equals = tuple(name for name in tied if name != chosen)
    if equals:
        evidence.append(f"fits equally: {', '.join(equals)}")
    twins = next((known.same_tensors for known in KNOWN if known.name == chosen), ())
    if twins:
        evidence.append(f"the same tensors have {', '.join(twins)}")
    confidence = certainty * belief
    if best < total:
        misfits, contradicted = total - best, scores[chosen].contradicted
        shapes = f" ({contradicted} have a name of it and another shape)" if contradicted else ""
        evidence.append(f"{misfits} of {total} modules do not fit {chosen}{shapes}: made for a model like it")
        confidence *= 0.45 * max(0.1, 1 - 10 * misfits / total)
    counts = {name: each.placed for name, each in scores.items()}
    rivals = tuple(name for name in likely[1:] if model_of(name) != model_of(chosen))
    return Detection(
        chosen, round(confidence, 3), tuple(evidence), counts, total, equals, declared, tuple(warnings), rivals
    )


def _against(base: str, declared: tuple[Declaration, ...]) -> tuple[list[str], float]:
    """Return what the metadata declares against ``base``, and by how much that lowers the confidence."""
    warnings, belief = [], 1.0
    for each in declared:
        if contradicts(each, base):
            warnings.append(contradiction(each, base))
            near = any(family_of(other) == family_of(base) for other in each.bases)
            belief = min(belief, 0.8 if near else 0.5 if each.bases else 0.7)
    return warnings, belief


def contradiction(declaration: Declaration, base: str) -> str:
    """Return the line that reports metadata which names another base than ``base``."""
    if not declaration.bases:
        return f"the metadata names an architecture that inweave does not know ({declaration}); the tensors fit {base}"
    names = " or ".join(declaration.bases[:4])
    return f"the metadata names another base, {names} ({declaration}); the tensors fit {base}"


def _known(declared: tuple[Declaration, ...]) -> list[Declaration]:
    return [each for each in declared if each.bases and not each.hint]


def _scores(candidates: list[Known], groups: list[EntryGroup]) -> dict[str, Score]:
    """Count modules that fit, by base. A variant differs in its input layer only: unless that is named, it
    scores alike.
    """
    namings = _namings(groups)
    input_named = any(_INPUT.search(group.form) for group in groups)
    encoders = any(group.encoder for group in groups)
    candidates = [known for known in candidates if not known.own_modules or _is_denoiser(known, groups)]
    parts = {known.name: known.parts for known in candidates}
    scores: dict[str, Score] = {}
    for known in candidates:
        same_encoders = not encoders or known.parts[1:] == parts.get(known.variant_of, ())[1:]
        if known.variant_of in scores and not input_named and same_encoders and known.parts[0].table == "unet":
            scores[known.name] = scores[known.variant_of]
        else:
            scores[known.name] = score(known, groups, namings)
    return scores


def _is_denoiser(known: Known, groups: list[EntryGroup]) -> bool:
    """Return whether a file is for this denoiser, and not for the language model whose modules it has too."""
    return any(group.component == "unet" or any(own in group.form for own in known.own_modules) for group in groups)


_INPUT = re.compile(
    r"conv_in|input_blocks[._]#[._]#$|x_embedder|img_in|pos_embed|patch_embedding|add_embedding|label_emb"
)
_LDM = re.compile(r"(input|output)_blocks[._]|middle_block[._]|time_embed[._]#|label_emb|out[._]#")


def _namings(groups: list[EntryGroup]) -> tuple[Naming, ...]:
    """Return the namings that occur; a UNet's are distinguished by their first word, so that one need not be built."""
    denoiser = [group for group in groups if not group.encoder]
    unet = [group for group in denoiser if _UNET.match(group.form.replace(".", "_"))]
    if len(unet) * 2 < len(denoiser) or not denoiser:
        return ("diffusers", "original")
    original = sum(1 for group in unet if _LDM.match(group.form))
    if original == 0:
        return ("diffusers",)
    return ("original",) if original == len(denoiser) else ("diffusers", "original")


def _candidates(groups: list[EntryGroup]) -> list[Known]:
    """Bases of the families whose names occur, cheap to find because only name forms are compared."""
    forms: dict[tuple[str, ...], int] = {}
    for group in groups:
        if not group.encoder:
            spellings = _spellings(group)
            forms[spellings] = forms.get(spellings, 0) + len(group.numbers)
    total = sum(forms.values())
    counts: dict[str, int] = {}
    for name, knows in _families():
        counts[name] = sum(n for spellings, n in forms.items() if any(map(knows, spellings)))
        if counts[name] == total > 0 and name == "unet":
            break  # no other family shares a UNet's names
    best = max(counts.values(), default=0)
    if best > 0:
        families = {name for name, count in counts.items() if count * 2 >= best}
        return [known for known in KNOWN if _names_of(known) in families]
    return [known for known in KNOWN if known.parts[0].component != "unet" or known.name in _WITH_ENCODERS]


def _spellings(group: EntryGroup) -> tuple[str, ...]:
    """Return the flat forms under which a family may know the modules of a group."""
    forms = [group.form, *alternatives(group.form, flat=group.flat, any_root=True)]
    forms += [leaf for form in forms for leaf in fused_leaves(form)[:1]]
    forms += [form.rpartition("_")[0] for form in forms if form.endswith(("linear#_qkv", "linear#_mlp"))]
    return tuple(form.replace(".", "_") for form in forms)


#: one base for each set of text encoders, for adapters that train nothing else
_WITH_ENCODERS = (
    "sd1.5",
    "sd2.1",
    "sdxl",
    "sd3.5-large",
    "flux1-dev",
    "qwen-image",
    "z-image-turbo",
    "lumina2",
    "anima",
)


def _names_of(known: Known) -> str:
    part = known.parts[0]
    return part.listing if part.table == "own" else part.table


def _families() -> Iterator[tuple[str, Callable[[str], bool]]]:
    """Yield (family, whether it knows this form), the UNets first."""
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
