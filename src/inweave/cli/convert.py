"""`inweave convert`: the same adapter in another dialect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inweave.cli.adapters import LoraDir, locate
from inweave.cli.console import OK, PROBLEMS, print_json, print_lines, reporting_errors
from inweave.cli.options import JSON, AdapterName, Alpha, BaseName, RankAlpha, To, supplied_alphas
from inweave.cli.output_files import Force, ensure_new
from inweave.cli.progress import LATE, display
from inweave.files.paths import printable


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN", help="An adapter file or PEFT directory in any dialect, or the name or hash of a LoRA."
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The file to write, NAME.safetensors; for peft, a directory.")
    ],
    to: To,
    base: BaseName = None,
    drop: Annotated[
        bool, typer.Option("--drop", help="Leave out tensors that the dialect cannot express, instead of failing.")
    ] = False,
    name: AdapterName = None,
    alpha: Alpha = None,
    rank_alpha: RankAlpha = None,
    prefix: Annotated[
        str,
        typer.Option(
            "--prefix",
            help="For candle: the model of candle-lora to name tensors for (llama, mistral, ...), or a name.",
        ),
    ] = "",
    dummy_embeddings: Annotated[
        bool,
        typer.Option("--dummy-embeddings", help="For candle with --prefix llama: add the zero pair that it expects."),
    ] = False,
    lora_dir: LoraDir = None,
    force: Force = False,
    as_json: JSON = False,
) -> None:
    """Convert an adapter to another dialect. Matrices are never changed; alpha, rank and metadata survive.

    Example: inweave convert style.safetensors out.safetensors --to diffusers
    """
    from inweave.exchange.convert import convert as convert_file

    with reporting_errors(as_json, target_code=PROBLEMS), display(as_json, delay=LATE) as progress:
        ensure_new(out, force)
        progress.start(f"converting {source.name}")
        alphas = supplied_alphas(alpha, rank_alpha)
        done = convert_file(
            locate(source, lora_dir), out, to=to, base=base, drop=drop, name=name, alpha=alphas, prefix=prefix,
            dummy_embeddings=dummy_embeddings,
        )  # fmt: skip
    if as_json:
        print_json(done.as_dict())
    else:
        typer.echo(printable(f"{done.path}: {done.tensors} tensors as {done.dialect} for {done.base or 'this model'}"))
        print_lines(
            (f"dropped {lost.keys[0]} ({len(lost.keys)} tensors): {lost.reason}" for lost in done.lost), "yellow"
        )
        print_lines(done.notes)
        print_lines((f"warning: {warning}" for warning in done.warnings), "yellow", limit=10)
    raise typer.Exit(OK)
