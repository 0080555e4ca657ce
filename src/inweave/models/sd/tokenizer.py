"""CLIP's tokenizer from its tokenizer.json, without transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inweave.errors import FormatError
from inweave.files.reading import read_bytes
from inweave.models.configuration import library_errors
from inweave.models.tokenizers import FILES, SETTINGS, read_settings

_FILE = "tokenizer.json"
_TOKENS = ("bos_token", "eos_token", "pad_token")
#: settings that the class applies, and those that change nothing about it
_READ = {*_TOKENS, "model_max_length"}
_PLAIN: dict[str, Any] = {
    "add_prefix_space": False, "do_lower_case": True, "errors": "replace", "tokenizer_class": "CLIPTokenizer",
    "unk_token": "<|endoftext|>",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenIds:
    """The ids of a text, or of each of several."""

    input_ids: Any


class ClipTokenizer:
    """Texts to token ids, as transformers' CLIPTokenizer makes them."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        settings = read_settings(folder / SETTINGS)
        with library_errors(f"{folder}: this tokenizer cannot be read"):
            self._tokenizer: Any = Tokenizer.from_str(read_bytes(folder / _FILE, FILES[_FILE]).decode("utf-8"))
        self.model_max_length: int = settings["model_max_length"]
        self.bos_token_id, self.eos_token_id, self.pad_token_id = (self._id(settings[name]) for name in _TOKENS)
        self.name_or_path = str(folder)

    def _id(self, token: str) -> int:
        number: int | None = self._tokenizer.token_to_id(token)
        if number is None:
            raise FormatError(f"{self.name_or_path}: its vocabulary has no token {token!r}")
        return number

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        verbose: bool = True,
        return_attention_mask: bool = False,
    ) -> TokenIds:
        options = {"add_special_tokens": add_special_tokens}
        if isinstance(text, str):
            return TokenIds(self._tokenizer.encode(text, **options).ids)
        return TokenIds([each.ids for each in self._tokenizer.encode_batch(list(text), **options)])


def is_plain(folder: Path, class_name: str) -> bool:
    """Return whether the tokenizer of a folder is CLIP's, with no setting that this class does not apply."""
    if class_name != "CLIPTokenizer" or not all((folder / name).is_file() for name in (_FILE, SETTINGS)):
        return False
    settings = read_settings(folder / SETTINGS)
    if not settings.keys() >= _READ or not all(isinstance(settings[name], str) for name in _TOKENS):
        return False
    return {name: value for name, value in settings.items() if name not in _READ} == _PLAIN


def read_tokenizer(folder: Path) -> ClipTokenizer:
    """Return the tokenizer of a folder for which `is_plain` is true."""
    return ClipTokenizer(folder)
