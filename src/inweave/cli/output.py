"""Printing: JSON for programs, short tables for people, one line for an error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from inweave.errors import ConfigError, InweaveError

OK, PROBLEMS, UNREADABLE = 0, 1, 2


def print_json(document: object) -> None:
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    typer.echo(text.encode("utf-8", "replace").decode("utf-8"))


@contextmanager
def reporting_errors(as_json: bool) -> Iterator[None]:
    """Turn our own errors into one line (or one JSON object) and exit code 2."""
    try:
        yield
    except ConfigError as error:
        if as_json and len(error.problems) > 1:
            print_json({"ok": False, "error": str(error), "problems": list(error.problems)})
            raise typer.Exit(UNREADABLE) from None
        if len(error.problems) > 1:
            typer.echo(f"error: {len(error.problems)} problems", err=True)
            for problem in error.problems:
                typer.echo(f"  {printable(' '.join(problem.splitlines()))}", err=True)
            raise typer.Exit(UNREADABLE) from None
        fail(str(error), as_json)
    except InweaveError as error:
        fail(str(error), as_json)
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away; there is nobody left to tell
        raise typer.Exit(OK) from None


def fail(message: str, as_json: bool, code: int = UNREADABLE) -> NoReturn:
    if as_json:
        print_json({"ok": False, "error": message})
    else:
        lines = message.splitlines() if code == PROBLEMS else [" ".join(message.splitlines())]
        typer.echo("error: " + "\n".join(printable(line) for line in lines), err=True)
    raise typer.Exit(code)


def print_facts(title: str, rows: list[tuple[str, str]]) -> None:
    """A title and aligned name/value lines; control characters of a file never reach the terminal."""
    typer.secho(printable(title), bold=True)
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        typer.echo(f"  {name:<{width}}  {printable(value)}")


def printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
