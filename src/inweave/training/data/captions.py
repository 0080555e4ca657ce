"""Captions: from their files, and as they are trained on, in a few variants whose encodings can be cached.

    a.txt or a.png.txt beside a.png      one line a caption; empty lines do not count
    metadata.jsonl                       {"file_name": "a.png", "text": "..."}; "caption" is the same as "text"

    prefix [trigger] tag, tag ||| tag, tag ||| tag suffix
           kept in front          shuffled     kept at the end

    |||        what stands before it, and after a second one, keeps its place; without it the first `keep_tokens` do
    [trigger]  where the trigger word goes; a caption that has neither gets the word in front
    {a|b}      one of them; may be nested, and braces without a bar are plain text
    ;;;        joins tags that stay together; a separator in the result

Prefix, suffix and a trigger put in front are never shuffled or counted by `keep_tokens`; a tag that holds the trigger
is never dropped. A variant is a function of (seed, its number, the caption), of nothing else. Without shuffling and
dropout the text keeps its punctuation.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from inweave.errors import ConfigError, FormatError

if TYPE_CHECKING:
    from inweave.training.data.reader import Example

KEEP, TOGETHER, TRIGGER = "|||", ";;;", "[trigger]"
_WILDCARD = re.compile(r"\{([^{}]*\|[^{}]*)\}")


def shown(path: Path) -> str:
    """A path that can be printed, whatever bytes its name is made of."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def dotted(ending: str) -> str:
    return "." + ending.strip().removeprefix(".")


def beside(picture: Path, names: Mapping[str, Path], extensions: Iterable[str]) -> tuple[str, ...]:
    """The captions of the first file beside a picture that has any; ``names`` are the files of its folder."""
    for extension in extensions:
        for name in (picture.stem + extension, picture.name + extension):
            file = names.get(name) or names.get(name.lower())
            lines = _lines(_text(file)) if file else ()
            if lines:
                return lines
    return ()


