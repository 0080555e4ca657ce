"""Tables and long texts at the width of the terminal; unabridged in a pipe or a file, so that programs lose nothing.

name  base  algorithm  rank  trigger word  path      below 110 columns without the path, below 76 without the word
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from inweave.files.paths import printable

_SHORTEST = 12


def terminal_width() -> int | None:
    """Return the columns of the terminal on stdout; None for a pipe or a file."""
    return max(shutil.get_terminal_size().columns, 40) if sys.stdout.isatty() else None


def table(rows: Sequence[Sequence[str]], width: int | None, indent: int = 2) -> list[str]:
    """Align rows. With a width, the last columns are left out and long cells truncated until the lines fit."""
    cells = [[printable(cell) for cell in row] for row in rows]
    if width is not None:
        columns = 6 if width >= 110 else 5 if width >= 76 else 4
        cells = [row[:columns] for row in cells]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    if width is not None:
        spare = width - indent - 2 * (len(widths) - 1)
        while sum(widths) > spare and max(widths) > _SHORTEST:
            widths[widths.index(max(widths))] -= 1
    return ["  ".join(_cell(cell, size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in cells]


def _cell(text: str, size: int) -> str:
    if cell_len(text) <= size:
        return text + " " * (size - cell_len(text))
    return set_cell_size(text, size - 1) + "\u2026"


def wrap_text(text: str, width: int | None, hanging: str = "") -> list[str]:
    """Wrap a text, with lines after the first indented by ``hanging``; one line without a width."""
    safe_text = printable(text)
    if width is None or not safe_text:
        return [safe_text] if safe_text else []
    # names and hashes are not broken, so that they can be copied
    return textwrap.wrap(
        safe_text, max(width - 2, 20), subsequent_indent=hanging, break_on_hyphens=False, break_long_words=False
    )


def fact_lines(rows: Sequence[tuple[str, str]], width: int | None) -> list[tuple[str, str]]:
    """Wrap name/value lines for `print_facts`; a repeated name is shown once."""
    longest = max((len(name) for name, _ in rows), default=0)
    lines: list[tuple[str, str]] = []
    previous = None
    for name, value in rows:
        parts = wrap_text(value, None if width is None else width - longest - 2)
        lines += [("" if number or name == previous else name, part) for number, part in enumerate(parts)]
        previous = name
    return lines
