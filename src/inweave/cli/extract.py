"""`inweave extract`: the difference between two checkpoints as a LoRA."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inweave.cli.extras import require
from inweave.cli.inputs import check_adapter_out, component_folders, open_checkpoint_index
from inweave.cli.options import JSON, AdapterOut, Device, Dialect, Energy, To
from inweave.cli.output import OK, PROBLEMS, print_facts, print_json, print_lines, reporting_errors
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
    to: To = Dialect.kohya,
    dtype: Annotated[FactorDtype, typer.Option("--dtype", help="The dtype of the factors.")] = FactorDtype.fp16,
    device: Device = "auto",
    full_norms: Annotated[
        bool, typer.Option("--full-norms", help="Also keep changed norms and biases, as full differences.")
    ] = False,
    as_json: JSON = False,
) -> None:
    """Extract a LoRA from a fine-tuned checkpoint, and report how much of the change its rank keeps."""
    require("torch", as_json)
    from inweave.exchange.convert import naming_for, save
    from inweave.weights.offline.extract import extract as extract_adapter
    from inweave.weights.offline.extract import open_checkpoint
    from inweave.weights.offline.resize import DTYPES, device_of

    with reporting_errors(as_json, target_code=PROBLEMS):
        index = open_checkpoint_index(base)
        check_adapter_out(out, to, "model" in index.components)
        with ExitStack() as opened, display(as_json) as progress:
            result = extract_adapter(
                open_checkpoint(tuned, open_checkpoint_index(tuned), component_folders(tuned), opened),
                open_checkpoint(base, index, component_folders(base), opened),
                lambda component: naming_for(to.value, component, index),
                rank=rank, energy=energy, full_norms=full_norms, dtype=DTYPES[dtype.value],
                device=device_of(device), progress=progress.byte_counter("extracting"),
            )  # fmt: skip
        record = {"tuned": tuned.name, "base": base.name, "rank": rank, "energy": round(result.energy, 6)}
        adapter = replace(result.adapter, metadata={"inweave.extracted": json.dumps(record)})
        saved = save(adapter, out, dialect=to.value, base=base)
    if as_json:
        print_json({
            "ok": True, "path": saved.path, "dialect": saved.dialect, "base": index.base, "tensors": saved.tensors,
            "rank": rank, "energy": result.energy, "notes": result.notes,
            "modules": [{"name": r.module, "rank": r.rank, "energy": r.energy, "norm": r.norm**0.5} for r in result.rows],
            "left_out": [{"name": r.module, "norm": r.norm**0.5} for r in result.left_out],
        })  # fmt: skip
    else:
        _print(saved.path, index.base or index.source, result)
    raise typer.Exit(OK)


def _print(path: str, base: str, result: Extracted) -> None:
    layers = [row for row in result.rows if row.rank]
    ranks = sorted(row.rank for row in layers)
    rows = [("base", base), ("modules", f"{len(layers)} with rank {ranks[0]} to {ranks[-1]}" if layers else "none")]
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
