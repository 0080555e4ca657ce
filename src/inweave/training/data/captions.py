"""Captions: read from their files, and turned into a few variants whose encodings can be cached.

    a.txt or a.png.txt next to a.png     one caption per line; empty lines do not count
                                         in UTF-8; other encodings are recognized, and reported
    metadata.jsonl and its relatives     in `metadata`

    prefix [trigger] tag, tag ||| tag, tag ||| tag suffix
           kept in front          shuffled     kept at the end

    |||        tags before it, and after a second one, stay in place; without it the first `keep_tokens` tags do
    [trigger]  the place of the trigger word; a caption with neither this nor the word gets the word in front
    {a|b}      wildcard: one of them; may be nested, and braces without a bar are plain text, as are those around them
    ;;;        joins tags that stay together; becomes a separator in the result

Prefix, suffix and a trigger put in front are never shuffled or counted by `keep_tokens`; a tag that contains the
trigger is never dropped. A variant is a function of (seed, its number, the caption) alone. Without shuffling and
dropout the text keeps its punctuation.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from inweave.errors import ConfigError, FormatError
from inweave.files.reading import read_foreign_text
from inweave.training.config.dataset_toml import Subset
from inweave.training.data.types import Example
from inweave.training.data.wildcards import CaptionRandom, expand_wildcards, has_wildcards

TOGETHER, TRIGGER = ";;;", "[trigger]"
MAX_CAPTION = 2**20  # bytes of a caption file; real ones have a few hundred
MAX_CAPTIONS = 1000  # of one image


class CaptionFile(NamedTuple):
    """The captions of an image, and their file: None if there is none."""

    captions: tuple[str, ...] = ()
    path: Path | None = None
    encoding: str = "utf-8"


def caption_file(image: Path, names: Mapping[str, Path], extensions: Iterable[str]) -> CaptionFile:
    """Return the first file next to an image that has captions; ``names`` are the files of its folder."""
    for extension in extensions:
        for name in (image.stem + extension, image.name + extension):
            file = names.get(name) or names.get(name.lower())
            if not file:
                continue
            text, encoding = foreign_text(file, MAX_CAPTION)
            lines = caption_lines(text)
            if len(lines) > MAX_CAPTIONS:
                raise FormatError(
                    f"{file.name}: has {len(lines)} captions, one per line; at most {MAX_CAPTIONS} are read"
                )
            if lines:
                return CaptionFile(lines, file, encoding)
    return CaptionFile()


def foreign_text(file: Path, limit: int) -> tuple[str, str]:
    """Return (text, its encoding)."""
    return read_foreign_text(
        file, limit, error=lambda text: FormatError(f"{file.name}: captions must be readable text: {text}")
    )


def caption_lines(text: str) -> tuple[str, ...]:
    return tuple(line for each in text.splitlines() if (line := each.strip()))


def caption_variants(caption: str, subset: Subset, *, trigger: str = "", count: int = 1, seed: int = 0) -> list[str]:
    """Return ``count`` texts, or one if nothing is random; two may be equal.

    Open settings of a subset are off, but for wildcards.
    """
    shuffle, tag_dropout, keep_tokens = subset.shuffle_tags, subset.tag_dropout or 0.0, subset.keep_tokens or 0
    wildcards = subset.wildcards is not False
    separator = "," if subset.tag_separator is None else subset.tag_separator
    keep_separator, prefix, suffix = subset.keep_separator, subset.prefix, subset.suffix
    problems = []
    if count < 1:
        problems.append(f"caption variants: expected 1 or more, got {count}")
    if not 0 <= tag_dropout <= 1:
        problems.append(f"tag dropout: expected a probability from 0 to 1, got {tag_dropout}")
    if keep_tokens < 0:
        problems.append(f"keep tokens: expected 0 or more, got {keep_tokens}")
    if not separator or not keep_separator:
        problems.append("caption separator: must not be empty; the usual ones are ',' and '|||'")
    if problems:
        raise ConfigError(problems)
    joint = separator if separator[-1].isspace() else separator + " "
    random = shuffle or tag_dropout > 0 or (wildcards and has_wildcards(caption))
    texts = []
    for number in range(count if random else 1):
        rng = CaptionRandom(seed, number, caption)
        text = expand_wildcards(caption, rng) if wildcards else caption
        leading = "" if TRIGGER in text or _contains_word(f"{prefix} {text} {suffix}", trigger) else trigger
        text = text.replace(TRIGGER, trigger) if trigger else text.replace(TRIGGER, "").strip(" ,")
        if keep_separator in text:
            head, middle, tail = [part.strip() for part in [*text.split(keep_separator, 2), ""][:3]]
        else:
            head, middle, tail = "", text.strip(), ""
        if shuffle or tag_dropout > 0:
            tags = _tags(middle, separator)
            fixed = 0 if keep_separator in text else keep_tokens
            loose = [
                tag for tag in tags[fixed:] if rng.unit() >= tag_dropout or (trigger and _contains_word(tag, trigger))
            ]
            middle = joint.join(tags[:fixed] + (rng.shuffle(loose) if shuffle else loose))
        parts = [part for part in (leading, head, middle, tail) if part]
        body = joint.join([*(part.removesuffix(separator).rstrip() for part in parts[:-1]), *parts[-1:]])
        body = body.replace(TOGETHER, joint)
        texts.append(" ".join(part for part in (prefix.strip(), body, suffix.strip()) if part))
    return texts


def example_variants(example: Example, *, trigger: str = "", count: int = 1, seed: int = 0) -> list[str]:
    """Return the variants of all captions of an example, by the settings of its subset."""
    word = "" if example.regularization else trigger  # the class is not the subject
    captions = example.captions or ("",)
    if example.subset.wildcards is False:  # as in kohya's scripts
        captions = captions[:1]
    return [
        text
        for each in captions
        for text in caption_variants(each, example.subset, trigger=word, count=count, seed=seed)
    ]


def choose_caption(variants: Sequence[str], dropout: float, step_random: float, pick: float) -> str:
    """Return the text of a step: empty with probability ``dropout``, else a variant; both numbers are in [0, 1)."""
    if not variants or step_random < dropout:
        return ""
    return variants[min(int(pick * len(variants)), len(variants) - 1)]


def tag_frequency(examples: Iterable[Example]) -> dict[str, dict[str, int]]:
    """Return {folder: {tag: images}} for `ss_tag_frequency`: in lower case, repeats not counted.

    A tag counts as often as it appears in a caption; of several captions the largest count is used.
    """
    frequency: dict[str, Counter[str]] = {}
    for example in examples:
        here: Counter[str] = Counter()
        for caption in example.captions:
            here |= Counter(tag.lower() for tag in _tags(caption, ","))
        frequency.setdefault(example.folder, Counter()).update(here)
    return {folder: dict(counts) for folder, counts in frequency.items()}


def _tags(text: str, separator: str) -> list[str]:
    return [tag for each in text.split(separator) if (tag := each.strip())]


def _contains_word(text: str, trigger: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text) is not None
