"""`inweave bench embedded --bars`: measure, print one row per bar, exit with 1 if one is missed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from inweave.cli.console import OK, PROBLEMS, print_facts, print_json, reporting_errors
from inweave.cli.progress import display

if TYPE_CHECKING:
    from inweave.bench.bars import Bar


def report(
    names: str, model: str, device: str | None, settings: Mapping[str, Any], as_json: bool, **options: Any
) -> None:
    """Measure and print; ends the command."""
    with reporting_errors(as_json), display(as_json, plain=True) as progress:
        started = time.perf_counter()
        progress.start(f"loading {model}")
        from inweave.bench.judge import load_judge
        from inweave.bench.measure_bars import NAMES, measure_bars
        from inweave.generate.pipeline import pipeline

        chosen = NAMES if names == "all" else tuple(name.strip() for name in names.split(",") if name.strip())
        pipe = pipeline(model, device=device)
        rows = measure_bars(
            pipe, chosen, model=model, settings=settings, progress=progress.update, **options
        )  # fmt: skip
        facts = load_judge().facts
        seconds = round(time.perf_counter() - started, 1)
    is_met = all(row.is_met for row in rows)
    shares = {name: facts[name] for name in ("right", "right_in_five")}
    if as_json:
        bars = [row.as_dict() for row in rows]
        print_json({"ok": is_met, "model": model, "bars": bars, "judge": shares, "seconds": seconds})
    else:
        lines = [(row.name, f"{row.value:.3f} ({_compared(row)}); {row.detail}") for row in rows]
        unseen = ", ".join(
            f"{share:.0%} of {name}" for name, share in shares["right"].items() if name not in facts["sets"]
        )
        lines += [("judge", f"right for {unseen}, which it has not seen"), ("time", f"{seconds} s")]
        print_facts(model, lines)
    raise typer.Exit(OK if is_met else PROBLEMS)


def _compared(row: Bar) -> str:
    return f"{'met' if row.is_met else 'missed'}: {'at most' if row.at_most else 'at least'} {row.limit:g}"
