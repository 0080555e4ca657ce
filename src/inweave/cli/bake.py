"""`inweave bake`: merge adapters into a checkpoint on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inweave.cli.adapters import LoraDir, located_stack, weights_path
from inweave.cli.console import OK, PROBLEMS, print_facts, print_json, print_lines, reporting_errors
from inweave.cli.extras import require
from inweave.cli.options import JSON, Alpha, Dtype, RankAlpha, supplied_alphas
from inweave.cli.output_files import Force, ensure_new
from inweave.cli.progress import display
from inweave.errors import ConfigError
from inweave.files.paths import is_folder, printable_path


def bake(
    base: Annotated[
        Path, typer.Option("--base", "-b", help="The checkpoint: a file, an index of shards, or a model folder.")
    ],
    lora: Annotated[
        list[str],
        typer.Option(
            "--lora",
            "-l",
            metavar="NAME[:STRENGTH]",
            help="An adapter by file, name or hash: a.safetensors:0.8, pixel:unet=0.8,te=0.2. Repeat for more.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="The file to write, .safetensors or for a GGUF base .gguf; for shards, a new folder."
        ),
    ],
    dtype: Annotated[Dtype, typer.Option("--dtype", help="The dtype of the merged checkpoint.")] = Dtype.keep,
    alpha: Alpha = None,
    rank_alpha: RankAlpha = None,
    lora_dir: LoraDir = None,
    force: Force = False,
    as_json: JSON = False,
) -> None:
    """Merge adapters into a checkpoint on disk: same names, same layout, one tensor in memory at a time.

    Example: inweave bake --base model.safetensors --lora style:0.8 -o merged.safetensors
    """
    require("torch", as_json)
    with reporting_errors(as_json, target_code=PROBLEMS), display(as_json, plain=True) as progress:
        ensure_new(out, force)
        if is_folder(out) and not force:
            raise ConfigError(f"{printable_path(out)}: already exists; replace it with --force, or choose another name")
        progress.start("merging")
        from inweave.weights.offline import commands

        done = commands.bake(
            weights_path(base), located_stack(lora, lora_dir), out, dtype=None if dtype is Dtype.keep else dtype.value,
            alpha=supplied_alphas(alpha, rank_alpha), replace=force, progress=progress.byte_counter("merging"),
        )  # fmt: skip
    if as_json:
        print_json({
            "ok": True, "path": done.path, "base": done.base, "tensors": done.tensors, "merged": done.merged,
            "bytes": done.bytes, "created": done.created, "left_out": done.left_out, "loras": done.loras,
            "warnings": done.warnings, "rounding_loss": done.rounding_loss,
        })  # fmt: skip
    else:
        rows = [("base", done.base or str(base))]
        rows += [("adapter", f"{record['name']} at {record['strength']}") for record in done.loras]
        rows += [("merged", f"{done.merged} of {done.tensors} tensors, {done.bytes:,} bytes")]
        if losses := done.rounding_loss:
            worst = max(losses, key=lambda name: losses[name])
            mean = sum(losses.values()) / len(losses)
            rows += [
                (
                    "rounding",
                    f"{mean:.1%} of the change lost on average in {len(losses)} weights that are stored "
                    f"quantized, at most {losses[worst]:.1%} in {worst}; --dtype bf16 keeps it",
                )
            ]
        print_facts(done.path, rows)
        print_lines((f"left out: {name}: weights that were not merged" for name in done.left_out), "yellow")
        print_lines((f"warning: {warning}" for warning in done.warnings), "yellow", limit=10)
    raise typer.Exit(OK)
