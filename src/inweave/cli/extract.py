"""`inweave extract`: the difference of two checkpoints as an adapter."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inweave.cli.convert import To
from inweave.cli.merge import folders_of, need_torch, open_weights, progress_bar
from inweave.cli.output import OK, PROBLEMS, fail, print_facts, print_json, printable, reporting_errors

if TYPE_CHECKING:
    from inweave.weights.offline.extract import Extracted


class FactorDtype(StrEnum):
    fp16 = "fp16"
    bf16 = "bf16"
    fp32 = "fp32"


def extract(
    tuned: Annotated[Path, typer.Argument(metavar="TUNED", help="The tuned checkpoint: a file, shards or a folder.")],
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The checkpoint it was tuned from, in any naming.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="A .safetensors file; for peft, a directory.")],
    rank: Annotated[int, typer.Option("--rank", "-r", help="The highest rank of a module.")] = 32,
    energy: Annotated[
        float | None, typer.Option("--energy", help="Take the lowest rank that keeps this share of a module.")
    ] = None,
    to: Annotated[To, typer.Option("--to", help="The dialect to write.")] = To.kohya,
    dtype: Annotated[FactorDtype, typer.Option("--dtype", help="Of the factors.")] = FactorDtype.fp16,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    full_norms: Annotated[
        bool, typer.Option("--full-norms", help="Keep changed norms and biases too, as whole differences.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Make an adapter of what a tuned checkpoint changed, and say how much of it the rank could keep."""
    need_torch(as_json)
    from inweave.errors import TargetError
    from inweave.exchange.convert import naming_for, save
    from inweave.weights.offline.extract import extract as difference
    from inweave.weights.offline.extract import open_checkpoint
    from inweave.weights.offline.resize import DTYPES, device_of

    with reporting_errors(as_json):
        try:
            index = open_weights(base)
            check_output(out, to, "model" in index.components)
            with ExitStack() as opened, progress_bar("extracting", as_json) as progress:
                found = difference(
                    open_checkpoint(tuned, open_weights(tuned), folders_of(tuned), opened),
                    open_checkpoint(base, index, folders_of(base), opened),
                    lambda component: naming_for(to.value, component, index),
                    rank=rank, energy=energy, full_norms=full_norms, dtype=DTYPES[dtype.value],
                    device=device_of(device), progress=progress,
                )  # fmt: skip
            record = {"tuned": tuned.name, "base": base.name, "rank": rank, "energy": round(found.energy, 6)}
            adapter = replace(found.adapter, metadata={"inweave.extracted": json.dumps(record)})
            saved = save(adapter, out, dialect=to.value, base=base)
        except TargetError as error:
            fail(str(error), as_json, PROBLEMS)  # both were read, but they are not two states of one model
    if as_json:
        print_json({
            "ok": True, "path": saved.path, "dialect": saved.dialect, "base": index.base, "tensors": saved.tensors,
            "rank": rank, "energy": found.energy, "notes": found.notes,
            "modules": [{"name": r.module, "rank": r.rank, "energy": r.energy, "norm": r.norm**0.5} for r in found.rows],
            "left_out": [{"name": r.module, "norm": r.norm**0.5} for r in found.left_out],
        })  # fmt: skip
    else:
        _show(saved.path, index.base or index.source, found)
    raise typer.Exit(OK)


def check_output(out: Path, to: To, generic: bool) -> None:
    """Refuse before the work what saving would refuse after it."""
    from inweave.errors import ConfigError
    from inweave.exchange.convert import GENERIC

    if (to is To.peft) == (out.suffix == ".safetensors"):
        wanted = "a directory; give a name without .safetensors" if to is To.peft else "one file, NAME.safetensors"
        raise ConfigError(f"{out}: {to.value} is written as {wanted}")
    if generic and to.value not in GENERIC:
        raise ConfigError(f"{to.value} is a dialect for diffusion models; write this one as {' or '.join(GENERIC)}")


def _show(path: str, base: str, found: Extracted) -> None:
    layers = [row for row in found.rows if row.rank]
    ranks = sorted(row.rank for row in layers)
    rows = [("base", base), ("modules", f"{len(layers)} with rank {ranks[0]} to {ranks[-1]}" if layers else "none")]
    if len(found.rows) > len(layers):
        rows.append(("whole", f"{len(found.rows) - len(layers)} norms and biases"))
    rows.append(("energy", f"{found.energy:.4f} of the squared norm of the difference is kept"))
    for row in sorted(layers, key=lambda row: row.energy)[:3]:
        rows.append(("least", f"{row.energy:.4f} at rank {row.rank}: {row.module}"))
    print_facts(path, rows)
    if found.left_out:
        names = ", ".join(row.module for row in found.left_out[:3])
        more = f" and {len(found.left_out) - 3} more" if len(found.left_out) > 3 else ""
        typer.secho(
            printable(f"  left out: {names}{more}: no layer weights (--full-norms keeps norms, biases)"), fg="yellow"
        )
    for note in found.notes:
        typer.secho(printable(f"  warning: {note}"), fg="yellow")
