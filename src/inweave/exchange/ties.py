"""Tied weights of a base on disk: a language model whose output head reads the table of its input embedding.

    config.json    "tie_word_embeddings": true, also inside "text_config"
    the file       a causal language model (by its configuration, or by names such as `model.embed_tokens`) without the
                   tensor of a head: it can only be the embedding

A file holds such a tensor once. An adapter that changes one of the two would change both once it is merged, and differ
from the same adapter unmerged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from inweave.errors import FormatError
from inweave.files.documents import read_json
from inweave.targets.index import ModelIndex
from inweave.targets.plan import Plan

_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|embed_in|tok_embeddings|word_embeddings|shared)\.weight$")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out)\.weight$")
_OTHER_HEAD = re.compile(r"(?:^|\.)(?:score|classifier|qa_outputs|classification_head)(?:\.|$)")
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_BELOW_HEAD = ("model.", "transformer.", "gpt_neox.", "language_model.")


@dataclass(frozen=True, slots=True)
class Tie:
    """The tensor of an embedding and the name of the head that reads it."""

    embedding: str
    head: str


def tie_of(index: ModelIndex) -> Tie | None:
    """The tie of a model on disk, where its file or its configuration shows one."""
    if "model" not in index.components or not index.source:
        return None
    names = [name for component in index for name in component.tensors]
    embedding = min((name for name in names if _EMBEDDING.search(name)), key=len, default=None)
    path = Path(index.source)
    if embedding is None or not path.exists():
        return None
    head = next((name for name in names if _HEAD.search(name)), None)
    config = _config(path if path.is_dir() else path.parent)
    tied = _stated(config)
    if tied is None and head is None:
        classes = config.get("architectures")
        if isinstance(classes, list) and classes:
            tied = any(str(name).endswith(_CAUSAL) for name in classes)
        else:
            tied = embedding.startswith(_BELOW_HEAD) and not any(_OTHER_HEAD.search(name) for name in names)
    return Tie(embedding, head or "lm_head.weight") if tied else None


def tied_changes(plan: Plan, index: ModelIndex) -> list[str]:
    """What to say of an adapter that changes one of two tied tensors; empty where it does not."""
    tensors: Iterable[str] = dict.fromkeys(placement.tensor for placement in plan.placements)
    tie = tie_of(index) if any(_EMBEDDING.search(name) or _HEAD.search(name) for name in tensors) else None
    if tie is None:
        return []
    return [
        f"{name}: tied: {tie.embedding} and {tie.head} are one tensor in this model, so that merging changes both; "
        "the adapter unmerged changes one"
        for name in tensors
        if name in (tie.embedding, tie.head)
    ]


def _config(folder: Path) -> Mapping[str, object]:
    path = folder / "config.json"
    try:
        return read_json(path) if path.is_file() else {}
    except FormatError:
        return {}


def _stated(config: Mapping[str, object]) -> bool | None:
    for part in (config, config.get("text_config")):
        value = part.get("tie_word_embeddings") if isinstance(part, Mapping) else None
        if isinstance(value, bool):
            return value
    return None
