"""Tokenizers of strangers: the few files that one consists of, bounded, and of their settings those that are data.

    folder ──► FILES, each a regular file within its limit ──► a private folder ──► the library's class

The library sees a copy that holds nothing else: no code, no name of another file, and a chat template only where a
pipeline asks for it, which the library renders in a sandbox. What it makes of the vocabulary is checked against the
text encoder (`check_tokenizer`): an id beyond its embedding would be read from nowhere.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inweave.checked import for_message
from inweave.errors import FormatError
from inweave.files.documents import read_json
from inweave.files.reading import read_bytes
from inweave.models.configuration import library_errors

_MIB = 1024 * 1024
#: file -> how many bytes it may have
FILES = {
    "tokenizer.json": 64 * _MIB,
    "vocab.json": 32 * _MIB,
    "vocab.txt": 32 * _MIB,
    "merges.txt": 32 * _MIB,
    "spiece.model": 32 * _MIB,
    "tokenizer.model": 32 * _MIB,
    "special_tokens_map.json": _MIB,
    "added_tokens.json": 4 * _MIB,
}
SETTINGS = "tokenizer_config.json"
TEMPLATE, LONGEST_TEMPLATE = "chat_template.jinja", 256 * 1024
_FLAGS = (
    "add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces", "do_lower_case", "legacy",
    "spaces_between_special_tokens", "split_special_tokens", "strip_accents", "tokenize_chinese_chars", "trim_offsets",
)  # fmt: skip
_TEXTS = ("errors", "padding_side", "tokenizer_class", "truncation_side")
_TOKENS = ("bos_token", "cls_token", "eos_token", "mask_token", "pad_token", "sep_token", "unk_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens", "never_split")
_TABLES = ("added_tokens_decoder",)
_NUMBERS = {"extra_ids": 10_000, "model_max_length": 10**31}  # the largest that a library writes for "no limit" is 1e30


def make_tokenizer(
    folder: Path, kind: Any, *, tokenizer_class: str | None = None, chat: bool = False, **options: Any
) -> Any:
    """Return the tokenizer of a folder, read by ``kind``; ``tokenizer_class`` is for folders that name no class.

    ``chat``: with the folder's chat template.
    """
    with tempfile.TemporaryDirectory(prefix="inweave-tokenizer-") as name:
        copy = Path(name)
        for file, limit in FILES.items():
            if (folder / file).exists():
                (copy / file).write_bytes(read_bytes(folder / file, limit))
        settings = read_settings(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
        if tokenizer_class is not None:
            settings.setdefault("tokenizer_class", tokenizer_class)
        if chat and (template := read_template(folder)) is not None:
            (copy / TEMPLATE).write_text(template, "utf-8")
        (copy / SETTINGS).write_text(json.dumps(settings), "utf-8")
        with library_errors(f"{folder}: this tokenizer cannot be read"):
            made = kind.from_pretrained(copy, local_files_only=True, **options)
    made.name_or_path = str(folder)  # not the copy, which is gone
    return made


def read_template(folder: Path) -> str | None:
    """Return the chat template of a tokenizer's or processor's folder; None: it has none."""
    template: Any = None
    if (folder / TEMPLATE).exists():
        template = read_bytes(folder / TEMPLATE, LONGEST_TEMPLATE).decode("utf-8", "replace")
    for name in ("chat_template.json", SETTINGS):
        if template is None and (folder / name).exists():
            document = read_json(folder / name)
            template = document.get("chat_template") if isinstance(document, Mapping) else None
    if isinstance(template, list):  # of several by name, the one that is used where none is chosen
        by_name = {str(each.get("name")): each.get("template") for each in template if isinstance(each, Mapping)}
        template = by_name.get("default")
    if template is not None and (not isinstance(template, str) or len(template) > LONGEST_TEMPLATE):
        raise FormatError(f"{folder}: chat_template should be a text of at most {LONGEST_TEMPLATE:,} characters")
    return template


def read_settings(path: Path) -> dict[str, Any]:
    """Return the plain settings of a tokenizer; a wrong type is an error, unknown settings are dropped."""
    document: Mapping[str, Any] = read_json(path)
    settings: dict[str, Any] = {}
    for name, value in document.items():
        if name in _FLAGS:
            fits = value is None or isinstance(value, bool)
        elif name in _TEXTS:
            fits = value is None or (isinstance(value, str) and len(value) <= 100)
        elif name in _NUMBERS:
            fits = value is None or (type(value) in (int, float) and 0 <= value <= _NUMBERS[name])
        elif name in _TOKENS:
            fits = value is None or _is_token(value)
        elif name in _LISTS:
            entries = list(value.values()) if isinstance(value, dict) else value
            fits = value is None or (isinstance(entries, list) and all(map(_is_token, entries)))
        elif name in _TABLES:
            fits = isinstance(value, dict) and all(
                key.isdecimal() and len(key) < 10 and _is_token(v) for key, v in value.items()
            )
        else:
            continue
        if not fits:
            raise FormatError(f"{path}: {name} cannot be {for_message(value)}")
        settings[name] = value
    return settings


def _is_token(value: Any) -> bool:
    """Return whether a value is a token: text, or the table that the library writes for one."""
    if isinstance(value, dict):
        flags = all(isinstance(flag, bool | str | None) for flag in value.values())
        return flags and isinstance(value.get("content"), str) and _is_token(value["content"])
    return isinstance(value, str) and len(value) <= 1000


def check_tokenizer(label: str, tokenizer: Any, encoder: Any) -> None:
    """Refuse a tokenizer whose ids its encoder has no embedding for, or that has no end of text or padding."""
    check_vocabulary(label, tokenizer, encoder)
    for name in ("eos_token", "pad_token"):
        if not isinstance(getattr(tokenizer, f"{name}_id"), int):
            raise FormatError(f"{label}: it has no {name}; {SETTINGS} should name one that is in the vocabulary")


def check_vocabulary(label: str, tokenizer: Any, encoder: Any) -> None:
    """Refuse a tokenizer whose ids its encoder has no embedding for."""
    size = int(encoder.get_input_embeddings().weight.shape[0])
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= size:
        raise FormatError(
            f"{label}: its vocabulary has the id {largest:,}, and the text encoder has {size:,} tokens; they belong to "
            "different models"
        )