def read_metadata(file: Path) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """({file name: its captions}, what is wrong with which line)."""
    rows: dict[str, tuple[str, ...]] = {}
    wrong = []
    for number, line in enumerate(_text(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            wrong.append(f"line {number} is no JSON: {error}")
            continue
        name = row.get("file_name") if isinstance(row, dict) else None
        if not isinstance(name, str) or not Path(name).name or "\0" in name:
            wrong.append(f'line {number} names no picture, expected {{"file_name": "a.png", "text": "..."}}')
            continue
        said = row.get("text", row.get("caption"))
        texts = said if isinstance(said, list) else [] if said is None else [said]
        if not all(isinstance(text, str) for text in texts):
            wrong.append(f"line {number}: the caption of {name} is {said!r}, expected text or a list of texts")
        elif name in rows:
            wrong.append(f"line {number}: {name} was listed before; put all its captions into one list")
        else:
            rows[name] = tuple(text for each in texts for text in _lines(each))
    return rows, wrong


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{file.name}: captions must be UTF-8 text that can be read: {error}") from None


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line for each in text.splitlines() if (line := each.strip()))


def variants(
    caption: str,
    *,
    shuffle: bool = False,
    keep_tokens: int = 0,
    separator: str = ",",
    tag_dropout: float = 0.0,
    prefix: str = "",
    suffix: str = "",
    trigger: str = "",
    count: int = 1,
    seed: int = 0,
    keep_separator: str = KEEP,
    wildcards: bool = True,
) -> list[str]:
    """``count`` texts, or one where nothing is left to chance; two of them may be equal."""
    wrong = []
    if count < 1:
        wrong.append(f"caption variants: {count} are none, expected 1 or more")
    if not 0 <= tag_dropout <= 1:
        wrong.append(f"tag dropout {tag_dropout}: expected a share from 0 to 1")
    if keep_tokens < 0:
        wrong.append(f"keep tokens {keep_tokens}: expected 0 or more")
    if not separator or not keep_separator:
        wrong.append("caption separator: an empty one separates nothing; the usual ones are ',' and '|||'")
    if wrong:
        raise ConfigError(wrong)
    joint = separator if separator[-1].isspace() else separator + " "
    chance = shuffle or tag_dropout > 0 or (wildcards and _WILDCARD.search(caption) is not None)
    made = []
    for number in range(count if chance else 1):
        draw = _Draw(seed, number, caption)
        text = _resolved(caption, draw) if wildcards else caption
        leading = "" if TRIGGER in text or _holds(f"{prefix} {text} {suffix}", trigger) else trigger
        text = text.replace(TRIGGER, trigger) if trigger else text.replace(TRIGGER, "").strip(" ,")
        if keep_separator in text:
            head, middle, tail = [part.strip() for part in [*text.split(keep_separator, 2), ""][:3]]
        else:
            head, middle, tail = "", text.strip(), ""
        if shuffle or tag_dropout > 0:
            tags = _tags(middle, separator)
            kept = 0 if keep_separator in text else keep_tokens
            loose = [tag for tag in tags[kept:] if draw.unit() >= tag_dropout or (trigger and _holds(tag, trigger))]
            middle = joint.join(tags[:kept] + (draw.shuffled(loose) if shuffle else loose))
        parts = [part for part in (leading, head, middle, tail) if part]
        body = joint.join([*(part.removesuffix(separator).rstrip() for part in parts[:-1]), *parts[-1:]])
        body = body.replace(TOGETHER, joint)
        made.append(" ".join(part for part in (prefix.strip(), body, suffix.strip()) if part))
    return made


def variants_of(example: Example, *, trigger: str = "", count: int = 1, seed: int = 0) -> list[str]:
    """The variants of all captions of an example, by the settings of its subset; what those leave open is not done."""
    settings = example.subset
    return [
        text
        for caption in example.captions or ("",)
        for text in variants(
            caption,
            shuffle=bool(settings.shuffle_tags),
            keep_tokens=settings.keep_tokens or 0,
            separator=settings.separator or ",",
            tag_dropout=settings.tag_dropout or 0.0,
            prefix=settings.prefix,
            suffix=settings.suffix,
            trigger="" if example.regularisation else trigger,  # the class is not the subject
            count=count,
            seed=seed,
            keep_separator=settings.keep_separator,
            wildcards=settings.wildcards,
        )
    ]


def choose(variants: Sequence[str], dropout: float, step_random: float, pick: float) -> str:
    """The text of a step: none for a share of ``dropout``, else one of them; both numbers lie in [0, 1)."""
    if not variants or step_random < dropout:
        return ""
    return variants[min(int(pick * len(variants)), len(variants) - 1)]


def tag_frequency(examples: Iterable[Example]) -> dict[str, dict[str, int]]:
    """{folder: {tag: pictures}}, the shape of `ss_tag_frequency`: lower case, repeats not counted.

    A tag that stands several times in one caption counts as often; of several captions the largest count is taken.
    """
    found: dict[str, Counter[str]] = {}
    for example in examples:
        here: Counter[str] = Counter()
        for caption in example.captions:
            here |= Counter(tag.lower() for tag in _tags(caption, ","))
        found.setdefault(example.folder, Counter()).update(here)
    return {folder: dict(counts) for folder, counts in found.items()}


class _Draw:
    """Chance from a hash: the raw words of PCG64 are the same everywhere."""

    def __init__(self, seed: int, number: int, caption: str) -> None:
        text = f"{seed}\0{number}\0{caption}".encode("utf-8", "surrogatepass")
        self._bits = np.random.PCG64(int.from_bytes(hashlib.sha256(text).digest()))

    def unit(self) -> float:
        return (int(self._bits.random_raw()) >> 11) * 2.0**-53

    def shuffled(self, tags: list[str]) -> list[str]:
        return [tag for _, tag in sorted(((self.unit(), tag) for tag in tags), key=lambda entry: entry[0])]


def _tags(text: str, separator: str) -> list[str]:
    return [tag for each in text.split(separator) if (tag := each.strip())]


def _resolved(text: str, draw: _Draw) -> str:
    """Wildcards from the innermost outwards."""

    def one(found: re.Match[str]) -> str:
        options = found[1].split("|")
        return options[int(draw.unit() * len(options))]

    while _WILDCARD.search(text):  # each round removes a pair of braces
        text = _WILDCARD.sub(one, text)
    return text


def _holds(text: str, trigger: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text) is not None
