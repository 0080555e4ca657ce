"""`inweave demo`: draw, train a style, draw again, and show it all on one page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from inweave.cli.merge import need_torch
from inweave.cli.output import OK, print_json, reporting_errors


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write to.")] = Path("demo"),
    steps: Annotated[int, typer.Option("--steps", min=1, max=5000, help="Of training.")] = 300,
    picture_steps: Annotated[
        int | None,
        typer.Option("--picture-steps", min=1, max=150, help="Of every picture; the model's own unless told."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print where everything is as JSON.")] = False,
) -> None:
    """See it work: pictures, a style LoRA trained from 24 of them, before and after, on one page."""
    need_torch(as_json)
    from inweave.demo.page import write_page
    from inweave.demo.story import tell

    live = sys.stderr.isatty() and not as_json
    with reporting_errors(as_json):
        story = tell(
            out,
            steps=steps,
            picture_steps=picture_steps,
            say=lambda line: None if as_json else typer.echo(line),
            tick=_tick if live else None,
        )
        page = write_page(story)
    if as_json:
        images = [str(out / chapter.image) for chapter in story.chapters]
        print_json({"ok": True, "page": str(page), "images": images, "facts": story.facts})
    else:
        typer.secho(f"open {page.resolve()}", bold=True)
    raise typer.Exit(OK)


def _tick(what: str, at: int, of: int) -> None:
    end = "\r" if at < of else "\r\x1b[K"
    sys.stderr.write(f"  {what} {at}/{of}   {end}")
    sys.stderr.flush()
