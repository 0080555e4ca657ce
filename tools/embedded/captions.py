"""Captions for images: the list of emoji, and the captions one emoji may have.

    name       "cat face": emojibase's label, lower case, plain letters
    tags       keywords of emojibase and emojilib, at most twelve
    weight     how often an image is sampled: skin tones, symbols and "man ..." / "woman ..." are many and alike

Left out: country flags, keycaps, letter buttons, half-hour clocks and family groupings.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.embedded.places import npm_folder

GROUPS = {
    0: "face", 1: "person", 3: "animal", 4: "food", 5: "travel", 6: "activity", 7: "object", 8: "symbol", 9: "flag",
}  # fmt: skip
TONES = {1: "light", 3: "medium", 5: "dark"}
_DROPPED = {"keycap", "alphanum", "country-flag", "subdivision-flag"}
_RARE = {
    "arrow", "av-symbol", "transport-sign", "time", "math", "punctuation", "currency", "zodiac", "religion", "family",
}  # fmt: skip
_GENDERED = re.compile(r"(man|woman|men|women) ")
_ONE_TONE = re.compile(r"(man|woman|men|women|mx|mrs) ")
_KEYWORD = re.compile(r"[a-z][a-z0-9' \-]*[a-z0-9]")
_PLAIN = str.maketrans({"’": "'", "“": "", "”": "", ":": ",", "ñ": "n", "é": "e", "_": " "})


@dataclass(frozen=True, slots=True)
class Emoji:
    """One emoji: ``code`` is its code points in hexadecimal, joined by dashes; ``tone`` is 0 without a skin tone."""

    code: str
    name: str
    tags: tuple[str, ...]
    group: str
    subgroup: str
    tone: int = 0
    order: int = 9999

    @property
    def weight(self) -> float:
        if self.tone:
            return 0.2
        if self.subgroup in _RARE:
            return 0.3
        return 0.5 if self.group == "symbol" or _GENDERED.match(self.name) else 1.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def from_dict(row: dict[str, Any]) -> Emoji:
    return Emoji(**{**row, "tags": tuple(row["tags"])})


def plain(text: str) -> str:
    """Return the text in lower case, with letters, digits and the punctuation that captions use."""
    letters = re.sub(r"[^a-z0-9 ,'\-!?]", " ", text.lower().translate(_PLAIN))
    return re.sub(r"\s+", " ", letters).strip()


def all_emoji(work: Path, *, tones: bool = True) -> list[Emoji]:
    """Return every emoji that may be trained on, in the order of the standard."""
    base = npm_folder(work, "emojibase-data")
    rows = json.loads((base / "en" / "data.json").read_text())
    subgroups = {int(k): v for k, v in json.loads((base / "meta" / "groups.json").read_text())["subgroups"].items()}
    library = json.loads((npm_folder(work, "emojilib") / "dist" / "emoji-en-US.json").read_text())
    emojis: list[Emoji] = []
    for row in rows:
        if row.get("group") not in GROUPS or (subgroup := subgroups[row["subgroup"]]) in _DROPPED:
            continue
        name = plain(row["label"])
        if name.startswith("family, ") or name.endswith("-thirty"):
            continue
        tags = _keywords(name, [*row.get("tags", []), *library.get(row["emoji"], [])[1:]])
        group = GROUPS[row["group"]]
        emojis.append(Emoji(row["hexcode"].lower(), name, tags, group, subgroup, order=row.get("order", 9999)))
        if tones and not _ONE_TONE.match(name) and subgroup != "family":
            for skin in row.get("skins", []):
                if isinstance(tone := skin.get("tone"), int) and tone in TONES:
                    toned = f"{name}, {TONES[tone]} skin tone"
                    order = skin.get("order", 9999)
                    emojis.append(Emoji(skin["hexcode"].lower(), toned, tags, group, subgroup, tone, order))
    return sorted(emojis, key=lambda emoji: emoji.order)


def _keywords(name: str, words: Iterable[str]) -> tuple[str, ...]:
    cleaned = (plain(word) for word in words)
    fitting = (word for word in cleaned if _KEYWORD.fullmatch(word) and word != name and len(word) < 24)
    return tuple(dict.fromkeys(fitting))[:12]


def with_article(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def plural(words: str) -> str:
    if not words[-1].isalpha() or (words.endswith("s") and not words.endswith(("ss", "us"))):
        return words
    if words.endswith("y") and words[-2:-1] not in "aeiou":
        return words[:-1] + "ies"
    return words + ("es" if words.endswith(("s", "x", "ch", "sh")) else "s")


def fixed_captions(emoji: Emoji) -> list[str]:
    """Return the captions that the vocabulary is built from."""
    name, tags = emoji.name, emoji.tags
    variants = [name, f"{name} emoji", f"an emoji of {with_article(name)}", with_article(name)]
    if tags:
        variants += [f"{name}, {', '.join(tags[:3])}", ", ".join(tags[:4])]
    return [*variants, f"{emoji.group} emoji, {name}"]


def random_caption(emoji: Emoji, rng: random.Random, adjective: str = "") -> str:
    """Draw a caption for one image; ``adjective`` is "blue", "small blue", ... and then always included."""
    name = f"{adjective} {emoji.name}".strip()
    chance = rng.random()
    if chance < 0.38:
        return name
    if chance < 0.50:
        return f"{name} emoji"
    if chance < 0.60:
        return with_article(name)
    if chance < 0.68:
        return f"an emoji of {with_article(name)}"
    if chance < 0.72:
        return f"{emoji.group} emoji, {name}"
    some = rng.sample(emoji.tags, min(len(emoji.tags), rng.randint(1, 4))) if emoji.tags else []
    if chance < 0.88 or adjective or not some:
        return ", ".join([name, *some])
    return ", ".join(some)
