"""Tied weights of a base on disk: a language model whose output head reads the table of its input embedding.

    config.json    "tie_word_embeddings": true, also in the configuration of a language model inside it
    the file       a language model (by its configuration, or by names such as `model.embed_tokens`) without the tensor
                   of a head: the head can only be the embedding; embeddings of an encoder and a decoder of one shape
                   are one table

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
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output_projection|predictions\.decoder|generator_lm_head)\.weight$")
_SPEECH_HEAD = re.compile(r"^proj_out\.weight$")  # of Whisper; in other models something else
_OTHER_HEAD = re.compile(r"(?:^|\.)(?:score|classifier|qa_outputs|classification_head)(?:\.|$)")
_WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForPreTraining", "MTModel")
_BELOW_HEAD = ("model.", "transformer.", "gpt_neox.", "language_model.")
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")


@dataclass(frozen=True, slots=True)
class Tie:
    """The tensors that share one table: the embeddings, and the head, which a file may not contain."""

    embeddings: tuple[str, ...]
    head: str

    def others(self, name: str) -> str:
        """Return the other tensors of the table, for a message."""
        return ", ".join(each for each in (*self.embeddings, self.head) if each != name)


def tie_of(index: ModelIndex) -> Tie | None:
    """Return the tie of a model on disk, or None if neither its file nor its configuration shows one."""
    if "model" not in index.components or not index.source:
        return None
    shapes = {name: shape for component in index for name, shape in component.shapes.items()}
    tables = sorted((name for name in shapes if _EMBEDDING.search(name)), key=len)
    path = Path(index.source)
    if not tables or not path.exists():
        return None
    embedding, head = tables[0], next((name for name in shapes if _is_head(name, shapes)), None)
    config = _config(path if path.is_dir() else path.parent)
    tied = _stated(config)
    if tied is None and head is None:
        classes = config.get("architectures")
        if isinstance(classes, list) and classes:
            tied = any(str(name).endswith(_WITH_HEAD) for name in classes)
        else:
            below = embedding.startswith(_BELOW_HEAD) or any(name.startswith("decoder.") for name in shapes)
            tied = below and not any(_OTHER_HEAD.search(name) for name in shapes)
    if not tied:
        return None
    same = tuple(name for name in tables if shapes[name] == shapes[embedding])
    return Tie(same, head or "lm_head.weight")


def tied_changes(plan: Plan, index: ModelIndex) -> list[str]:
    """Return a warning for each tied tensor that an adapter changes."""
    tensors: Iterable[str] = dict.fromkeys(placement.tensor for placement in plan.placements)
    tie = tie_of(index) if any(pattern.search(name) for name in tensors for pattern in _TABLES) else None
    if tie is None:
        return []
    return [
        f"{name}: tied: it is one tensor with {tie.others(name)} in this model, so that merging changes all of it; "
        "the adapter unmerged changes one use of it"
        for name in tensors
        if name in (*tie.embeddings, tie.head)
    ]


_TABLES = (_EMBEDDING, _HEAD, _SPEECH_HEAD)


def _is_head(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    speech = _SPEECH_HEAD.search(name) and "model.decoder.embed_tokens.weight" in shapes
    return bool(_HEAD.search(name) or speech)


def _config(folder: Path) -> Mapping[str, object]:
    path = folder / "config.json"
    try:
        return read_json(path) if path.is_file() else {}
    except FormatError:
        return {}


def _stated(config: Mapping[str, object]) -> bool | None:
    """Return what a configuration and those nested in it state; contradicting statements count as tied."""
    values = [config.get("tie_word_embeddings")]
    values += [_stated(part) for key in _NESTED if isinstance(part := config.get(key), Mapping)]
    stated = [value for value in values if isinstance(value, bool)]
    return any(stated) if stated else None
