"""How long captions are: the text encoder reads them in chunks, and all are padded to as many as the longest takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from inweave.models.model import Model
from inweave.models.teaching import chunks_needed
from inweave.training.config.schema import TrainConfig
from inweave.training.data.captions import shown, variants_of
from inweave.training.data.reader import Dataset, Example, run_settings, within

LONG = 3  # chunks that captions may take before it is worth a word


def captions_of(config: TrainConfig, dataset: Dataset) -> list[list[str]]:
    """What each example may be called in the run."""
    run = run_settings(config)
    found = [replace(example, subset=within(example.subset, run)) for example in dataset.examples]
    words = {"trigger": config.trigger or "", "count": config.caption_variants, "seed": config.seed}
    return [list(dict.fromkeys(variants_of(example, **words))) for example in found]  # type: ignore[arg-type]


def chunks_of(model: Model, captions: Sequence[Sequence[str]]) -> int:
    return chunks_needed(model, sorted({text for found in captions for text in found}))


def long_captions(
    model: Model, examples: Sequence[Example], captions: Sequence[Sequence[str]], chunks: int
) -> list[str]:
    """A line where one caption makes all of them slow."""
    if chunks <= LONG:
        return []
    longest = (n for n, texts in enumerate(captions) if chunks_needed(model, list(texts)) == chunks)
    return [
        f"captions: the longest takes {chunks} chunks of the text encoder, and every caption is padded to that; "
        f"shorten it: {shown(examples[next(longest)].path)}"
    ]
