"""What the layers of a network are for, by their names: attention, feed-forward parts, projections of one input."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from torch import nn

from inweave.layers import LoraLayer
from inweave.models.families import families

#: for text encoders, language models and denoisers without a family; the families define those of theirs
_TEXT_ATTENTION = (
    r"[qkv]_proj", "out_proj", "o_proj", r"SelfAttention\.[qkvo]", "c_attn", r"attn\.c_proj", "query_key_value",
    r"attention\.dense", "query", "key", "value", r"to_(query|key|value)", r"(self|cross)_attention\.out_layer",
)  # fmt: skip
_TEXT_MLP = (
    r"mlp\.fc[12]", r"DenseReluDense\.w[io](_\d)?", "gate_proj", "up_proj", "down_proj", "c_fc", r"mlp\.c_proj",
    r"mlp\.dense_\w+", r"fc[12]", r"feed_forward\.(in|out)_layer",
)  # fmt: skip
#: the projections of one input in an attention
PROJECTIONS = (
    ("to_q", "to_k", "to_v"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
    ("q_proj", "k_proj", "v_proj"),
)


@cache
def attention_names() -> re.Pattern[str]:
    """Return the pattern of the projections of attention."""
    return _ends((*(each for family in families() for each in family.attention), *_TEXT_ATTENTION))


@cache
def feed_forward_names() -> re.Pattern[str]:
    """Return the pattern of feed-forward layers."""
    return _ends((*(each for family in families() for each in family.feed_forward), *_TEXT_MLP))


@cache
def block_layers() -> re.Pattern[str]:
    """Return the pattern of everything inside of repeated blocks."""
    blocks = r"down_blocks|mid_block|up_blocks|\w*transformer_blocks|\w*stream_blocks|layers|\w+_refiner|block|blocks|h"
    return re.compile(rf"(.*\.)?({blocks})\..+")


def _ends(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({'|'.join(dict.fromkeys(patterns))})")


def token_layers(network: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of attention and feed-forward parts, which process every token, by name and unwrapped."""
    pairs = (
        (name, module.base if isinstance(module, LoraLayer) else module) for name, module in network.named_modules()
    )
    return {
        name: module
        for name, module in pairs
        if attention_names().fullmatch(name) or feed_forward_names().fullmatch(name)
    }


def projections(modules: Iterable[str]) -> list[tuple[str, ...]]:
    """Group queries, keys and values of each attention that has all three; other modules form groups of one."""
    names = dict.fromkeys(modules)
    result: list[tuple[str, ...]] = []
    for name in names:
        leaf = name.rpartition(".")[2]
        together: tuple[str, ...] = next((group for group in PROJECTIONS if leaf in group), ())
        group = tuple(name.removesuffix(leaf) + each for each in together)
        if not group or any(each not in names for each in group):
            result.append((name,))
        elif leaf == together[0]:
            result.append(group)
    return result
