"""`inweave resize`: an adapter at another rank, or several adapters combined into one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from inweave.cli.adapters import LoraDir, located_stack
from inweave.cli.console import OK, PROBLEMS, print_facts, print_json, print_lines, reporting_errors, span
from inweave.cli.extras import require
from inweave.cli.options import JSON, AdapterOut, BaseName, Device, Dtype, Energy, ToOrKeep
from inweave.cli.output_files import Force, ensure_new
from inweave.cli.progress import display

if TYPE_CHECKING:
    from inweave.weights.offline.resize import Resized


def resize(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME[:STRENGTH]...", help="One adapter to resize, or several to combine: files, names or hashes."
        ),
    ],
    out: AdapterOut,
    rank: Annotated[
        int | None,
        typer.Option("--rank", "-r", help="The highest rank of a module.", show_default="that of each module"),
    ] = None,
    energy: Energy = None,
    to: ToOrKeep = None,
    base: BaseName = None,
    dtype: Annotated[
        Dtype, typer.Option("--dtype", help="The dtype of the new factors; keep: that of the old ones.")
    ] = Dtype.keep,
    device: Device = "cpu",
    lora_dir: LoraDir = None,
    force: Force = False,
    as_json: JSON = False,
) -> None:
    """Change the rank of an adapter, or combine several into one, and report how much of them is kept.

    Example: inweave resize big.safetensors --rank 16 -o small.safetensors
    """
    require("torch", as_json)
    with reporting_errors(as_json, target_code=PROBLEMS), display(as_json, plain=True) as progress:
        ensure_new(out, force)
        progress.start("resizing")
        from inweave.weights.offline import commands

        result = commands.resize(
            located_stack(files, lora_dir), out, rank=rank, energy=energy, dialect=to, base=base,
            dtype=None if dtype is Dtype.keep else dtype.value, device=device,
        )  # fmt: skip
    saved = result.saved
    if as_json:
        print_json({
            "ok": True, "path": saved.path, "dialect": saved.dialect, "base": result.base, "tensors": saved.tensors,
            "energy": result.energy, "unchanged": result.unchanged, "notes": saved.notes,
            "modules": [
                {"name": r.module, "before": r.before, "rank": r.rank, "energy": r.energy} for r in result.rows
            ],
        })  # fmt: skip
    else:
        _print(saved.path, result.base or base or "", result)
    raise typer.Exit(OK)


def _print(path: str, base: str, result: Resized) -> None:
    ranks = sorted(row.rank for row in result.rows)
    rows = [("base", base)]
    if ranks:
        before = sorted(row.before for row in result.rows)
        rows.append(("modules", f"{len(ranks)}, rank {span(before)} -> {span(ranks)}"))
        rows.append(("energy", f"{result.energy:.4f} of the squared norm is kept"))
        least = min(result.rows, key=lambda row: row.energy)
        rows.append(("least", f"{least.energy:.4f} at rank {least.rank}: {least.module}"))
    print_facts(path, rows)
    if result.unchanged:
        names = ", ".join(result.unchanged[:3])
        more = f" and {len(result.unchanged) - 3} more" if len(result.unchanged) > 3 else ""
        print_lines([f"unchanged: {names}{more}: not LoRA pairs"], "yellow")
