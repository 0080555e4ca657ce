"""The traversal order behind the numbers of cloneofsimo's list files (`unet:<i>:up`).

    UNet          blocks: down, up, mid. In a transformer block: attn1 q k v out, ff.net.0.proj, attn2 q k v out
    UNet extended (the recorded classes include ResnetBlock2D) each block's resnets follow its attentions:
                  conv1, time_emb_proj, conv2, conv_shortcut
    text encoder  each layer: k v q out

This is the registration order of the libraries of late 2022, not today's.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count, takewhile

_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_RESNET = ("conv1", "time_emb_proj", "conv2", "conv_shortcut")


def unet_order(modules: Iterable[str], *, extended: bool) -> list[str]:
    """Module names in list order, for the UNet that has these modules."""
    known = set(modules)
    order: list[str] = []
    for block in _blocks(known):
        for attention in _numbered(known, f"{block}.attentions"):
            for inner in _numbered(known, f"{attention}.transformer_blocks"):
                order += [f"{inner}.attn1.{leaf}" for leaf in _ATTENTION]
                order.append(f"{inner}.ff.net.0.proj")
                order += [f"{inner}.attn2.{leaf}" for leaf in _ATTENTION]
        if extended:
            for resnet in _numbered(known, f"{block}.resnets"):
                order += [f"{resnet}.{leaf}" for leaf in _RESNET if f"{resnet}.{leaf}" in known]
    return order


def encoder_order(modules: Iterable[str]) -> list[str]:
    known = set(modules)
    layers = _numbered(known, "text_model.encoder.layers")
    return [f"{layer}.self_attn.{leaf}" for layer in layers for leaf in ("k_proj", "v_proj", "q_proj", "out_proj")]


def _blocks(known: set[str]) -> list[str]:
    return [*_numbered(known, "down_blocks"), *_numbered(known, "up_blocks"), "mid_block"]


def _numbered(known: set[str], prefix: str) -> list[str]:
    """Yield prefix.0, prefix.1, ... while there are modules below them."""
    return list(
        takewhile(lambda name: any(m.startswith(name + ".") for m in known), (f"{prefix}.{i}" for i in count()))
    )
