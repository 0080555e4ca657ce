"""Text to states: weighted pieces of a prompt, through CLIP in chunks and through T5.

CLIP reads a fixed number of tokens (77; 32 in the embedded model). A longer prompt is cut into chunks of that size,
each with its own start and end token, encoded on its own and joined along the tokens:

    [start t1 .. t75 end] [start t76 .. t150 end] ...

T5 reads one sequence of a length that its model was trained with.

A weight multiplies the states of its tokens; the mean of the chunk is then restored, so that stressing one word
does not brighten everything. Without weights and within one chunk this is exactly the plain encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inweave.models.families.base import Pieces

BREAK = "BREAK"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids and their weights, both (chunks, length); ``needed``: how many tokens the whole text has."""

    ids: Tensor
    weights: Tensor
    needed: int = 0


def clip_tokens(tokenizer: Any, pieces: Pieces, chunks: int | None = None, limit: int | None = None) -> Tokens:
    """Cut weighted text into CLIP's chunks, at least ``chunks`` of them, the rest empty; ``limit``: tokens to keep."""
    room = tokenizer.model_max_length - 2
    rows: list[list[tuple[int, float]]] = [[]]
    needed = 0
    for text, weight in pieces:
        if text == BREAK:
            rows.append([])
            continue
        for token in tokenizer(text, add_special_tokens=False, verbose=False).input_ids:
            needed += 1
            if limit is not None and needed > limit:
                continue
            if len(rows[-1]) == room:
                rows.append([])
            rows[-1].append((token, weight))
    rows += [[] for _ in range((chunks or 0) - len(rows))]
    ids, weights = [], []
    for row in rows:
        padding = room - len(row)
        ids.append(
            [tokenizer.bos_token_id, *(n for n, _ in row), tokenizer.eos_token_id, *[tokenizer.pad_token_id] * padding]
        )
        weights.append([1.0, *(w for _, w in row), *[1.0] * (padding + 1)])
    return Tokens(torch.tensor(ids), torch.tensor(weights), needed)


def token_counts(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Return how many tokens each text has, without start and end; together they take a fraction of the time."""
    ids = tokenizer(list(texts), add_special_tokens=False, verbose=False, return_attention_mask=False).input_ids
    return [len(row) for row in ids]


def clip_chunks(tokenizer: Any, tokens: int, limit: int) -> int:
    """Return the chunks of a text without breaks (`clip_tokens`)."""
    room: int = tokenizer.model_max_length - 2
    return max(1, -(-min(tokens, limit) // room))


def encode_clip(
    encoder: Any, ids: Tensor, weights: Tensor | None = None, *, layer: int | None, final_norm: bool
) -> tuple[Tensor, Tensor | None]:
    """Return (states, pooled) of ids shaped (batch, chunks, length): every chunk on its own, pooled from the first.

    ``layer`` counts from the end (1 is the last); None takes the encoder's own output. ``final_norm`` applies the
    final norm to an earlier layer, as Stable Diffusion 1 and 2 do.
    """
    batch, chunks, length = ids.shape
    out = encoder(ids.reshape(-1, length), output_hidden_states=layer is not None)
    hidden: Tensor = out.last_hidden_state if layer is None else out.hidden_states[-layer]
    if layer is not None and final_norm:
        hidden = getattr(encoder, "text_model", encoder).final_layer_norm(hidden)
    if weights is not None:
        hidden = _weighted(hidden, weights.reshape(-1, length))
    pooled: Tensor | None = out.get("text_embeds")
    pooled = pooled if pooled is not None else out.get("pooler_output")
    first = None if pooled is None else pooled.reshape(batch, chunks, -1)[:, 0]
    return hidden.reshape(batch, chunks * length, -1), first


def t5_tokens(tokenizer: Any, pieces: Pieces, length: int) -> Tokens:
    """Return one row of ``length`` tokens, the end token included; longer texts are truncated."""
    tokens = [
        (token, weight)
        for text, weight in _joined(pieces)
        for token in tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    ]
    read = tokens[: length - 1]
    padding = length - 1 - len(read)
    ids = [*(n for n, _ in read), tokenizer.eos_token_id, *[tokenizer.pad_token_id] * padding]
    weights = [*(w for _, w in read), *[1.0] * (padding + 1)]
    return Tokens(torch.tensor([ids]), torch.tensor([weights]), len(tokens) + 1)


def encode_t5(encoder: Any, ids: Tensor, weights: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """States of ids shaped (batch, length); ``mask``: the tokens that are seen, all by default."""
    hidden: Tensor = encoder(ids, attention_mask=mask)[0]
    return hidden if weights is None else _weighted(hidden, weights)


def _joined(pieces: Pieces) -> list[tuple[str, float]]:
    """Return the pieces without chunk breaks, neighbors of equal weight joined: T5's tokens depend on spaces."""
    joined: list[tuple[str, float]] = []
    for text, weight in pieces:
        if text == BREAK:
            continue
        if joined and joined[-1][1] == weight:
            joined[-1] = (f"{joined[-1][0]} {text}", weight)
        else:
            joined.append((text, weight))
    return joined


def _weighted(hidden: Tensor, weights: Tensor) -> Tensor:
    """States (rows, length, width) times the weights of their tokens; a row without weights keeps its bits."""
    if bool((weights == 1.0).all()):
        return hidden
    scaled = hidden * weights.to(hidden.device, hidden.dtype)[..., None]
    before, after = (states.float().mean((1, 2), keepdim=True) for states in (hidden, scaled))
    stressed = (weights != 1.0).any(1).to(hidden.device)[:, None, None]
    return torch.where(stressed, scaled * (before / after).to(hidden.dtype), hidden)
