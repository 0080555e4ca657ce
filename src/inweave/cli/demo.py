"""`inweave demo`: generate images, train a style, generate again, and show it all on one page."""

from __future__ import annotations

import sys
from pathlib import Path
from shutil import which
from typing import Annotated

import typer

from inweave.cli.console import OK, print_json, print_styled, reporting_errors
from inweave.cli.extras import require
from inweave.cli.options import JSON
from inweave.cli.output_files import Force, ensure_new
from inweave.cli.progress import display
from inweave.files.paths import printable


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write to.")] = Path("demo"),
    steps: Annotated[int, typer.Option("--steps", min=1, max=5000, help="Training steps.")] = 300,
    image_steps: Annotated[
        int | None,
        typer.Option("--image-steps", min=1, max=150, help="Sampling steps per image.", show_default="the model's"),
    ] = None,
    force: Force = False,
    as_json: JSON = False,
) -> None:
    """See it work: images, a style LoRA trained on 24 of them, before and after, on one page.

    Example: inweave demo --out demo
    """
    require("generate", as_json)
    with reporting_errors(as_json), display(as_json, plain=True) as progress:
        ensure_new(out / "index.html", force)
        progress.start("starting")
        from inweave.demo.page import write_page
        from inweave.demo.story import run

        story = run(
            out,
            steps=steps,
            image_steps=image_steps,
            report=lambda line: None if as_json else typer.echo(printable(line)),
            progress=progress.update,
        )
        page = write_page(story)
    if as_json:
        images = [str(out / chapter.image) for chapter in story.chapters]
        print_json({"ok": True, "page": str(page), "images": images, "facts": story.facts})
    else:
        print_styled(f"open {page.resolve()}", bold=True)
        command = "inweave" if which("inweave") else printable(str(Path(sys.executable).with_name("inweave")))
        typer.echo(f"the same over HTTP: {command} serve")
    raise typer.Exit(OK)
