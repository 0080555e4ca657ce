"""The words of the model inside the package: those it knows, and the names of emoji characters.

    "🍎 on a blue background"  ->  "red apple on a blue background"       the character's name in Unicode
    "a cyberpunk apple"        ->  'cyberpunk' is not known                no caption it was trained on holds the word

It was trained on the names of emoji and on compositions of them. A word is known if it is one token of the vocabulary,
or part of a name of an emoji character or of a caption of the reference sheet, also in the plural.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from functools import cache

from inweave.exchange.lookup import packaged_model

Pieces = Iterable[tuple[str, float]]
_BREAK = "BREAK"
_BLOCKS = (range(0x2190, 0x2C00), range(0x3030, 0x3300), range(0x1F000, 0x1FB00))
_JOINERS = {0x200D, 0xFE0E, 0xFE0F, 0x20E3, *range(0x1F3FB, 0x1F400)}  # joiner, selectors, keycap, skin tones
#: where its captions call a character otherwise than Unicode does
_NAMES = {
    "❤": "red heart", "☀": "sun", "⭐": "star", "☁": "cloud", "⚡": "high voltage", "☎": "telephone", "✂": "scissors",
    "✈": "airplane", "☕": "hot beverage", "⛄": "snowman without snow", "☃": "snowman", "🍕": "pizza", "🐍": "snake",
    "🏠": "house",
}  # fmt: skip


def spell_emoji(text: str) -> str:
    """Return ``text`` with the names of emoji characters in their place."""
    if text.isascii():
        return text
    spelled = "".join(_spelled(character) for character in text)
    return re.sub(r" {2,}", " ", spelled).strip() if spelled != text else text


def unknown_words(text: str) -> list[str]:
    """Return the words of a prompt that the model was not trained on, each once."""
    words = re.findall(r"[^\W\d_]{3,}", text.lower())
    return [word for word in dict.fromkeys(words) if not _is_known(word)]


def read_pieces(pieces: Pieces) -> tuple[tuple[tuple[str, float], ...], list[str]]:
    """Return the pieces as the model reads them, and a warning about unknown words."""
    spelled = tuple((text if text == _BREAK else spell_emoji(text), weight) for text, weight in pieces)
    unknown = unknown_words(" ".join(text for text, _ in spelled if text != _BREAK))
    if not unknown:
        return spelled, []
    more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
    names = ", ".join(repr(word[:40]) for word in unknown[:8])
    return spelled, [f"inweave/emoji does not know {names}{more}; it draws what emoji show, by their names"]


def _spelled(character: str) -> str:
    code = ord(character)
    if code in _JOINERS:
        return " "
    if character in _NAMES:
        return f" {_NAMES[character]} "
    if any(code in block for block in _BLOCKS) and (name := unicodedata.name(character, "")):
        return f" {name.lower()} "
    return character


def _is_known(word: str) -> bool:
    known = _vocabulary()
    endings = {"": "", "s": "", "es": "", "ies": "y", "ed": "", "ing": "", "ly": ""}
    return any(
        word.endswith(ending) and word.removesuffix(ending) + singular in known for ending, singular in endings.items()
    )


@cache
def _vocabulary() -> frozenset[str]:
    folder = packaged_model()
    tokens = json.loads((folder / "tokenizer" / "vocab.json").read_text("utf-8"))
    words = {token.removesuffix("</w>") for token in tokens if token.endswith("</w>") and len(token) > 6}
    texts = [*json.loads((folder / "reference.json").read_text("utf-8"))["captions"], *_NAMES.values()]
    texts += [unicodedata.name(chr(code), "") for block in _BLOCKS for code in block]
    words |= {word for text in texts for word in re.findall(r"[^\W\d_]+", text.lower())}
    return frozenset(words)
