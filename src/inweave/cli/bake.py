"""`inweave bake`: merge adapters into a checkpoint on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inweave.cli.extras import require
from inweave.cli.inputs import component_folders, open_checkpoint_index, parse_lora, resolve_layer
from inweave.cli.options import JSON, Dtype
from inweave.cli.output import OK, PROBLEMS, print_facts, print_json, print_lines, reporting_errors
from inweave.cli.progress import display


def bake(
    base: Annotated[
        Path, typer.Option("--base", "-b", help="The checkpoint: a file, an index of shards, or a model folder.")
    ],
    lora: Annotated[
        list[str],
        typer.Option(
            "--lora",
            "-l",
            metavar="FILE[:STRENGTH]",
            help="An adapter: a.safetensors:0.8, or a.safetensors:unet=0.8,te=0.2. Repeat for more.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The .safetensors file to write; for shards or a folder, a new folder.")
    ],
    dtype: Annotated[Dtype, typer.Option("--dtype", help="The dtype of the merged checkpoint.")] = Dtype.keep,
    as_json: JSON = False,
) -> None:
    """Merge adapters into a checkpoint on disk: same names, same layout, one tensor in memory at a time."""
    require("torch", as_json)
    from inweave.errors import ConfigError
    from inweave.weights.offline.bake import bake as bake_checkpoint
    from inweave.weights.offline.bake import record
    from inweave.weights.offline.resize import DTYPES

    warnings: list[str] = []
    with reporting_errors(as_json, target_code=PROBLEMS), display(as_json) as progress:
        index = open_checkpoint_index(base)
        stack = [parse_lora(text) for text in lora]
        if any(path.resolve() == out.resolve() for path, _ in stack):
            raise ConfigError(f"{out}: that is one of the adapters; write the result elsewhere")
        layers = [resolve_layer(path, strength, index, warnings) for path, strength in stack]
        done = bake_checkpoint(
            base, layers, out, index=index, folders=component_folders(base), dtype=DTYPES.get(dtype.value),
            progress=progress.byte_counter("merging"),
        )  # fmt: skip
    records = [record(layer.name, layer.sha256, layer.strength) for layer in layers]
    if as_json:
        print_json({
            "ok": True, "path": done.path, "base": index.base, "tensors": done.tensors, "merged": done.merged,
            "bytes": done.bytes, "created": done.created, "left_out": done.left_out, "loras": records,
            "warnings": warnings,
        })  # fmt: skip
    else:
        rows = [("base", index.base or index.source)]
        rows += [("adapter", f"{record['name']} at {record['strength']}") for record in records]
        rows += [("merged", f"{done.merged} of {done.tensors} tensors, {done.bytes:,} bytes")]
        print_facts(done.path, rows)
        print_lines((f"left out: {name}: weights that were not merged" for name in done.left_out), "yellow")
        print_lines((f"warning: {warning}" for warning in warnings), "yellow", limit=10)
    raise typer.Exit(OK)
