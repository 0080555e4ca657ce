"""Texts for language models: reading them from a file, and the report on them.

.txt     one text per paragraph (blank lines between)
.jsonl   {"text": "..."} per line, or {"prompt": "...", "completion": "..."}: the loss covers the completion only,
         or {"messages": [{"role": "user", "content": "..."}, ...]}: it covers what the assistant says; also "tools"
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, FormatError, amount
from inweave.files.documents import parse_json
from inweave.files.reading import read_text
from inweave.training.config.toml import SURROGATE

_EXPECTED = (
    'expected {"text": ...}, {"prompt": ..., "completion": ...}, or {"messages": [{"role": ..., "content": ...}, ...]}'
)
MAX_FILE, MAX_LINE = 2**30, 2**24  # bytes, all held in memory, and characters in a line of JSON


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation; ``label``: where it is, for messages about it."""

    messages: tuple[Mapping[str, Any], ...]
    tools: list[Any] | None = None
    label: str = "dataset"


Text = tuple[str, str] | Chat  # (prompt, text to train on), or a conversation


def read_texts(path: Path) -> list[Text]:
    """Return every text."""
    if path.suffix not in (".txt", ".jsonl"):
        raise ConfigError(f"dataset: {path}: a language model is trained on a .txt or .jsonl file of texts")
    raw = read_text(path, MAX_FILE, error=lambda text: FormatError(f"{text} (not a readable text file)"))
    if path.suffix == ".txt":
        return [("", text.strip()) for text in re.split(r"\n[ \t]*\n", raw) if text.strip()]
    texts: list[Text] = []
    problems = []
    for number, line in enumerate(raw.split("\n"), 1):
        if not line.strip():
            continue
        if len(line) > MAX_LINE:
            problems.append(f"{path}, line {number}: has {len(line)} characters; at most {MAX_LINE} are read")
            continue
        try:
            row = parse_json(line, "")
            if "messages" in row:
                texts.append(_chat(row, f"{path}, line {number}"))
                continue
            prompt, text = row.get("prompt", ""), row["completion"] if "completion" in row else row["text"]
            if not (isinstance(prompt, str) and isinstance(text, str)) or SURROGATE.search(prompt + text):
                raise TypeError
            texts.append((prompt, text))
        except (FormatError, KeyError, TypeError, AttributeError):
            problems.append(f"{path}, line {number}: {_EXPECTED}")
        except ConfigError as error:
            problems += map(str, error.problems)
    if problems:
        raise ConfigError([*problems[:20], *([f"and {len(problems) - 20} more lines"] if len(problems) > 20 else [])])
    return texts


def _chat(row: Mapping[str, Any], label: str) -> Chat:
    messages, tools = row["messages"], row.get("tools")
    if not isinstance(messages, list) or not isinstance(tools, list | None):
        raise TypeError
    for message in messages:
        content = message.get("content")
        if not isinstance(message.get("role"), str) or not isinstance(content, str | None):
            raise TypeError
        if content is None and not message.get("tool_calls"):
            raise TypeError
    if SURROGATE.search(json.dumps([messages, tools], ensure_ascii=False)):
        raise TypeError
    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError(f"{label}: no message has the role assistant, so there is nothing to train")
    return Chat(tuple(messages), tools, label)


@dataclass(frozen=True, slots=True)
class Cuts:
    """Texts of more tokens than ``max_length``, and what became of them (`inweave.training.data.token_rows`)."""

    max_length: int = 0
    longer: int = 0
    split: int = 0  # without a prompt: continued in further examples
    prompts: int = 0  # lose their start
    prompt_tokens: int = 0
    completions: int = 0  # lose their end
    completion_tokens: int = 0  # that the loss would cover

    def text(self) -> str:
        """Return all of it in a line; empty if nothing is longer."""
        parts = [f"max_length = {self.max_length}: {amount(self.longer, 'text')} of more tokens"]
        parts += [f"{self.split} split into several examples"] if self.split else []
        for count, tokens, which, end in (
            (self.prompts, self.prompt_tokens, "prompt", "start"),
            (self.completions, self.completion_tokens, "completion", "end"),
        ):
            parts += [f"{amount(count, which)} cut at the {end}, by {amount(tokens, 'token')}"] if count else []
        return "; ".join(parts) if self.longer else ""


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
    cuts: Cuts = Cuts()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        return [
            f"{amount(self.texts, 'text')}, {amount(self.examples, 'example')} of {self.tokens:,} tokens; the loss "
            f"covers {self.loss_tokens:,}",
            *([text] if (text := self.cuts.text()) else []),
            f"held out for validation: {amount(self.held_out, 'example')}",
            f"steps: {amount(self.batches_per_epoch, 'batch')} per epoch, {self.total_steps} in total",
        ]
