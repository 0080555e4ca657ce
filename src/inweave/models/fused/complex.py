"""Attention with complex rotations, of Qwen-Image and Z-Image, with fewer passes over memory (`ops.rotary`).

    (a + ib) (cos + i sin)    of pairs (2i, 2i+1) of a head: the rotation of Flux, whose tables have every number twice

    Qwen-Image    two streams, text before image, with rotations each
    Z-Image       one stream; rotations differ between the examples of a batch, so all rows are one sequence

torch.compile does not fuse complex products. Arguments that the formula lacks take diffusers' own path.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from diffusers.models.transformers.transformer_z_image import ZSingleStreamAttnProcessor
from torch import Tensor

from inweave.models.fitting import accepts, has_all
from inweave.models.fused.joint import ADDED, ADDED_NORMS, MAIN, NORMS, Rotary, joined_heads, streams_fit
from inweave.models.siblings import ProjectsSiblings


class FusedQwenAttention(ProjectsSiblings, Attention):
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **cross_attention_kwargs: Any,
    ) -> Any:
        more = {"encoder_hidden_states_mask": None, "image_rotary_emb": None} | cross_attention_kwargs
        mask, rotations = more["encoder_hidden_states_mask"], more["image_rotary_emb"]
        size = self.inner_dim // self.heads
        if (
            encoder_hidden_states is None
            or attention_mask is not None
            or len(more) > 2
            or not _is_plain(self.processor, QwenDoubleStreamAttnProcessor2_0)
            or not isinstance(rotations, tuple)
            or [tuple(each.shape) for each in rotations]
            != [(stream.shape[1], size // 2) for stream in (hidden_states, encoder_hidden_states)]
        ):
            return super().forward(hidden_states, encoder_hidden_states, attention_mask, **cross_attention_kwargs)
        rows = [encoder_hidden_states.shape[1], hidden_states.shape[1]]
        streams = [(encoder_hidden_states, ADDED, ADDED_NORMS), (hidden_states, MAIN, NORMS)]
        q, k, v = joined_heads(self, streams, size, real_tables(*reversed(rotations)))
        if mask is not None:
            seen = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
            mask = torch.cat([mask, seen], 1)[:, None, None]
        h = dispatch_attention_fn(q, k, v, attn_mask=mask).flatten(2)
        text, image = torch.split(h, rows, 1)
        return _projected(self.to_out, image.contiguous()), self.to_add_out(text.contiguous())


class FusedZImageAttention(ProjectsSiblings, Attention):
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **cross_attention_kwargs: Any,
    ) -> Any:
        more = {"freqs_cis": None} | cross_attention_kwargs
        rotations = more["freqs_cis"]
        size = self.inner_dim // self.heads
        if (
            len(more) > 1
            or not _is_plain(self.processor, ZSingleStreamAttnProcessor)
            or rotations is None
            or tuple(rotations.shape) != (*hidden_states.shape[:2], size // 2)
        ):
            return super().forward(hidden_states, encoder_hidden_states, attention_mask, **cross_attention_kwargs)
        tables = real_tables(rotations.flatten(0, 1))
        joined = joined_heads(self, [(hidden_states, MAIN, NORMS)], size, tables, one_sequence=True)
        q, k, v = (heads.view(*hidden_states.shape[:2], -1, size) for heads in joined)
        if attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = attention_mask[:, None, None]
        return _projected(self.to_out, dispatch_attention_fn(q, k, v, attn_mask=attention_mask).flatten(2))


def real_tables(*rotations: Tensor) -> Rotary:
    """Cosines and sines (rows of all, size), every number twice, of complex numbers (rows, size / 2)."""
    pairs = torch.cat([torch.view_as_real(each) for each in rotations])
    cos, sin = pairs.repeat_interleave(2, 1).unbind(-1)
    return cos, sin


def _projected(modules: Any, h: Tensor) -> Tensor:
    for module in modules:
        h = module(h)
    return h


def _is_plain(processor: Any, kind: Any) -> bool:
    return type(processor) is kind and processor._attention_backend is None and processor._parallel_config is None


# what fits


def qwen_attention_fits(module: Attention) -> bool:
    """Return whether `FusedQwenAttention` computes what this module does."""
    text = ("encoder_hidden_states", "encoder_hidden_states_mask")
    names = ("hidden_states", *text, "attention_mask", "image_rotary_emb")
    return (
        streams_fit(module, QwenDoubleStreamAttnProcessor2_0, added=True)
        and accepts(QwenDoubleStreamAttnProcessor2_0.__call__, "attn", *names)
        and has_all(module, "to_add_out")
    )


def z_image_attention_fits(module: Attention) -> bool:
    """Return whether `FusedZImageAttention` computes what this module does."""
    names = ("hidden_states", "encoder_hidden_states", "attention_mask", "freqs_cis")
    return streams_fit(module, ZSingleStreamAttnProcessor, added=False) and accepts(
        ZSingleStreamAttnProcessor.__call__, "attn", *names
    )
