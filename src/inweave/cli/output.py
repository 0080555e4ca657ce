"""Output and exit codes of every command: JSON for programs, short tables for people, one line for an error.

0   success
1   the input was read, and something is wrong with it
2   bad usage, or a file that cannot be read
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import typer

from inweave.errors import ConfigError, InweaveError, TargetError

OK, PROBLEMS, UNREADABLE = 0, 1, 2


def print_json(document: object) -> None:
    """JSON on stdout; a character that UTF-8 cannot express is replaced."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    typer.echo(text.encode("utf-8", "replace").decode("utf-8"))


@contextmanager
def reporting_errors(as_json: bool, *, target_code: int = UNREADABLE) -> Iterator[None]:
    """Turn our own errors into one line (or one JSON object) and an exit code.

    ``target_code``: the code of a `TargetError`; `PROBLEMS` where files were read but do not fit each other.
    """
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
    except TargetError as error:
        fail(str(error), as_json, target_code)
    except InweaveError as error:
        fail(str(error), as_json)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone, so nobody would see a message
        raise typer.Exit(OK) from None


def fail(message: str, as_json: bool, code: int = UNREADABLE) -> NoReturn:
    """Print an error and exit with ``code``; only errors about contents may take several lines."""
    if as_json:
        print_json({"ok": False, "error": message})
    else:
        lines = message.splitlines() if code == PROBLEMS else [" ".join(message.splitlines())]
        typer.echo("error: " + "\n".join(printable(line) for line in lines), err=True)
    raise typer.Exit(code)


def print_facts(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """A title and aligned name/value lines; control characters from a file never reach the terminal."""
    typer.secho(printable(title), bold=True)
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        typer.echo(f"  {name:<{width}}  {printable(value)}")


def print_lines(lines: Iterable[str], color: str | None = None, *, limit: int | None = None, more: str = "") -> None:
    """Indented lines below a table, at most ``limit`` of them; ``more`` says what the rest is: "and 3 more tensors"."""
    every = list(lines)
    for line in every[:limit]:
        typer.secho(printable(f"  {line}"), fg=color)
    if limit is not None and len(every) > limit:
        typer.secho(printable(f"  {more}and {len(every) - limit} more"), fg=color)


def span(values: Sequence[int]) -> str:
    """Sorted numbers in short: "8", or "4 to 8"."""
    return f"{values[0]}" if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def printable(text: str) -> str:
    """``text`` with every character that is not printable replaced."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
