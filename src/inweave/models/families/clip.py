"""Families that encode prompts with CLIP, some of them also with T5.

    trainable_encoders   CLIPs: token ids in chunks, (batch, chunks, length)
    frozen_encoders      T5: token ids (batch, length), or its states (batch, length, width) in their place

T5 is larger than most denoisers, so it is never trained; the states of a text are kept instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from inweave.errors import ConfigError
from inweave.models.families.base import Family, ModelView, Pieces, PromptTokens, Tensors, device_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor


CLIP_TOKENIZERS = ("CLIPTokenizer", "CLIPTokenizerFast")
T5_TOKENIZERS = ("T5Tokenizer", "T5TokenizerFast")


class ClipFamily(Family):
    """Tokenizes and encodes with CLIP and T5; subclasses join the states as their denoiser expects them."""

    def clip_layer(self, clip_skip: int | None) -> int | None:
        """Return the CLIP layer whose states are used, counted from the end; None for CLIP's output."""
        return max(clip_skip or 2, 2)  # trained on the layer before the last

    reads_clip_states: ClassVar[bool] = True  # whether the denoiser reads every token, not only what CLIP pools
    final_norm = False  # whether an earlier layer goes through CLIP's final norm

    def t5_length(self, model: ModelView) -> int:
        """Return how many tokens T5 reads."""
        raise ConfigError(f"the family {self.name} has a frozen text encoder and must define t5_length")

    def tokenize(
        self, model: ModelView, pieces: Pieces, chunks: int | None = None, limit: int | None = None
    ) -> PromptTokens:
        from inweave.models.encode import clip_tokens, t5_tokens

        clips = {
            folder: clip_tokens(model.tokenizers[tokenizer_of(folder)], pieces, chunks, limit)
            for folder in self.trainable_encoders
        }
        ids = {folder: tokens.ids[None] for folder, tokens in clips.items()}
        weights = {folder: tokens.weights[None] for folder, tokens in clips.items()}
        warnings: list[str] = []
        longest = max(tokens.needed for tokens in clips.values())
        if limit is not None and longest > limit and self.reads_clip_states:
            warnings.append(f"the prompt has {longest} CLIP tokens; {limit} are read, and the others were ignored")
        for folder in self.frozen_folders(model):
            length = self.t5_length(model)
            tokens = t5_tokens(model.tokenizers[tokenizer_of(folder)], pieces, length)
            ids[folder], weights[folder] = tokens.ids, tokens.weights
            if tokens.needed > length:
                warnings.append(
                    f"the prompt has {tokens.needed} T5 tokens; T5 reads {length}, and the last "
                    f"{tokens.needed - length} were ignored"
                )
        return PromptTokens(ids, weights, max(len(tokens.ids) for tokens in clips.values()), tuple(warnings))

    def text_lengths(self, model: ModelView, texts: Sequence[str], limit: int) -> list[tuple[int, bool]]:
        from inweave.models.encode import BREAK, clip_chunks, token_counts

        lengths = [(1, False)] * len(texts)
        for folder in (*self.trainable_encoders, *self.frozen_folders(model)):
            tokenizer: Any = model.tokenizers[tokenizer_of(folder)]
            counts = token_counts(tokenizer, texts)
            if folder in self.trainable_encoders:
                sizes = [(clip_chunks(tokenizer, n, limit), self.reads_clip_states and n > limit) for n in counts]
            else:
                sizes = [(1, n >= self.t5_length(model)) for n in counts]  # it reads an end token too
            lengths = [(max(a, b), cut or more) for (a, cut), (b, more) in zip(lengths, sizes, strict=True)]
        return [(2, False) if text == BREAK else each for text, each in zip(texts, lengths, strict=True)]

    def frozen_states(self, model: ModelView, ids: Tensors) -> Tensors:
        from inweave.models.encode import encode_t5

        return {
            folder: encode_t5(model.networks[folder], ids[folder].to(device_of(model.networks[folder])))
            for folder in self.frozen_encoders
            if folder in ids
        }

    def example_ids(self, model: ModelView, chunks: int, device: torch.device) -> Tensors:
        import torch

        inputs: Tensors = {}
        for folder in self.trainable_encoders:
            length: Any = model.networks[folder].config.max_position_embeddings
            inputs[folder] = torch.empty(1, chunks, length, dtype=torch.int64, device=device)
        for folder in self.frozen_folders(model):
            width: Any = model.networks[folder].config.d_model
            inputs[folder] = torch.empty(1, self.t5_length(model), width, dtype=model.dtype, device=device)
        return inputs

    def clip_states(
        self, model: ModelView, ids: Tensors, clip_skip: int | None, weights: Tensors | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the states of all CLIPs concatenated along the width, and the pooled output of each."""
        import torch

        from inweave.models.encode import encode_clip

        options: Any = {"layer": self.clip_layer(clip_skip), "final_norm": self.final_norm}
        own = weights or {}
        states = [
            encode_clip(model.networks[folder], ids[folder], own.get(folder), **options)
            for folder in self.trainable_encoders
        ]
        return torch.cat([hidden for hidden, _ in states], -1), [pooled for _, pooled in states if pooled is not None]

    def t5_states(self, model: ModelView, ids: Tensors, weights: Tensors | None) -> Tensor | None:
        """Return T5's states of a text, computed now or before; None if the model has no T5."""
        from inweave.models.encode import encode_t5

        for folder in self.frozen_encoders:
            if folder in ids and ids[folder].is_floating_point():
                return ids[folder]
            if folder in ids:
                return encode_t5(model.networks[folder], ids[folder], None if weights is None else weights[folder])
        return None


def tokenizer_of(encoder: str) -> str:
    """Return the folder of a text encoder's tokenizer."""
    return encoder.replace("text_encoder", "tokenizer")
