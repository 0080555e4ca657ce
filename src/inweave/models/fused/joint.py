"""Attention over two streams, text and image, with fewer passes over memory (`ops.rotary`).

    queries, keys    per stream: projection, RMS norm of every head; the streams joined, and rotated (Flux);
                     one kernel each way
    values           per stream: projection; the streams joined
                     of one product for queries, keys and values, its gradient too is written as one
                     (`ops.rotary.packed`)
    attention        on (batch, rows of both, heads, size): what `ops.attention` reads without a copy

    FluxAttention    text before image; a single block joins the streams and projects the output itself
    Attention        of Stable Diffusion 3: image before text; the second one of dual blocks has only the image

    FluxSingleTransformerBlock   one kernel writes GELU and attention side by side (`ops.activation`, `ops.fp8`);
                                 compiled, its results are separate tensors: gradients of slices would be assembled
                                 outside of the compiled code, by a fill, a copy and a sum of the whole stream

Arguments that the formula lacks (masks, other processors, projections that diffusers has fused) take diffusers' own
path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor, FluxSingleTransformerBlock
from torch import Tensor, nn
from torch.nn import functional

from inweave.models.fitting import accepts, has, has_all
from inweave.models.fused.feed_forward import is_frozen_in_8_bits
from inweave.models.siblings import ProjectsSiblings, project, project_at_once
from inweave.ops.activation import tanh_gelu
from inweave.ops.common.modules import is_unchanged
from inweave.ops.fp8 import frozen_feed_forward
from inweave.ops.rotary import join_heads, join_projections

MAIN = ("to_q", "to_k", "to_v")
ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")
NORMS = ("norm_q", "norm_k")
ADDED_NORMS = ("norm_added_q", "norm_added_k")

Rotary = tuple[Tensor, Tensor]
_HALF_RANGE = -65504, 65504  # diffusers keeps a stream in float16 from becoming infinite


class FusedFluxAttention(ProjectsSiblings, FluxAttention):
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
        **kwargs: Any,
    ) -> Any:
        streams = [hidden_states] if encoder_hidden_states is None else [encoder_hidden_states, hidden_states]
        rows = sum(stream.shape[1] for stream in streams)
        serves = self._serves(encoder_hidden_states) and is_rotary(image_rotary_emb, rows, self.head_dim)
        if attention_mask is not None or kwargs or not serves:
            return super().forward(hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb, **kwargs)
        inputs = [(hidden_states, MAIN, NORMS)]
        if encoder_hidden_states is not None:
            inputs.insert(0, (encoder_hidden_states, ADDED, ADDED_NORMS))
        q, k, v = joined_heads(self, inputs, self.head_dim, image_rotary_emb)
        h = dispatch_attention_fn(q, k, v).flatten(2)
        if encoder_hidden_states is None:
            return h
        text, image = torch.split(h, [stream.shape[1] for stream in streams], 1)
        return self.to_out[1](self.to_out[0](image.contiguous())), self.to_add_out(text.contiguous())

    def _serves(self, encoder_hidden_states: Tensor | None) -> bool:
        processor: Any = self.processor
        return (
            type(processor) is FluxAttnProcessor
            and processor._attention_backend is None
            and processor._parallel_config is None
            and not self.fused_projections
            and (self.added_kv_proj_dim is None) == (encoder_hidden_states is None)
        )


class FusedFluxSingleTransformerBlock(FluxSingleTransformerBlock):
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Any = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        if type(self.act_mlp) is nn.GELU and self.act_mlp.approximate == "tanh" and is_unchanged(self.act_mlp):
            stream = torch.cat([encoder_hidden_states, hidden_states], 1)
            stream = stream + self._change(stream, temb, image_rotary_emb, joint_attention_kwargs or {})
            if stream.dtype == torch.float16:
                stream = stream.clip(*_HALF_RANGE)
            rows = encoder_hidden_states.shape[1]
            text, image = stream[:, :rows], stream[:, rows:]
        else:
            text, image = super().forward(
                hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs
            )
        return (text.clone(), image.clone()) if torch.compiler.is_compiling() else (text, image)

    def _change(self, stream: Tensor, temb: Tensor, rotary: Any, attention_kwargs: dict[str, Any]) -> Tensor:
        normed, gate = self.norm(stream, emb=temb)
        in_8_bits = is_frozen_in_8_bits(self.proj_mlp, self.act_mlp, self.proj_out)
        wide = None if in_8_bits else self.proj_mlp(normed)
        attended = self.attn(hidden_states=normed, image_rotary_emb=rotary, **attention_kwargs)
        if wide is None and attended.dtype == normed.dtype:
            output = frozen_feed_forward(normed, self.proj_mlp, self.proj_out, attended)  # type: ignore[arg-type]
        else:
            output = self.proj_out(tanh_gelu(self.proj_mlp(normed) if wide is None else wide, attended))
        change: Tensor = gate[:, None] * output
        return change


class FusedJointAttention(ProjectsSiblings, Attention):
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **cross_attention_kwargs: Any,
    ) -> Any:
        processor: Any = self.processor
        plain = type(processor) is JointAttnProcessor2_0 and attention_mask is None and not cross_attention_kwargs
        if not plain or (encoder_hidden_states is not None and self.added_kv_proj_dim is None):
            return super().forward(hidden_states, encoder_hidden_states, attention_mask, **cross_attention_kwargs)
        streams = [(hidden_states, MAIN, NORMS)]
        if encoder_hidden_states is not None:
            streams.append((encoder_hidden_states, ADDED, ADDED_NORMS))
        q, k, v = (heads.transpose(1, 2) for heads in joined_heads(self, streams, self.inner_dim // self.heads, None))
        h = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if encoder_hidden_states is None:
            return self.to_out[1](self.to_out[0](h))
        image, text = torch.split(h, [hidden_states.shape[1], encoder_hidden_states.shape[1]], 1)
        if not self.context_pre_only:
            text = self.to_add_out(text)
        return self.to_out[1](self.to_out[0](image)), text


def is_rotary(tables: Any, rows: int, size: int) -> bool:
    """Return whether ``tables`` is None or holds cosines and sines for this number of rows."""
    return tables is None or (
        isinstance(tables, tuple) and len(tables) == 2 and all(table.shape == (rows, size) for table in tables)
    )


def joined_heads(
    attention: Any,
    streams: Sequence[tuple[Tensor, tuple[str, ...], tuple[str, ...]]],
    size: int,
    rotary: Rotary | None,
    *,
    one_sequence: bool = False,
) -> tuple[Tensor, ...]:
    """Return queries, keys and values (batch, rows of all streams, heads, size).

    ``streams``: the input, the projections, and the norms of queries and keys.

    ``one_sequence``: the examples one after the other, (1, rows of all of them, heads, size), where each has rotations
    of its own. Projections see the examples separately: their dropout is seeded by row.
    """

    def arrange(columns: Tensor) -> Tensor:
        heads = columns.view(*columns.shape[:-1], -1, size)
        return heads.flatten(0, 1)[None] if one_sequence else heads

    norms = [[getattr(attention, name) for name in names] for *_, names in streams]
    products = [project_at_once(attention, projections, x) for x, projections, _ in streams]
    whole = [arrange(product) for product in products if product is not None]
    if len(whole) == len(streams) and all(_are_plain(pair, whole[0].dtype) for pair in norms):
        if norms[0][0] is None:
            return join_projections(whole, rotary=rotary)
        weights = [[norm.weight for norm in pair] for pair in norms]
        return join_projections(whole, weights=weights, eps=norms[0][0].eps, rotary=rotary)
    projected = [
        [arrange(heads) for heads in (project(attention, projections, x) if product is None else product.unbind(-2))]
        for (x, projections, _), product in zip(streams, products, strict=True)
    ]
    parts = list(zip(*projected, strict=True))  # by queries, keys and values
    q, k = (
        _normalized(heads, modules, rotary) for heads, modules in zip(parts[:2], zip(*norms, strict=True), strict=True)
    )
    return q, k, join_heads(parts[2])


def _normalized(parts: Sequence[Tensor], norms: Sequence[Any], rotary: Rotary | None) -> Tensor:
    if norms[0] is None:
        return join_heads(parts, rotary=rotary)
    if not _are_plain(norms, parts[0].dtype):
        # of another dtype the result has the wider one with diffusers' norm, and that of the input with torch's
        return join_heads([norm(part) for norm, part in zip(norms, parts, strict=True)], rotary=rotary)
    return join_heads(parts, weights=[norm.weight for norm in norms], eps=norms[0].eps, rotary=rotary)


def _are_plain(norms: Sequence[Any], dtype: torch.dtype) -> bool:
    """Return whether the norms have weights of this dtype and no hooks."""
    return all(
        norm is None or ((norm.weight is None or norm.weight.dtype == dtype) and is_unchanged(norm)) for norm in norms
    )


# what fits


def flux_attention_fits(module: FluxAttention) -> bool:
    """Return whether `FusedFluxAttention` computes what this module does."""
    names = ("hidden_states", "encoder_hidden_states", "attention_mask", "image_rotary_emb", "kwargs")
    added = getattr(module, "added_kv_proj_dim", None) is not None
    norms = [getattr(module, name, None) for name in (NORMS + ADDED_NORMS if added else NORMS)]
    return (
        accepts(FluxAttention.forward, *names)
        and accepts(FluxAttnProcessor.__call__, "attn", *names[:-1])
        and has(module, processor=frozenset({FluxAttnProcessor}), fused_projections=False)
        and has_all(module, "head_dim", *MAIN)
        and all(type(norm) is nn.RMSNorm and norm.normalized_shape == (module.head_dim,) for norm in norms)
        and _one_eps(norms)
        and (not added or (has(module, to_out=frozenset({nn.ModuleList})) and has_all(module, "to_add_out", *ADDED)))
    )


def flux_single_block_fits(module: FluxSingleTransformerBlock) -> bool:
    """Return whether `FusedFluxSingleTransformerBlock` computes what this module does."""
    names = ("hidden_states", "encoder_hidden_states", "temb", "image_rotary_emb", "joint_attention_kwargs")
    return (
        accepts(FluxSingleTransformerBlock.forward, *names)
        and has(module, act_mlp=frozenset({nn.GELU}))
        and has(module.act_mlp, approximate="tanh")
        and has_all(module, "norm", "proj_mlp", "attn", "proj_out")
    )


def joint_attention_fits(module: Attention) -> bool:
    """Return whether `FusedJointAttention` computes what this module does."""
    names = ("hidden_states", "encoder_hidden_states", "attention_mask")
    added = getattr(module, "added_kv_proj_dim", None) is not None
    return (
        streams_fit(module, JointAttnProcessor2_0, added=added)
        and accepts(JointAttnProcessor2_0.__call__, "attn", *names, "args", "kwargs")
        and (not added or has(module, context_pre_only=True) or has_all(module, "to_add_out"))
    )


def streams_fit(module: Attention, processor: type, *, added: bool) -> bool:
    """Return whether `joined_heads` supports a module with this processor; ``added``: it has two streams."""
    names = ("hidden_states", "encoder_hidden_states", "attention_mask", "cross_attention_kwargs")
    norms = [getattr(module, name, None) for name in (NORMS + ADDED_NORMS if added else NORMS)]
    return (
        accepts(Attention.forward, *names)
        and has(module, processor=frozenset({processor}), to_out=frozenset({nn.ModuleList}))
        and has_all(module, "heads", "inner_dim", *MAIN, *(ADDED if added else ()))
        and module.inner_dim == module.inner_kv_dim
        and (all(norm is None for norm in norms) or _normalize_heads(norms, module.inner_dim // module.heads))
    )


def _normalize_heads(norms: Sequence[Any], size: int) -> bool:
    plain = all(type(norm) is RMSNorm and norm.bias is None and tuple(norm.dim) == (size,) for norm in norms)
    return plain and _one_eps(norms)


def _one_eps(norms: Sequence[Any]) -> bool:
    return isinstance(norms[0].eps, float) and len({norm.eps for norm in norms}) == 1
