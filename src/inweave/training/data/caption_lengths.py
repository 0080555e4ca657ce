"""How long captions are: a text encoder reads them in chunks, and all are padded to the chunks of the longest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from inweave.files.paths import printable_path
from inweave.models.model import Model
from inweave.training.config.schema import TrainConfig
from inweave.training.data.captions import example_variants
from inweave.training.data.types import Dataset, Example, subset_defaults, with_defaults


def run_captions(config: TrainConfig, dataset: Dataset) -> list[list[str]]:
    """The texts each example may have in the run."""
    defaults = subset_defaults(config)
    examples = [replace(example, subset=with_defaults(example.subset, defaults)) for example in dataset.examples]
    return [
        list(
            dict.fromkeys(
                example_variants(example, trigger=config.trigger or "", count=config.caption_variants, seed=config.seed)
            )
        )
        for example in examples
    ]


def max_chunks(model: Model, captions: Sequence[Sequence[str]]) -> int:
    """Chunks of the longest caption."""
    return model.family.chunks_needed(model, sorted({text for texts in captions for text in texts}))


def long_caption_warnings(
    model: Model, examples: Sequence[Example], captions: Sequence[Sequence[str]], chunks: int
) -> list[str]:
    """A line where captions are truncated, and one where a single caption slows all of them down."""
    warnings = []
    truncated = [n for n, texts in enumerate(captions) if any(_is_truncated(model, text) for text in texts)]
    if truncated:
        warnings.append(
            f"captions: {len(truncated)} are longer than the text encoder reads, and their end is ignored; the first: "
            f"{printable_path(examples[truncated[0]].path)}"
        )
    if chunks > model.family.long_text:
        longest = (n for n, texts in enumerate(captions) if model.family.chunks_needed(model, list(texts)) == chunks)
        warnings.append(
            f"captions: the longest takes {chunks} chunks of the text encoder, and every caption is padded to that; "
            f"shorten it: {printable_path(examples[next(longest)].path)}"
        )
    return warnings


def _is_truncated(model: Model, text: str) -> bool:
    """Whether tokenizing it warns: a plain text has no weights, so its length is all there is to warn about."""
    return bool(text and model.family.tokenize(model, ((text, 1.0),)).warnings)
