"""The progress display of every command: one rich bar on stderr, if that is a terminal.

    training ━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━  40% 120/300  loss 0.0412  lr 1.00e-04  3.20 it/s  0:00:56

The bar appears before libraries are imported, so that no command starts in silence. A narrow terminal gets a short bar;
NO_COLOR is honored. Elsewhere (a pipe, a log file, a dumb terminal, --json) there is no bar: `line` prints plain lines,
and with ``plain`` so do activities, when they start and every few seconds. Commands that read files show a bar, or such
lines, only if they take long (``delay``), so that they need not wait for the import of rich: a timer shows the
activity if nothing else did by then.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from inweave.files.paths import printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LATE = 0.3  #: seconds after which a usually fast command shows its activity
EVERY = 2.0  #: seconds between plain lines about one activity


class Display:
    """A bar that shows one activity at a time, with lines above it; without a terminal, the lines only."""

    def __init__(
        self, bar: Progress | None = None, *, plain: bool = False, delay: float | None = None, lines_after: float = 0.0
    ) -> None:
        self._bar = bar
        self._plain = plain
        self._lines_after = lines_after  # seconds before which there are no plain lines
        self._delay = delay  # seconds after which a bar is made; None: there is one, or never will be
        self._started = time.monotonic()
        self._task: TaskID | None = None
        self._activity = ""
        self._printed = 0.0
        self._lock = threading.RLock()  # a timer may show the bar while the command updates it
        self._timer: threading.Timer | None = None

    @property
    def live(self) -> bool:
        """Whether a bar is on screen."""
        return self._bar is not None

    def start(self, activity: str) -> None:
        """Show an activity of unknown length."""
        with self._lock:
            self.update(activity, 0, None, detail="")
            if self._timer is not None:
                self._timer.cancel()
            if self._delay is not None or self._lines_after:
                wait = self._delay if self._delay is not None else self._lines_after
                left = max(self._started + wait - time.monotonic(), 0.0)
                self._timer = threading.Timer(left + 0.01, self._show_late, (activity,))
                self._timer.daemon = True
                self._timer.start()

    def _show_late(self, activity: str) -> None:
        with self._lock:
            if self._delay is not None or self._lines_after:  # nothing so far, and not stopped
                self.update(activity, 0, None, detail="")

    def update(self, activity: str, done: int, total: int | None, detail: str | None = None) -> None:
        """Show that ``done`` of ``total`` are finished; another ``activity`` starts another bar in its place.

        ``detail`` is the text next to the bar, the two numbers by default.
        """
        with self._lock:
            if self._delay is not None and time.monotonic() - self._started > self._delay:
                self._delay = None
                self._bar = _new_bar()
                self._bar.start()
            if self._bar is None:
                self._print(activity, done, total, detail)
                return
            if self._task is None or activity != self._activity:
                if self._task is not None:
                    self._bar.remove_task(self._task)
                self._activity, self._task = activity, self._bar.add_task(activity, total=None, detail="")
            self._bar.update(
                self._task, completed=done, total=total, detail=f"{done}/{total}" if detail is None else detail
            )

    def byte_counter(self, activity: str) -> Callable[[int, int], None]:
        """Return a ``progress(done, total)`` callback for work that counts bytes."""
        return lambda done, total: self.update(activity, done, total, detail=f"{size(done)} of {size(total)}")

    def line(self, text: str) -> None:
        """Print a line on stderr; it stays above the bar."""
        if self._bar is None:
            typer.echo(printable(text), err=True)
        else:
            self._bar.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Remove the bar, so that results can be printed."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._bar is not None:
                self._bar.stop()
                self._bar = None
            self._delay, self._lines_after = None, 0.0

    def _print(self, activity: str, done: int, total: int | None, detail: str | None) -> None:
        """Print a plain line instead, if it is time for one."""
        now = time.monotonic()
        if (
            not self._plain
            or now - self._started < self._lines_after
            or (activity == self._activity and now - self._printed < EVERY)
        ):
            return
        self._activity, self._printed = activity, now
        figures = (f"{done}/{total}" if total is not None else "") if detail is None else detail
        typer.echo(printable(f"{activity}: {figures}" if figures else activity), err=True)


@contextmanager
def display(quiet: bool = False, *, plain: bool = False, delay: float | None = None) -> Iterator[Display]:
    """Show progress for the duration of a `with` block; ``quiet`` (for --json) shows lines only.

    ``plain``: without a terminal, activities are lines. ``delay``: seconds before the bar appears.
    """
    watched = sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    if quiet or not watched:
        lines = Display(
            plain=not quiet and (plain or delay is not None), lines_after=EVERY if delay is not None else 0.0
        )
        try:
            yield lines
        finally:
            lines.stop()
        return
    screen = Display(delay=delay) if delay is not None else Display(_new_bar())
    if screen._bar is not None:
        screen._bar.start()
    try:
        yield screen
    finally:
        screen.stop()


def _new_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns: tuple[Any, ...] = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(40 if console.width >= 100 else max(5, console.width // 6)),
        TaskProgressColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
    )
    if console.width >= 60:
        columns += (TimeRemainingColumn(),)
    # output to a terminal goes above the bar; output to a file is left alone
    return Progress(
        *columns, console=console, transient=True, refresh_per_second=4, redirect_stdout=sys.stdout.isatty()
    )


def size(count: int) -> str:
    """Format a number of bytes for people."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
