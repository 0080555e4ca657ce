"""The verdict on an adapter and a base: is every tensor used exactly once, and is all of it finite?

A base given by name is checked as a diffusers folder and as a single-file checkpoint; the better of the two decides,
and tensors that do not fit the other one are a warning. Tensors may fit a base they were not made for: metadata that
names another one, and other bases that fit equally, are warnings too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal, get_args

from inweave.adapter import Adapter
from inweave.errors import ConfigError
from inweave.exchange.load import load, open_base
from inweave.exchange.ties import tied_changes
from inweave.files.paths import exists
from inweave.formats.alphas import Alphas
from inweave.formats.files import maps_of, refuse_truncated
from inweave.formats.finite import scan
from inweave.targets.bases import Known, find, known_index
from inweave.targets.declared import contradicts, model_of
from inweave.targets.detect import Detection, contradiction, detect
from inweave.targets.index import ModelIndex
from inweave.targets.plan import Finding, Placement, Plan, Report
from inweave.targets.resolve import resolve

ValueCheck = Literal["none", "sample", "full"]
SAMPLE_BYTES = 64 * 1024


@dataclass(slots=True, repr=False)
class Verdict:
    """Whether an adapter fits a base, and why; the result of `check`.

    ``ok`` only if every tensor of the adapter is used exactly once and all of them are finite. ``report`` lists each
    tensor that is not, ``detected`` is the base the adapter seems to be for, ``assumed_alphas`` names modules without
    an alpha in the file (alpha = rank is assumed), ``placements`` are the tensors of the base that change, each with
    its part of the adapter, ``as_dict()`` is the JSON of `inweave check`.
    """

    ok: bool
    dialect: str
    algorithms: list[str]
    base: str
    detected: str | None
    confidence: float
    evidence: tuple[str, ...]
    report: Report
    nonfinite: list[dict[str, object]] = field(default_factory=list)
    zeros: list[str] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)
    namings: dict[str, bool] = field(default_factory=dict)
    error: str | None = None
    detection: Detection | None = None
    doubts: list[str] = field(default_factory=list)  # why the base may be the wrong one although it fits
    assumed_alphas: tuple[str, ...] = ()
    placements: tuple[Placement, ...] = ()

    def __repr__(self) -> str:
        verdict = "fits" if self.ok else "does not fit"
        return f"<Verdict: {verdict} {self.base}: {self.report!r}{f'; {self.error}' if self.error else ''}>"

    def as_dict(self) -> dict[str, object]:
        """Return the documented JSON of `inweave check`."""
        report = self.report
        return {
            "ok": self.ok,
            "error": self.error,
            "dialect": self.dialect,
            "algorithms": self.algorithms,
            "base": {
                **(self.detection or Detection(None, 0.0)).as_dict(),
                "given": self.base, "detected": self.detected, "namings": self.namings,
            },
            "tensors": report.tensors,
            "placed": report.placed,
            "modules": report.modules,
            "components": report.components,
            **{kind: [finding.as_dict() for finding in findings] for kind, findings in report.findings().items()},
            "nonfinite": self.nonfinite,
            "zeros": self.zeros,
            "carried": self.carried,
            **({"assumed_alphas": len(self.assumed_alphas)} if self.assumed_alphas else {}),
            "warnings": report.warnings,
        }  # fmt: skip


def check(
    adapter: Adapter | str | os.PathLike[str],
    base: str | os.PathLike[str] | ModelIndex | Known,
    *,
    values: ValueCheck = "full",
    alpha: Alphas | None = None,
) -> Verdict:
    """Prove where each tensor of ``adapter`` goes on ``base``, or report which ones do not fit.

    Args:
        adapter: an adapter or its path.
        base: a known base by name ("sdxl"), a checkpoint, a model folder, an index, or a `Known` base, which is never
            looked for on the disk.
        values: how many numbers to read in search of NaN and infinity: "none", "sample" or "full".
        alpha: for a path whose file lacks alphas, as in `load`.

    Returns:
        The verdict. An adapter that does not fit is not an error: see ``verdict.ok`` and ``verdict.report``.

    Raises:
        FormatError: a file cannot be read.
        ConfigError: the base is unknown, or an argument is invalid.
    """
    if values not in get_args(ValueCheck):
        raise ConfigError(f"values must be one of {', '.join(get_args(ValueCheck))}, got {values!r}")
    if isinstance(adapter, Adapter) and alpha is not None:
        raise ConfigError("alpha belongs to reading a file: give a path, or load(path, alpha=...)")
    if not isinstance(adapter, Adapter):
        adapter = load(adapter, alpha=alpha)
    if any(problem.fault == "unsupported" for problem in adapter.problems) and not adapter.entries:
        return _foreign(adapter, base)
    refuse_truncated(maps_of(adapter.tensors.values()), "the adapter's file")
    plan, index, namings = _best_plan(adapter, base)
    report = plan.report
    report.warnings += tied_changes(plan, index)
    detection = detect(adapter)
    target = index.base or index.source
    detected = _detected(detection, index.base)
    doubts = _doubts(detection, index.base)
    report.warnings += doubts or list(detection.warnings)
    nonfinite, zeros = scan_values(adapter, values)
    if zeros:
        report.warnings.append(f"{len(zeros)} factors hold only zeros: those modules change nothing")
    for naming, clean in namings.items():
        if not clean and report.clean:
            report.warnings.append(f"some of it cannot be placed in {naming} files")
    return Verdict(
        ok=report.clean and not nonfinite,
        dialect="+".join(adapter.dialects),
        algorithms=list(adapter.algorithms),
        base=target,
        detected=detected,
        confidence=detection.confidence,
        evidence=detection.evidence,
        detection=detection,
        doubts=doubts,
        report=report,
        nonfinite=nonfinite,
        zeros=zeros,
        carried=list(adapter.carried),
        namings=namings,
        error=_error(report, detection, index, target),
        assumed_alphas=adapter.assumed_alphas,
        placements=plan.placements,
    )


def _detected(detection: Detection, base: str | None) -> str | None:
    """Return the detected base, or the given base if it is a variant of it that fits as well."""
    same = base is not None and detection.base is not None and model_of(base) == model_of(detection.base)
    return base if base and same and detection.fits_as_well(base) else detection.base


def _doubts(detection: Detection, base: str | None) -> list[str]:
    """Return reasons why a file may be for another base than ``base`` although its tensors fit."""
    if base is None or detection.base is None or not detection.fits_as_well(base):
        return []
    doubts = [contradiction(each, base) for each in detection.declared if contradicts(each, base)]
    if model_of(detection.base) != model_of(base) and not doubts:
        why = "; ".join(detection.evidence[1:2])
        doubts.append(f"the tensors fit {base} and {detection.base} equally, and {detection.base} is likelier ({why})")
    return doubts


def _best_plan(
    adapter: Adapter, base: str | os.PathLike[str] | ModelIndex | Known
) -> tuple[Plan, ModelIndex, dict[str, bool]]:
    if isinstance(base, ModelIndex):
        indexes = [base]
    elif isinstance(base, Known):
        indexes = [known_index(base.name), known_index(base.name, "original")]
    else:
        indexes = [open_base(base)]
        if not exists(base) and find(os.fspath(base)):
            indexes.append(open_base(base, "original"))
    plans = [(resolve(adapter, index, strict=False), index) for index in indexes]
    plan, index = max(plans, key=lambda pair: pair[0].report.placed)
    return plan, index, {index.naming: plan.report.clean for plan, index in plans}


def scan_values(adapter: Adapter, values: ValueCheck) -> tuple[list[dict[str, object]], list[str]]:
    """Return (tensors with NaN or infinity, factors that hold only zeros)."""
    if values == "none":
        return [], []
    limit = SAMPLE_BYTES if values == "sample" else None
    products = {id(t) for entry in adapter.entries for t in entry.factors.decisive_tensors()}
    nonfinite: list[dict[str, object]] = []
    zeros: list[str] = []
    for key, tensor in adapter.tensors.items():
        values_of = scan(tensor, limit=limit)
        if values_of.nonfinite:
            nonfinite.append({"key": key, "count": values_of.nonfinite, "of": tensor.numel})
        elif values_of.zero and id(tensor) in products and tensor.numel:
            zeros.append(key)
    return nonfinite, zeros


def _error(report: Report, detection: Detection, index: ModelIndex, target: str) -> str | None:
    """Return one line if the file belongs to another base, or if nothing of it fits; otherwise None."""
    if report.clean:
        return None
    other = detection.base is not None and (index.base is None or not detection.fits_as_well(index.base))
    if detection.base and other and detection.scores[detection.base] > report.modules:
        score = detection.scores.get(index.base or "", report.modules)
        bases = [detection.base, *detection.rivals]
        names = ", ".join(bases[:3]) + (f" or {len(bases) - 3} more" if len(bases) > 3 else "")
        return (
            f"this file is for {names} ({detection.scores[detection.base]} of {detection.total} modules fit), "
            f"not for {target} ({score} of {detection.total} fit)"
        )
    if detection.base is None and detection.total and report.placed:
        best = max(detection.scores.values(), default=0)
        return (
            f"made for a model inweave does not know: {report.modules} modules fit {target}, "
            f"at most {best} of {detection.total} any known base"
        )
    if report.placed == 0:
        made_for = f"; it fits {detection.base}" if detection.base and detection.base != index.base else ""
        return f"nothing in this file fits {target}{made_for}"
    return None


def _foreign(adapter: Adapter, base: object) -> Verdict:
    """Return the verdict on a file of a kind that fits no base."""
    report = Report(tensors=len(adapter.tensors), warnings=list(adapter.warnings))
    report.unsupported = [Finding(p.keys, "", "", p.reason) for p in adapter.problems]
    reason = next(p.reason for p in adapter.problems if p.fault == "unsupported")
    name = base.name if isinstance(base, Known) else str(base)
    return Verdict(False, "", [], name, None, 0.0, (), report, error=reason)
