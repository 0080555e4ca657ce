"""The `inweave` command.

Exit codes are the same for every command (see `console.py`). Heavy imports happen inside the commands, so that
`inweave --help` and the commands that only read files start at once.
"""

from __future__ import annotations

import atexit
import difflib
import gc
from typing import Annotated, Any

import typer

from inweave.cli.bake import bake
from inweave.cli.bench import bench_app
from inweave.cli.check import check
from inweave.cli.cluster import cluster_app
from inweave.cli.console import fail, print_json, system_errors
from inweave.cli.convert import convert
from inweave.cli.demo import demo
from inweave.cli.environment import use_bounded_waits
from inweave.cli.extract import extract
from inweave.cli.generate import generate
from inweave.cli.hash import hash_files
from inweave.cli.inspect import inspect
from inweave.cli.library import library_app
from inweave.cli.options import JSON, OptionalValues, ReferenceImages
from inweave.cli.resize import resize
from inweave.cli.serve import serve
from inweave.cli.train import train

CREATE, ADAPTERS, CHECKPOINTS, MEASURE = "Generate and train", "Adapter files", "Checkpoint files", "Measure"
ABOUT = "About inweave"

app = typer.Typer(
    name="inweave",
    help="LoRA adapters: read every dialect, check where each tensor goes, merge, generate and train.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo", rich_help_panel=CREATE)(demo)
app.command("generate", rich_help_panel=CREATE, cls=ReferenceImages)(generate)
app.command("train", rich_help_panel=CREATE, cls=OptionalValues)(train)
app.command("serve", rich_help_panel=CREATE, cls=OptionalValues)(serve)
app.add_typer(cluster_app, name="cluster", rich_help_panel=CREATE)
app.command("inspect", rich_help_panel=ADAPTERS)(inspect)
app.command("check", rich_help_panel=ADAPTERS)(check)
app.command("convert", rich_help_panel=ADAPTERS)(convert)
app.command("hash", rich_help_panel=ADAPTERS)(hash_files)
app.command("bake", rich_help_panel=CHECKPOINTS)(bake)
app.command("merge", hidden=True)(bake)  # what people type first
app.command("extract", rich_help_panel=CHECKPOINTS)(extract)
app.command("resize", rich_help_panel=ADAPTERS)(resize)
app.add_typer(library_app, name="library", rich_help_panel=ADAPTERS)
app.add_typer(bench_app, name="bench", rich_help_panel=MEASURE)


@app.command("version", rich_help_panel=ABOUT)
def version_command(as_json: JSON = False) -> None:
    """Print the version of inweave, and of Python.

    Example: inweave version --json
    """
    import platform

    from inweave.version import __version__

    if as_json:
        print_json({"ok": True, "version": __version__, "python": platform.python_version()})
    else:
        typer.echo(f"inweave {__version__} (Python {platform.python_version()})")


@app.command("help", rich_help_panel=ABOUT)
def help_command(
    context: typer.Context,
    command: Annotated[list[str] | None, typer.Argument(metavar="[COMMAND]...", help="The command to explain.")] = None,
) -> None:
    """Explain a command.

    Example: inweave help generate
    """
    assert context.parent is not None
    word_context: Any = context.parent
    for word in command or ():
        group: Any = word_context.command
        chosen = group.get_command(word_context, word) if hasattr(group, "get_command") else None
        if chosen is None:
            known = group.list_commands(word_context) if hasattr(group, "list_commands") else []
            near = difflib.get_close_matches(word, known, 1)
            fail(f"no command is called {word!r}" + (f"; did you mean {near[0]!r}?" if near else ""), False)
        word_context = type(context)(chosen, info_name=word, parent=word_context)
    typer.echo(word_context.get_help())


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from inweave.version import __version__

        typer.echo(f"inweave {__version__}")
        raise typer.Exit(0)


def main() -> None:
    """Entry point of the console script.

    Importing the libraries creates about a million objects that stay alive: garbage collections while they load, and
    a last one at exit, took 2 of the 11 s from the command to an image.
    """
    use_bounded_waits()
    gc.set_threshold(50_000, 20, 20)
    atexit.register(gc.freeze)
    with system_errors():
        app()
