"""The `inweave` command.

Exit codes, the same for every verb:

    0   all is well
    1   the file was read and something is wrong with it
    2   bad usage, or a file that cannot be read

Heavy imports happen inside the verbs, so that `inweave --help` starts in a blink.
"""

from __future__ import annotations

import atexit
import gc

import typer

from inweave.cli.bench import bench_app
from inweave.cli.check import check
from inweave.cli.convert import convert
from inweave.cli.demo import demo
from inweave.cli.extract import extract
from inweave.cli.generate import generate
from inweave.cli.hash import hash_files
from inweave.cli.inspect import inspect
from inweave.cli.merge import merge
from inweave.cli.resize import resize
from inweave.cli.train import train

app = typer.Typer(
    name="inweave",
    help="LoRA adapters: read every dialect, prove where each tensor goes, weave them, generate with them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo)
app.command("generate")(generate)
app.command("train")(train)
app.command("inspect")(inspect)
app.command("check")(check)
app.command("convert")(convert)
app.command("hash")(hash_files)
app.command("merge")(merge)
app.command("extract")(extract)
app.command("resize")(resize)
app.add_typer(bench_app, name="bench")


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from inweave import __version__

        typer.echo(f"inweave {__version__}")
        raise typer.Exit(0)


def main() -> None:
    """Entry point of the console script.

    The libraries make a million objects that all stay: passes of the collector over them while they load, and a
    last one when the process ends, took 2 of the 11 s from the command to a picture.
    """
    gc.set_threshold(50_000, 20, 20)
    atexit.register(gc.freeze)
    app()
