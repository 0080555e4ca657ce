"""Text to conditioning: weighted pieces of a prompt, through CLIP in chunks and through T5.

CLIP reads a fixed number of tokens (77; 32 in the embedded model). A longer prompt is cut into chunks of that size,
each with its own start and end marks, encoded alone and joined along the tokens:

    [start t1 .. t75 end] [start t76 .. t150 end] ...

A weight multiplies the vectors of its tokens; the mean of the chunk is then restored, so that stressing one word
does not brighten everything. Without weights and within one chunk this is exactly the plain encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: (text, weight) in order; a piece with the text BREAK starts a new chunk
Pieces = Sequence[tuple[str, float]]
BREAK = "BREAK"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Chunks of token numbers and their weights, both (chunks, length)."""

    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class Encoded:
    hidden: torch.Tensor  # (1, chunks * length, width)
    pooled: torch.Tensor | None  # of the first chunk


def clip_tokens(tokenizer: Any, pieces: Pieces, chunks: int | None = None) -> Tokens:
    """Cut weighted text into CLIP's chunks; ``chunks`` asks for at least that many, the rest empty."""
    room = tokenizer.model_max_length - 2
    rows: list[list[tuple[int, float]]] = [[]]
    for text, weight in pieces:
        if text == BREAK:
            rows.append([])
            continue
        for number in tokenizer(text, add_special_tokens=False, verbose=False).input_ids:
            if len(rows[-1]) == room:
                rows.append([])
            rows[-1].append((number, weight))
    rows += [[] for _ in range((chunks or 0) - len(rows))]
    ids, weights = [], []
    for row in rows:
        padding = room - len(row)
        ids.append(
            [tokenizer.bos_token_id, *(n for n, _ in row), tokenizer.eos_token_id, *[tokenizer.pad_token_id] * padding]
        )
        weights.append([1.0, *(w for _, w in row), *[1.0] * (padding + 1)])
    return Tokens(torch.tensor(ids), torch.tensor(weights))


def encode_clip(encoder: Any, tokens: Tokens, *, layer: int | None, normalise: bool) -> Encoded:
    """Run CLIP over every chunk.

    ``layer`` counts from the end (1 is the last); None takes the encoder's own output. ``normalise`` applies the
    final norm to an earlier layer, as Stable Diffusion 1 and 2 do.
    """
    with torch.no_grad():
        hidden, pooled = run_clip(encoder, tokens.ids.to(encoder.device), layer=layer, normalise=normalise)
    hidden = _weighted(hidden, tokens.weights)
    return Encoded(hidden.reshape(1, -1, hidden.shape[-1]), None if pooled is None else pooled[:1])


def run_clip(
    encoder: Any, ids: torch.Tensor, *, layer: int | None, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(hidden states, pooled) of rows of token numbers, with gradients where the encoder has any to give."""
    out = encoder(ids, output_hidden_states=layer is not None)
    hidden: torch.Tensor = out.last_hidden_state if layer is None else out.hidden_states[-layer]
    if layer is not None and normalise:
        hidden = _final_norm(encoder)(hidden)
    pooled: torch.Tensor | None = out.get("text_embeds")
    return hidden, pooled if pooled is not None else out.get("pooler_output")


def t5_length(tokenizer: Any, pieces: Pieces) -> int:
    """How many tokens the text needs, the end mark included."""
    return len(_t5_numbers(tokenizer, pieces)) + 1


def encode_t5(encoder: Any, tokenizer: Any, pieces: Pieces, length: int) -> torch.Tensor:
    """T5 reads ``length`` tokens at once; what is longer is cut (the caller says so)."""
    found = _t5_numbers(tokenizer, pieces)[: length - 1]
    padding = length - 1 - len(found)
    ids = [*(n for n, _ in found), tokenizer.eos_token_id, *[tokenizer.pad_token_id] * padding]
    weights = torch.tensor([[*(w for _, w in found), *[1.0] * (padding + 1)]])
    with torch.no_grad():
        hidden: torch.Tensor = encoder(torch.tensor([ids], device=encoder.device))[0]
    return _weighted(hidden, weights)


def _t5_numbers(tokenizer: Any, pieces: Pieces) -> list[tuple[int, float]]:
    return [
        (number, weight)
        for text, weight in _joined(pieces)
        for number in tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    ]


def _joined(pieces: Pieces) -> list[tuple[str, float]]:
    """Without chunk breaks; neighbours of one weight are one text again, since T5's words depend on spaces."""
    joined: list[tuple[str, float]] = []
    for text, weight in pieces:
        if text == BREAK:
            continue
        if joined and joined[-1][1] == weight:
            joined[-1] = (f"{joined[-1][0]} {text}", weight)
        else:
            joined.append((text, weight))
    return joined


def _weighted(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(chunks, length, width); a chunk without weights keeps its bits."""
    if bool((weights == 1.0).all()):
        return hidden
    scaled = hidden * weights.to(hidden.device, hidden.dtype)[..., None]
    before, after = (numbers.float().mean((1, 2), keepdim=True) for numbers in (hidden, scaled))
    stressed = (weights != 1.0).any(1).to(hidden.device)[:, None, None]
    return torch.where(stressed, scaled * (before / after).to(hidden.dtype), hidden)


def _final_norm(encoder: Any) -> Any:
    return getattr(encoder, "text_model", encoder).final_layer_norm
