"""`inweave check`: does this adapter fit this base model?"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inweave.cli.adapters import LoraDir, locate
from inweave.cli.console import OK, PROBLEMS, print_facts, print_json, print_lines, print_styled, reporting_errors
from inweave.cli.options import JSON, AdapterFile, AdapterName, Alpha, RankAlpha, supplied_alphas
from inweave.cli.progress import LATE, display

if TYPE_CHECKING:
    from inweave.exchange.check import Verdict


class Values(StrEnum):
    none = "none"
    sample = "sample"
    full = "full"


def check(
    file: AdapterFile,
    base: Annotated[
        str,
        typer.Option(
            "--base", "-b", help="A known base (sd1.5, sdxl, flux1-dev, ...), a checkpoint file or a model folder."
        ),
    ],
    values: Annotated[
        Values, typer.Option("--values", help="How many values to check for NaN and infinity.")
    ] = Values.full,
    name: AdapterName = None,
    trainer_exact: Annotated[
        bool, typer.Option("--trainer-exact", help="Scale kohya split_qkv files as their trainer did.")
    ] = False,
    alpha: Alpha = None,
    rank_alpha: RankAlpha = None,
    lora_dir: LoraDir = None,
    as_json: JSON = False,
) -> None:
    """Prove where every tensor of an adapter goes on a base model, or report exactly what does not fit.

    Example: inweave check style.safetensors --base sdxl
    """
    from inweave.exchange.check import check as check_adapter
    from inweave.exchange.load import load

    with reporting_errors(as_json), display(as_json, delay=LATE) as progress:
        progress.start(f"checking {file.name}")
        alphas = supplied_alphas(alpha, rank_alpha)
        adapter = load(locate(file, lora_dir), name=name, trainer_exact=trainer_exact, alpha=alphas)
        verdict = check_adapter(adapter, base, values=values.value)
    print_json(verdict.as_dict()) if as_json else _print(file, verdict)
    raise typer.Exit(OK if verdict.ok else PROBLEMS)


def _print(file: Path, verdict: Verdict) -> None:
    report = verdict.report
    parts = ", ".join(f"{name} {row['modules']}" for name, row in report.components.items())
    detected = f"{verdict.detected or 'unknown'} (confidence {verdict.confidence:.2f})"
    rows = [
        ("dialect", verdict.dialect or "none"),
        ("algorithm", ", ".join(verdict.algorithms) or "none"),
        ("base", f"{verdict.base}, detected {detected}"),
        ("placed", f"{report.placed} of {report.tensors} tensors, {report.modules} modules ({parts or 'none'})"),
    ]
    if verdict.carried:
        rows.append(("carried", ", ".join(verdict.carried)))
    print_facts(str(file), rows)
    if verdict.error:
        print_lines([verdict.error], "red")
    for kind, findings in report.findings().items():
        nearest = [f" (nearest: {finding.nearest})" if finding.nearest else "" for finding in findings]
        lines = [f"{kind}: {f.keys[0]}: {f.reason}{near}" for f, near in zip(findings, nearest, strict=True)]
        print_lines(lines, "red", limit=5, more=f"{kind}: ")
    lines = [f"not finite: {row['key']}: {row['count']} of {row['of']} numbers" for row in verdict.nonfinite]
    print_lines(lines, "red", limit=5, more="not finite: ")
    print_lines((f"warning: {warning}" for warning in report.warnings), "yellow", limit=10)
    fits = "fits: every tensor is used exactly once" + (", but it may be for another base" if verdict.doubts else "")
    color = "red" if not verdict.ok else "yellow" if verdict.doubts else "green"
    print_styled(f"  {fits if verdict.ok else 'does not fit'}", color, bold=True)
