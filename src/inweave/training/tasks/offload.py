"""Streaming the blocks of a network that is being trained, for the whole run, once it has its adapters.

With `offload = "blocks"` a text encoder's blocks are streamed too, while it encodes captions
(`inweave.models.offload`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from inweave.layers import lora_layers
from inweave.ops.tensors.oom import oom_hint
from inweave.training.optim.rounding import sibling_groups
from inweave.weights.streaming.stream import BlockStream, streamed_blocks


def stream_network(
    network: nn.Module, every: Sequence[nn.Module], device: torch.device, resident: int
) -> tuple[BlockStream, str]:
    """Stream the blocks of a network but for ``resident`` of them; return the stream, and a note for the log.

    Its adapters stay on the device; its blocks are fused already.
    """
    blocks = [every[number] for number in streamed_blocks(len(every), resident)]
    adapters = [adapter for layer in lora_layers(network).values() for adapter in layer.adapters.values()]
    fixed = [tensor for adapter in adapters for tensor in adapter.parameters()]
    aliases: list[torch.Tensor] = []
    for group in sibling_groups(network):
        aliases += [group.weight] if isinstance(group.weight, torch.Tensor) else group.weight
        aliases += [group.bias] if group.bias is not None else []
    with oom_hint("hold two blocks of the base", 'set quantize = "int8" or "nf4", or raise `vram`'):
        stream = BlockStream(network, blocks, device, fixed=fixed, aliases=aliases)
        stream.start()
    total, slots = (f"{size / 2**30:.2f} GiB" for size in (stream.streamed_bytes, stream.slot_bytes))
    count = f"{len(blocks)} of {len(every)} blocks" if resident else f"{len(blocks)} blocks"
    return stream, f"{count} ({total}) are in host memory; {slots} on the device hold those that run next"
