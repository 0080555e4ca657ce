"""Texts for language models: reading them from a file, and the report on them.

.txt     one text per paragraph (blank lines between)
.jsonl   {"text": "..."} per line, or {"prompt": "...", "completion": "..."}: the loss covers the completion only
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, FormatError, amount
from inweave.files.documents import parse_json
from inweave.files.reading import read_text
from inweave.training.config.toml import SURROGATE

MAX_FILE, MAX_LINE = 2**30, 2**24  # bytes, all held in memory, and characters in a line of JSON


def read_texts(path: Path) -> list[tuple[str, str]]:
    """Return (prompt, text to train on) of every text."""
    if path.suffix not in (".txt", ".jsonl"):
        raise ConfigError(f"dataset: {path}: a language model is trained on a .txt or .jsonl file of texts")
    raw = read_text(path, MAX_FILE, error=lambda text: FormatError(f"{text} (not a readable text file)"))
    if path.suffix == ".txt":
        return [("", text.strip()) for text in re.split(r"\n[ \t]*\n", raw) if text.strip()]
    texts, problems = [], []
    for number, line in enumerate(raw.split("\n"), 1):
        if not line.strip():
            continue
        if len(line) > MAX_LINE:
            problems.append(f"{path}, line {number}: has {len(line)} characters; at most {MAX_LINE} are read")
            continue
        try:
            row = parse_json(line, "")
            prompt, text = row.get("prompt", ""), row["completion"] if "completion" in row else row["text"]
            if not (isinstance(prompt, str) and isinstance(text, str)) or SURROGATE.search(prompt + text):
                raise TypeError
            texts.append((prompt, text))
        except (FormatError, KeyError, TypeError, AttributeError):
            problems.append(f'{path}, line {number}: expected {{"text": ...}} or {{"prompt": ..., "completion": ...}}')
    if problems:
        raise ConfigError([*problems[:20], *([f"and {len(problems) - 20} more lines"] if len(problems) > 20 else [])])
    return texts


@dataclass(frozen=True, slots=True)
class TextReport:
    """The texts of a run."""

    texts: int
    examples: int
    tokens: int
    loss_tokens: int  # tokens that the loss covers
    held_out: int
    batches_per_epoch: int
    total_steps: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        return [
            f"{amount(self.texts, 'text')}, {amount(self.examples, 'example')} of {self.tokens:,} tokens; the loss "
            f"covers {self.loss_tokens:,}",
            f"held out for validation: {amount(self.held_out, 'example')}",
            f"steps: {amount(self.batches_per_epoch, 'batch')} per epoch, {self.total_steps} in total",
        ]
