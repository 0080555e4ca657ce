"""`inweave extract`: the difference between two checkpoints as a LoRA."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inweave.cli.adapters import weights_path
from inweave.cli.console import OK, PROBLEMS, print_facts, print_json, print_lines, reporting_errors, span
from inweave.cli.extras import require
from inweave.cli.options import JSON, AdapterOut, Device, Energy, ToOrKohya
from inweave.cli.output_files import Force, ensure_new
from inweave.cli.progress import display

if TYPE_CHECKING:
    from inweave.weights.offline.extract import Extracted


class FactorDtype(StrEnum):
    fp16 = "fp16"
    bf16 = "bf16"
    fp32 = "fp32"


def extract(
    tuned: Annotated[
        Path, typer.Argument(metavar="TUNED", help="The fine-tuned checkpoint: a file, shards or a folder.")
    ],
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The checkpoint it was tuned from, in any naming.")],
    out: AdapterOut,
    rank: Annotated[int, typer.Option("--rank", "-r", help="The highest rank of a module.")] = 32,
    energy: Energy = None,
    to: ToOrKohya = None,
    dtype: Annotated[FactorDtype, typer.Option("--dtype", help="The dtype of the factors.")] = FactorDtype.fp16,
    device: Device = "auto",
    full_norms: Annotated[
        bool, typer.Option("--full-norms", help="Also keep changed norms and biases, as full differences.")
    ] = False,
    force: Force = False,
    as_json: JSON = False,
) -> None:
    """Extract a LoRA from a fine-tuned checkpoint, and report how much of the change its rank keeps.

    Example: inweave extract tuned.safetensors base.safetensors --rank 32 -o lora.safetensors
    """
    require("torch", as_json)
    with reporting_errors(as_json, target_code=PROBLEMS), display(as_json, plain=True) as progress:
        ensure_new(out, force)
        progress.start("extracting")
        from inweave.weights.offline import commands

        result = commands.extract(
            weights_path(tuned), weights_path(base), out, rank=rank, energy=energy, dialect=to,
            dtype=dtype.value, device=device, full_norms=full_norms, progress=progress.byte_counter("extracting"),
        )  # fmt: skip
    saved = result.saved
    if as_json:
        print_json({
            "ok": True, "path": saved.path, "dialect": saved.dialect, "base": result.base, "tensors": saved.tensors,
            "rank": rank, "energy": result.energy, "notes": result.notes,
            "modules": [
                {"name": r.module, "rank": r.rank, "energy": r.energy, "norm": r.norm**0.5} for r in result.rows
            ],
            "left_out": [{"name": r.module, "norm": r.norm**0.5} for r in result.left_out],
        })  # fmt: skip
    else:
        _print(saved.path, result.base or str(base), result)
    raise typer.Exit(OK)


def _print(path: str, base: str, result: Extracted) -> None:
    layers = [row for row in result.rows if row.rank]
    ranks = sorted(row.rank for row in layers)
    rows = [("base", base), ("modules", f"{len(layers)} with rank {span(ranks)}" if layers else "none")]
    if len(result.rows) > len(layers):
        rows.append(("full", f"{len(result.rows) - len(layers)} norms and biases"))
    rows.append(("energy", f"{result.energy:.4f} of the squared norm of the difference is kept"))
    for row in sorted(layers, key=lambda row: row.energy)[:3]:
        rows.append(("least", f"{row.energy:.4f} at rank {row.rank}: {row.module}"))
    print_facts(path, rows)
    if result.left_out:
        names = ", ".join(row.module for row in result.left_out[:3])
        more = f" and {len(result.left_out) - 3} more" if len(result.left_out) > 3 else ""
        print_lines(
            [f"left out: {names}{more}: not the weights of a layer (--full-norms keeps norms and biases)"], "yellow"
        )
    print_lines((f"warning: {note}" for note in result.notes), "yellow")
