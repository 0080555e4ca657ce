"""Families that read prompts with a language model: a template around the text, and the states of one layer.

    template with the text in it ──► token ids (batch, length) ──► states of layer `layer`, counted from the end,
                                                                    less the first `dropped` tokens

The length is that of the text. Where rows of a batch have to be alike, texts are padded to multiples of `UNIT` tokens,
and a mask marks the states that are text. Attention in these models is causal, so padding at the end
changes no state before it, and rows of different lengths are encoded together without a mask.

The encoders are as large as a denoiser and are never trained; the states of a text are kept instead. A prompt is a
sentence to them: weights of its words have no meaning here and are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from inweave.models.families.base import (
    ConditioningRequest,
    Family,
    ModelView,
    Pieces,
    PromptTokens,
    Tensors,
    device_of,
)
from inweave.models.families.conditioning import warnings_without_clip

if TYPE_CHECKING:
    import torch
    from torch import Tensor


QWEN_TOKENIZERS = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
ENCODER, MASK = "text_encoder", "text_encoder.mask"
STATES, STATES_MASK = "encoder_hidden_states", "encoder_hidden_states_mask"
UNIT = 32  # tokens: what Z-Image pads each text to anyway


class ChatFamily(Family):
    """Tokenizes and encodes with a language model; the denoiser gets states, and a mask where rows are padded."""

    tokenizers: ClassVar[tuple[str, ...]] = QWEN_TOKENIZERS
    frozen_encoders = (ENCODER,)
    long_text = 512 // UNIT
    masks_padding = True
    template: ClassVar[str]  # {} is replaced by the text
    dropped: ClassVar[int] = 0  # tokens of the template before the text whose states are not used
    layer: ClassVar[int] = 1
    limit: ClassVar[int]  # tokens the denoiser reads
    empty_text: ClassVar[str] = ""  # what stands for no text at all

    def tokenize(
        self, model: ModelView, pieces: Pieces, chunks: int | None = None, limit: int | None = None
    ) -> PromptTokens:
        import torch

        tokenizer = model.tokenizers["tokenizer"]
        row, warnings = self.token_row(tokenizer, pieces)
        length = len(row) - self.dropped
        units = -(-length // UNIT)
        ids: Tensors = {}
        if chunks is not None:
            padding = max(units, chunks) * UNIT - length
            row += [tokenizer.pad_token_id] * padding
            ids[MASK] = (torch.arange(length + padding) < length)[None]
        ids[ENCODER] = torch.tensor([row])
        return PromptTokens(ids, {}, units, tuple(warnings))

    def token_row(self, tokenizer: Any, pieces: Pieces, **options: Any) -> tuple[list[int], list[str]]:
        """Return the tokens of the template with a text in it, cut to what is read, and warnings."""
        from inweave.models.encode import BREAK

        text = self.cleaned(" ".join(piece for piece, _ in pieces if piece != BREAK)) or self.empty_text
        row = tokenizer(self.template.replace("{}", text), verbose=False, **options).input_ids
        count, warnings = len(row) - self.dropped, []
        if count > self.limit:
            inside = "" if self.dropped else " with its chat template"
            warnings.append(
                f"the prompt has {count} tokens{inside}; the model reads {self.limit}, and the last "
                f"{count - self.limit} were ignored"
            )
        if any(weight != 1.0 for _, weight in pieces):
            warnings.append("the text encoder is a language model; weights in the prompt were ignored")
        return row[: self.dropped + self.limit], warnings

    def cleaned(self, text: str) -> str:
        """Return a prompt without what the chat would not read as text."""
        return text

    def encode(self, model: ModelView, ids: Tensors, clip_skip: int | None, weights: Tensors | None = None) -> Tensors:
        states = ids[ENCODER]
        if not states.is_floating_point():
            states = self._states(model, ids)
        if MASK not in ids:
            return {STATES: states}
        mask = ids[MASK]
        return {STATES: states * mask[..., None].to(states.dtype), STATES_MASK: mask}

    def frozen_states(self, model: ModelView, ids: Tensors) -> Tensors:
        device = device_of(model.networks[ENCODER])
        return {ENCODER: self._states(model, {name: value.to(device) for name, value in ids.items()})}

    def pad_text(self, text: Tensors, chunks: int) -> Tensors:
        from torch.nn.functional import pad

        padding = {name: chunks * UNIT - value.shape[1] for name, value in text.items()}
        return {name: pad(value, (0, 0) * (value.dim() - 2) + (0, padding[name])) for name, value in text.items()}

    def join_text(self, rows: Sequence[Tensors]) -> Tensors:
        """Pad rows of different lengths to the longest; where one has a mask, or needs one, all get theirs."""
        import torch
        from torch.nn.functional import pad

        if len({(len(row), row[STATES].shape[1]) for row in rows}) == 1:
            return super().join_text(rows)
        longest = max(row[STATES].shape[1] for row in rows)
        padded = []
        for row in rows:
            states, padding = row[STATES], longest - row[STATES].shape[1]
            mask = row.get(STATES_MASK)
            mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device) if mask is None else mask
            others = {name: value for name, value in row.items() if name not in (STATES, STATES_MASK)}
            padded.append({STATES: pad(states, (0, 0, 0, padding)), STATES_MASK: pad(mask, (0, padding)), **others})
        return super().join_text(padded)

    def example_ids(self, model: ModelView, chunks: int, device: torch.device) -> Tensors:
        import torch

        width: Any = model.networks[ENCODER].config.hidden_size
        return {ENCODER: torch.empty(1, chunks * UNIT, width, dtype=model.dtype, device=device)}

    def prompt_warnings(self, model: ModelView, request: ConditioningRequest) -> list[str]:
        return warnings_without_clip(request, self.is_guided(model, request.guidance))

    def _states(self, model: ModelView, ids: Tensors) -> Tensor:
        encoder: Any = model.networks[ENCODER]
        hidden = encoder(input_ids=ids[ENCODER], output_hidden_states=True, use_cache=False).hidden_states
        states: Tensor = hidden[-self.layer][:, self.dropped :]
        return states
