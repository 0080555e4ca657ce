"""Styles: named texts that are added to prompts, in the file that A1111 keeps them in.

    styles.csv    name,prompt,negative_prompt
                  ink,"{prompt}, ink drawing, thick lines",photo

A style with `{prompt}` is wrapped around the prompt; any other is added after a comma. Several apply in their order.
Random choices and wildcards of a style are resolved together with those of the prompt.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from inweave.checked import did_you_mean
from inweave.errors import ConfigError, Problem
from inweave.files.paths import exists, printable_path
from inweave.files.reading import read_text
from inweave.files.writing import write_atomic

MAX_FILE = 8 * 1024 * 1024
MAX_STYLES = 2000
MAX_NAME, MAX_PROMPT = 100, 10_000
HOLE = "{prompt}"


@dataclass(frozen=True, slots=True)
class Style:
    """A named text for prompts, and one for negative prompts."""

    name: str
    prompt: str = ""
    negative_prompt: str = ""

    def check(self) -> Style:
        """Raise ConfigError unless the file can hold it."""
        wrong = []
        if not self.name.strip() or len(self.name) > MAX_NAME or not self.name.isprintable():
            wrong.append(Problem("name", f"expected 1 to {MAX_NAME} printable characters"))
        for field in ("prompt", "negative_prompt"):
            text = getattr(self, field)
            if len(text) > MAX_PROMPT or "\0" in text:
                wrong.append(Problem(field, f"expected at most {MAX_PROMPT:,} characters of text"))
        if wrong:
            raise ConfigError(wrong)
        return self


class Styles:
    """The styles of a file, read again for each use; a missing file has none."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)

    def all(self) -> dict[str, Style]:
        """Return every style by its name, in the order of the file."""
        if self.path is None or not exists(self.path):
            return {}
        text = read_text(self.path, MAX_FILE, error=ConfigError).removeprefix("\ufeff")
        try:
            rows = list(csv.DictReader(io.StringIO(text, newline="")))
        except csv.Error as error:
            raise ConfigError(f"{printable_path(self.path)}: not a file of styles: {error}") from None
        if rows and "name" not in rows[0]:
            reason = "not a file of styles: its first line should be name,prompt,negative_prompt"
            raise ConfigError(f"{printable_path(self.path)}: {reason}")
        styles = (
            Style(row["name"] or "", row.get("prompt") or row.get("text") or "", row.get("negative_prompt") or "")
            for row in rows[:MAX_STYLES]
        )
        return {style.name: style for style in styles if style.name.strip()}

    def find(self, names: Iterable[str]) -> list[Style]:
        """Return styles by name; raise ConfigError that names each one that is missing."""
        known, styles, wrong = self.all(), list[Style](), list[str | Problem]()
        for name in names:
            if name in known:
                styles.append(known[name])
            else:
                there = f"there are {', '.join(list(known)[:20])}" if known else "there are no styles"
                wrong.append(Problem("styles", f"{name[:100]}: no such style{did_you_mean(name, known)}; {there}"))
        if wrong:
            raise ConfigError(wrong)
        return styles

    def put(self, style: Style) -> None:
        """Add a style, or replace the one of its name."""
        styles = self.all() | {style.check().name: style}
        if len(styles) > MAX_STYLES:
            raise ConfigError(f"there are {MAX_STYLES:,} styles, which is the limit; remove one first")
        self._write(styles.values())

    def remove(self, name: str) -> bool:
        """Remove a style; return whether there was one."""
        styles = self.all()
        if styles.pop(name, None) is None:
            return False
        self._write(styles.values())
        return True

    def _write(self, styles: Iterable[Style]) -> None:
        if self.path is None:
            raise ConfigError("there is no file of styles to write to")
        content = io.StringIO(newline="")
        writer = csv.writer(content)
        writer.writerow(("name", "prompt", "negative_prompt"))
        writer.writerows((style.name, style.prompt, style.negative_prompt) for style in styles)
        write_atomic(self.path, [content.getvalue().encode()])


def styled(prompt: str, texts: Sequence[str]) -> str:
    """Return a prompt with the texts of styles."""
    for text in texts:
        text = text.strip()
        prompt = text.replace(HOLE, prompt) if HOLE in text else ", ".join(filter(None, (prompt.strip(), text)))
    return prompt
