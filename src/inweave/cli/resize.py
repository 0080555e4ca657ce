"""`inweave resize`: an adapter at another rank, or several adapters combined into one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from inweave.cli.extras import require
from inweave.cli.inputs import check_adapter_out, common_base, parse_lora, sha256_of
from inweave.cli.options import JSON, AdapterOut, BaseName, Device, Dialect, Dtype, Energy, ToOrKeep
from inweave.cli.output import OK, PROBLEMS, print_facts, print_json, print_lines, reporting_errors

if TYPE_CHECKING:
    from inweave.adapter import Adapter
    from inweave.weights.offline.resize import Resized

#: dialects that are read but not written under their own name
_WRITTEN_AS = {"lycoris": Dialect.kohya, "diffusers-peft": Dialect.diffusers}


def resize(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE[:STRENGTH]...", help="One adapter to resize, or several to combine.")
    ],
    out: AdapterOut,
    rank: Annotated[int | None, typer.Option("--rank", "-r", help="The highest rank of a module.")] = None,
    energy: Energy = None,
    to: ToOrKeep = None,
    base: BaseName = None,
    dtype: Annotated[
        Dtype, typer.Option("--dtype", help="The dtype of the new factors; keep: that of the old ones.")
    ] = Dtype.keep,
    device: Device = "cpu",
    as_json: JSON = False,
) -> None:
    """Change the rank of an adapter, or combine several into one, and report how much of them is kept."""
    require("torch", as_json)
    from inweave.errors import ConfigError
    from inweave.exchange.convert import naming_for, save
    from inweave.exchange.load import load
    from inweave.weights.offline.bake import record
    from inweave.weights.offline.resize import DTYPES, device_of
    from inweave.weights.offline.resize import resize as resize_stack

    with reporting_errors(as_json, target_code=PROBLEMS):
        stack = [parse_lora(text) for text in files]
        if len(stack) == 1 and rank is None and energy is None:
            raise ConfigError("choose a size: --rank or --energy")
        adapters = [load(path) for path, _ in stack]
        dialect = to or _dialect(adapters[0])
        index = common_base([path for path, _ in stack], adapters, base)
        check_adapter_out(out, dialect, "model" in index.components)
        result = resize_stack(
            [(adapter, strength) for adapter, (_, strength) in zip(adapters, stack, strict=True)],
            index,
            lambda component: naming_for(dialect.value, component, index),
            rank=rank, energy=energy, dtype=DTYPES.get(dtype.value), device=device_of(device),
        )  # fmt: skip
        adapter = result.adapter
        if len(stack) > 1:
            sources = [record(path.name, sha256_of(path), strength) for path, strength in stack]
            adapter = replace(adapter, metadata={**adapter.metadata, "inweave.combined": json.dumps(sources)})
        saved = save(adapter, out, dialect=dialect.value, base=base or index.base)
    if as_json:
        print_json({
            "ok": True, "path": saved.path, "dialect": saved.dialect, "base": index.base, "tensors": saved.tensors,
            "energy": result.energy, "kept": result.kept, "notes": saved.notes,
            "modules": [{"name": r.module, "before": r.before, "rank": r.rank, "energy": r.energy} for r in result.rows],
        })  # fmt: skip
    else:
        _print(saved.path, index.base or index.source, result)
    raise typer.Exit(OK)


def _dialect(adapter: Adapter) -> Dialect:
    """The dialect to write an adapter in so that it stays what it was."""
    name = next(iter(adapter.dialects), "")
    return _WRITTEN_AS.get(name, Dialect(name) if name in list(Dialect) else Dialect.kohya)


def _print(path: str, base: str, result: Resized) -> None:
    ranks = sorted(row.rank for row in result.rows)
    rows = [("base", base)]
    if ranks:
        before = sorted(row.before for row in result.rows)
        rows.append(("modules", f"{len(ranks)}, rank {before[0]} to {before[-1]} -> {ranks[0]} to {ranks[-1]}"))
        rows.append(("energy", f"{result.energy:.4f} of the squared norm is kept"))
        least = min(result.rows, key=lambda row: row.energy)
        rows.append(("least", f"{least.energy:.4f} at rank {least.rank}: {least.module}"))
    print_facts(path, rows)
    if result.kept:
        names = ", ".join(result.kept[:3]) + (f" and {len(result.kept) - 3} more" if len(result.kept) > 3 else "")
        print_lines([f"unchanged: {names}: not LoRA pairs"], "yellow")
