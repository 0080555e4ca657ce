"""Output and exit codes of every command: JSON for programs, short tables for people, one line for an error.

0   success
1   the input was read, and there is a problem with it
2   bad usage, or a file that cannot be read
130 stopped by Ctrl-C
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

import typer

from inweave.errors import ConfigError, InweaveError, TargetError
from inweave.files.documents import format_json
from inweave.files.paths import printable, printable_path

OK, PROBLEMS, UNREADABLE, INTERRUPTED = 0, 1, 2, 130


def print_json(document: object) -> None:
    """Print JSON on stdout, with terminal control characters escaped."""
    typer.echo(format_json(document, indent=2))


@contextmanager
def reporting_errors(as_json: bool, *, target_code: int = UNREADABLE) -> Iterator[None]:
    """Turn an `InweaveError` into one line (or one JSON object) and an exit code.

    ``target_code``: the code of a `TargetError`; `PROBLEMS` if files were read but do not fit each other.
    """
    try:
        yield
    except ConfigError as error:
        if as_json and len(error.problems) > 1:
            print_json({"ok": False, "error": str(error), "problems": [*map(str, error.problems)]})
            raise typer.Exit(UNREADABLE) from None
        if len(error.problems) > 1:
            typer.echo(f"error: {len(error.problems)} problems", err=True)
            for problem in error.problems:
                typer.echo(f"  {printable(' '.join(str(problem).splitlines()))}", err=True)
            raise typer.Exit(UNREADABLE) from None
        fail(str(error), as_json)
    except TargetError as error:
        fail(str(error), as_json, target_code)
    except InweaveError as error:
        fail(str(error), as_json)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output is gone
        raise typer.Exit(OK) from None


@contextmanager
def system_errors() -> Iterator[None]:
    """Turn an OSError outside of file access (a full disk behind stdout) into one line."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        with suppress(OSError):
            sys.stdout.close()  # else Python would try to write the rest again at exit
        if error.errno == errno.EPIPE:
            raise SystemExit(OK) from None
        where = printable_path(error.filename) if isinstance(error.filename, str) else "standard output"
        sys.stderr.write(f"error: {where}: {error.strerror or error}\n")
        raise SystemExit(UNREADABLE) from None


def fail(message: str, as_json: bool, code: int = UNREADABLE) -> NoReturn:
    """Print an error and exit with ``code``; errors about contents and indented listings take several lines."""
    if as_json:
        print_json({"ok": False, "error": message})
    else:
        listed = code == PROBLEMS or "\n  " in message
        lines = message.splitlines() if listed else [" ".join(message.splitlines())]
        typer.echo("error: " + "\n".join(printable(line) for line in lines), err=True)
    raise typer.Exit(code)


def print_styled(text: str, color: str | None = None, *, bold: bool = False, err: bool = False) -> None:
    """Print a line in a color, unless NO_COLOR or a dumb terminal forbids it."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        typer.echo(printable(text), err=err)
    else:
        typer.secho(printable(text), fg=color, bold=bold or None, err=err)


def print_facts(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print a title and aligned name/value lines; control characters from a file never reach the terminal."""
    print_styled(title, bold=True)
    names = [printable(name) for name, _ in rows]
    width = max(map(len, names), default=0)
    for name, (_, value) in zip(names, rows, strict=True):
        typer.echo(f"  {name:<{width}}  {printable(value)}")


def print_lines(lines: Iterable[str], color: str | None = None, *, limit: int | None = None, more: str = "") -> None:
    """Print indented lines, at most ``limit`` of them; ``more`` precedes "and 3 more"."""
    every = list(lines)
    for line in every[:limit]:
        print_styled(f"  {line}", color)
    if limit is not None and len(every) > limit:
        print_styled(f"  {more}and {len(every) - limit} more", color)


def span(values: Sequence[int]) -> str:
    """Abbreviate sorted numbers: "8", or "4 to 8"."""
    return f"{values[0]}" if values[0] == values[-1] else f"{values[0]} to {values[-1]}"
