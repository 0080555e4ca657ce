"""The progress display of every command: one rich bar on stderr while somebody watches a terminal.

    training ━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━  40% 120/300  loss 0.0412  lr 1.00e-04  3.20 it/s  0:00:56

Elsewhere (a pipe, a log file, --json) there is no bar, and `line` prints plain lines. rich is imported with the first
bar, so commands that read files do not wait for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from inweave.files.paths import printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Display:
    """A bar that shows one activity at a time, with lines above it; without a terminal, the lines only."""

    def __init__(self, bar: Progress | None) -> None:
        self._bar = bar
        self._task: TaskID | None = None
        self._activity = ""

    @property
    def live(self) -> bool:
        """Whether a bar is on screen."""
        return self._bar is not None

    def update(self, activity: str, done: int, total: int, detail: str | None = None) -> None:
        """Show that ``done`` of ``total`` are finished; another ``activity`` starts another bar in its place.

        ``detail`` is what stands beside the bar, the two numbers unless it says something else.
        """
        if self._bar is None:
            return
        if self._task is None or activity != self._activity:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._activity, self._task = activity, self._bar.add_task(activity, total=None, detail="")
        self._bar.update(
            self._task, completed=done, total=total, detail=f"{done}/{total}" if detail is None else detail
        )

    def byte_counter(self, activity: str) -> Callable[[int, int], None]:
        """A ``progress(done, total)`` callback for work that counts bytes."""
        return lambda done, total: self.update(activity, done, total, detail="")

    def line(self, text: str) -> None:
        """A line of text on stderr; it stays above the bar."""
        if self._bar is None:
            typer.echo(printable(text), err=True)
        else:
            self._bar.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def display(quiet: bool = False) -> Iterator[Display]:
    """A display for the time of a `with` block; ``quiet`` (for --json) never shows a bar."""
    if quiet or not sys.stderr.isatty():
        yield Display(None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
        TimeRemainingColumn(),
    )
    # what is printed to a terminal goes above the bar; what is piped into a file stays there
    with Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=4,
        redirect_stdout=sys.stdout.isatty(),
    ) as bar:
        yield Display(bar)
