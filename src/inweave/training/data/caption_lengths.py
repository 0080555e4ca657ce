"""The lengths of captions: a text encoder reads them in chunks, and all rows of a batch have the same number of them.

CLIP               the first `max_token_length` tokens of a caption, 75 to a chunk; 225 as in kohya's scripts. Empty
                   chunks change the conditioning, so the captions of a batch have the same number of chunks, and a
                   long caption does not pad others
T5                 one sequence of the model's own length for every caption
language models    up to the model's own limit; a mask hides the padding from the denoiser
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inweave.files.paths import printable_path
from inweave.models.model import Model
from inweave.training.config.schema import TrainConfig
from inweave.training.data.captions import example_variants
from inweave.training.data.types import Dataset, Example, subset_defaults, with_defaults

_BLOCK = 1024  # captions that are tokenized together


@dataclass(frozen=True, slots=True)
class CaptionLengths:
    """The captions of a run: their chunks, and those whose end no text encoder reads."""

    chunks: Mapping[str, int]
    cut: frozenset[str]


def run_captions(config: TrainConfig, dataset: Dataset) -> list[list[str]]:
    """Return the texts each example may have in the run."""
    defaults = subset_defaults(config)
    subsets = {id(example.subset): example.subset for example in dataset.examples}
    complete = {key: with_defaults(subset, defaults) for key, subset in subsets.items()}
    examples = (replace(example, subset=complete[id(example.subset)]) for example in dataset.examples)
    options: dict[str, Any] = {"trigger": config.trigger or "", "count": config.caption_variants, "seed": config.seed}
    return [list(dict.fromkeys(example_variants(example, **options))) for example in examples]


def measured_captions(model: Model, captions: Sequence[Sequence[str]], limit: int) -> CaptionLengths:
    """Return the lengths of all captions of a run, and of the empty one; ``limit``: `max_token_length`."""
    chunks, cut = {"": 1}, set[str]()
    known = sorted({text for texts in captions for text in texts if text})
    for block in (known[start : start + _BLOCK] for start in range(0, len(known), _BLOCK)):
        for text, (length, truncated) in zip(block, model.family.text_lengths(model, block, limit), strict=True):
            chunks[text] = length
            if truncated:
                cut.add(text)
    return CaptionLengths(chunks, frozenset(cut))


def example_lengths(captions: Sequence[Sequence[str]], chunks: Mapping[str, int]) -> list[int]:
    """Return the chunks of the longest caption of every example; its other captions, and "", are padded to that."""
    return [max(chunks[text] for text in texts) for texts in captions]


def batch_lengths(model: Model, lengths: Sequence[int]) -> Sequence[int]:
    """Return the lengths that have to be equal in a batch; none if a mask hides padding from the denoiser."""
    return () if model.family.masks_padding else lengths


def long_caption_warnings(
    model: Model, examples: Sequence[Example], captions: Sequence[Sequence[str]], known: CaptionLengths, limit: int
) -> list[str]:
    """Return a line about truncated captions, and one about long ones that make steps slow."""
    names = [printable_path(example.path) for example in examples]
    lengths, allowed = example_lengths(captions, known.chunks), model.family.long_text
    truncated = [name for name, texts in zip(names, captions, strict=True) if not known.cut.isdisjoint(texts)]
    slow = [name for name, length in zip(names, lengths, strict=True) if length > allowed]
    warnings = []
    if truncated:
        warnings.append(
            f"captions: {len(truncated)} are longer than the text encoder reads, and their end is ignored "
            f"(max_token_length = {limit} where it is CLIP): {listed(truncated)}"
        )
    if slow:
        warnings.append(
            f"captions: the longest takes {max(lengths)} chunks of the text encoder, which makes its steps slow; "
            f"shorten long ones, or lower max_token_length: {listed(slow)}"
        )
    return warnings


def listed(names: Sequence[str]) -> str:
    """Join the first names, and the number of further ones."""
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
