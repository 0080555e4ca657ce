"""`inweave convert`: the same adapter in another dialect."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from inweave.cli.output import OK, PROBLEMS, fail, print_json, printable, reporting_errors


class To(StrEnum):
    kohya = "kohya"
    diffusers = "diffusers"
    peft = "peft"
    comfy = "comfy"
    onetrainer = "onetrainer"
    bfl = "bfl"
    candle = "candle"


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="An adapter file or PEFT directory, in any dialect.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A .safetensors file; for peft, a directory.")],
    to: Annotated[To, typer.Option("--to", help="The dialect to write.")],
    base: Annotated[
        str | None, typer.Option("--base", "-b", help="The base model, where the file does not tell.")
    ] = None,
    drop: Annotated[
        bool, typer.Option("--drop", help="Leave out what the target cannot express, instead of failing.")
    ] = False,
    name: Annotated[
        str | None, typer.Option("--adapter", help="Which adapter, where the keys carry several PEFT names.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> None:
    """Write an adapter in another dialect. Matrices are never touched; alpha, rank and metadata survive."""
    from inweave.errors import TargetError
    from inweave.exchange.convert import convert as convert_file

    with reporting_errors(as_json):
        try:
            done = convert_file(source, out, to=to.value, base=base, drop=drop, name=name)
        except TargetError as error:
            fail(str(error), as_json, PROBLEMS)  # the file was read, but not everything can be written
    if as_json:
        print_json(done.as_dict())
    else:
        typer.echo(printable(f"{done.path}: {done.tensors} tensors as {done.dialect} for {done.base or 'this model'}"))
        for lost in done.lost:
            typer.secho(printable(f"  dropped {lost.keys[0]} ({len(lost.keys)} tensors): {lost.reason}"), fg="yellow")
        for note in done.notes:
            typer.echo(printable(f"  {note}"))
    raise typer.Exit(OK)
