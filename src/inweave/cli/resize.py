"""`inweave resize`: an adapter at another rank, or several adapters as one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inweave.cli.convert import To
from inweave.cli.extract import check_output
from inweave.cli.merge import Dtype, need_torch, sha256_of, weighted
from inweave.cli.output import OK, PROBLEMS, fail, print_facts, print_json, printable, reporting_errors

if TYPE_CHECKING:
    from inweave.adapter import Adapter
    from inweave.targets.index import ModelIndex
    from inweave.weights.offline.resize import Resized

#: spellings that are not written under their own name
_WRITTEN_AS = {"lycoris": To.kohya, "diffusers-peft": To.diffusers}


def resize(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE[:STRENGTH]...", help="One adapter to resize, or several to combine.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="A .safetensors file; for peft, a directory.")],
    rank: Annotated[int | None, typer.Option("--rank", "-r", help="The highest rank of a module.")] = None,
    energy: Annotated[
        float | None, typer.Option("--energy", help="Take the lowest rank that keeps this share of a module.")
    ] = None,
    to: Annotated[To | None, typer.Option("--to", help="The dialect to write; else that of the first file.")] = None,
    base: Annotated[
        str | None, typer.Option("--base", "-b", help="The base model, where the files do not tell.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of the new factors; keep: that of the old.")] = Dtype.keep,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Change the rank of an adapter, or combine several into one, and say how much of them is kept."""
    need_torch(as_json)
    from inweave.errors import ConfigError, TargetError
    from inweave.exchange.convert import naming_for, save
    from inweave.exchange.load import load
    from inweave.weights.offline.bake import record
    from inweave.weights.offline.resize import DTYPES, device_of
    from inweave.weights.offline.resize import resize as resized

    with reporting_errors(as_json):
        try:
            stack = [weighted(text) for text in files]
            if len(stack) == 1 and rank is None and energy is None:
                raise ConfigError("say what to resize to: --rank or --energy")
            adapters = [load(path) for path, _ in stack]
            dialect = to or _dialect(adapters[0])
            index = _index([path for path, _ in stack], adapters, base)
            check_output(out, dialect, "model" in index.components)
            found = resized(
                [(adapter, strength) for adapter, (_, strength) in zip(adapters, stack, strict=True)],
                index,
                lambda component: naming_for(dialect.value, component, index),
                rank=rank, energy=energy, dtype=DTYPES.get(dtype.value), device=device_of(device),
            )  # fmt: skip
            adapter = found.adapter
            if len(stack) > 1:
                sources = [record(path.name, sha256_of(path), strength) for path, strength in stack]
                adapter = replace(adapter, metadata={**adapter.metadata, "inweave.combined": json.dumps(sources)})
            saved = save(adapter, out, dialect=dialect.value, base=base or index.base)
        except TargetError as error:
            fail(str(error), as_json, PROBLEMS)  # the files were read, but not everything can be done with them
    if as_json:
        print_json({
            "ok": True, "path": saved.path, "dialect": saved.dialect, "base": index.base, "tensors": saved.tensors,
            "energy": found.energy, "kept": found.kept, "notes": saved.notes,
            "modules": [{"name": r.module, "before": r.before, "rank": r.rank, "energy": r.energy} for r in found.rows],
        })  # fmt: skip
    else:
        _show(saved.path, index.base or index.source, found)
    raise typer.Exit(OK)


def _dialect(adapter: Adapter) -> To:
    seen = next(iter(adapter.dialects), "")
    return _WRITTEN_AS.get(seen, To(seen) if seen in [each.value for each in To] else To.kohya)


def _index(paths: Sequence[Path], adapters: Sequence[Adapter], base: str | None) -> ModelIndex:
    """The one base that all adapters are for."""
    from inweave.errors import TargetError
    from inweave.exchange.load import open_base
    from inweave.targets.bases import known_index
    from inweave.targets.detect import detect

    if base is not None:
        return open_base(base)
    found = [detect(adapter) for adapter in adapters]
    for path, each in zip(paths, found, strict=True):
        if each.base is None or each.confidence < 0.5:
            guess = f" (the best guess is {each.base}, confidence {each.confidence:.2f})" if each.base else ""
            raise TargetError(f"{path}: which base model is this adapter for?{guess} name it with --base")
    names = dict.fromkeys(each.base for each in found if each.base)
    common = next((name for name in names if all(each.fits_as_well(name) for each in found)), None)
    if common is None:
        shown = ", ".join(f"{path.name} is for {each.base}" for path, each in zip(paths, found, strict=True))
        raise TargetError(f"adapters of different bases cannot be combined: {shown}")
    return known_index(common)


def _show(path: str, base: str, found: Resized) -> None:
    ranks = sorted(row.rank for row in found.rows)
    rows = [("base", base)]
    if ranks:
        before = sorted(row.before for row in found.rows)
        rows.append(("modules", f"{len(ranks)}, rank {before[0]} to {before[-1]} -> {ranks[0]} to {ranks[-1]}"))
        rows.append(("energy", f"{found.energy:.4f} of the squared norm is kept"))
        least = min(found.rows, key=lambda row: row.energy)
        rows.append(("least", f"{least.energy:.4f} at rank {least.rank}: {least.module}"))
    print_facts(path, rows)
    if found.kept:
        names = ", ".join(found.kept[:3]) + (f" and {len(found.kept) - 3} more" if len(found.kept) > 3 else "")
        typer.secho(printable(f"  unchanged: {names}: not low-rank pairs"), fg="yellow")
