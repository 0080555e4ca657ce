"""`inweave check`: does this adapter fit this base?"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inweave.cli.output import OK, PROBLEMS, print_facts, print_json, printable, reporting_errors

if TYPE_CHECKING:
    from inweave.exchange.check import Verdict


class Values(StrEnum):
    none = "none"
    sample = "sample"
    full = "full"


def check(
    file: Annotated[Path, typer.Argument(help="An adapter file or PEFT directory.")],
    base: Annotated[
        str,
        typer.Option(
            "--base", "-b", help="A known base (sd1.5, sdxl, flux1-dev, ...), a checkpoint file or a model folder."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
    values: Annotated[Values, typer.Option("--values", help="How much data the finite check reads.")] = Values.full,
    name: Annotated[
        str | None, typer.Option("--adapter", help="Which adapter, where the keys carry several PEFT names.")
    ] = None,
    trainer_exact: Annotated[
        bool, typer.Option("--trainer-exact", help="Scale kohya split_qkv files as their trainer did.")
    ] = False,
) -> None:
    """Prove where every tensor of an adapter goes on a base model, or say exactly what does not fit."""
    from inweave.exchange.check import check as verdict_on
    from inweave.exchange.load import load

    with reporting_errors(as_json):
        verdict = verdict_on(load(file, name=name, trainer_exact=trainer_exact), base, values=values.value)
    print_json(verdict.as_dict()) if as_json else _show(file, verdict)
    raise typer.Exit(OK if verdict.ok else PROBLEMS)


def _show(file: Path, verdict: Verdict) -> None:
    report = verdict.report
    parts = ", ".join(f"{name} {row['modules']}" for name, row in report.components.items())
    rows = [
        ("dialect", verdict.dialect or "none"),
        ("algorithm", ", ".join(verdict.algorithms) or "none"),
        (
            "base",
            f"given {verdict.given}, detected {verdict.detected or 'unknown'} (confidence {verdict.confidence:.2f})",
        ),
        ("placed", f"{report.placed} of {report.tensors} tensors, {report.modules} modules ({parts or 'none'})"),
    ]
    if verdict.carried:
        rows.append(("carried", ", ".join(verdict.carried)))
    print_facts(str(file), rows)
    if verdict.error:
        typer.secho(printable(f"  {verdict.error}"), fg="red")
    for kind, findings in report.findings().items():
        for finding in findings[:5]:
            near = f" (nearest: {finding.nearest})" if finding.nearest else ""
            typer.secho(printable(f"  {kind}: {finding.keys[0]}: {finding.reason}{near}"), fg="red")
        if len(findings) > 5:
            typer.secho(f"  {kind}: and {len(findings) - 5} more", fg="red")
    for row in verdict.nonfinite[:5]:
        typer.secho(printable(f"  not finite: {row['key']}: {row['count']} of {row['of']} numbers"), fg="red")
    if len(verdict.nonfinite) > 5:
        typer.secho(f"  not finite: and {len(verdict.nonfinite) - 5} more tensors", fg="red")
    for warning in report.warnings[:10]:
        typer.secho(printable(f"  warning: {warning}"), fg="yellow")
    typer.secho(
        "  fits: every tensor is used exactly once" if verdict.ok else "  does not fit",
        fg="green" if verdict.ok else "red",
        bold=True,
    )
