"""Offloading: networks stay in host memory until they are needed on the device.

    encode images      the VAE alone
    encode captions    the text encoders alone
    train              the networks of a step
    generate samples   the same, and temporarily those that generating needs

With `offload = "blocks"` a text encoder's blocks are streamed while it encodes captions (`inweave.weights.streaming`);
those of the denoiser are streamed for the whole run, once it has its adapters (`stream_denoiser`).

A network with trainable adapters never moves: the optimizer holds the addresses of its parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager

import torch
from torch import nn

from inweave.layers import lora_layers
from inweave.training.execution.oom import oom_hint
from inweave.training.optim.rounding import sibling_groups
from inweave.weights.streaming.stream import BlockStream


class Offloader:
    """Moves the networks of a model, named by their folders, between the host and ``device``.

    ``blocks``: of the networks whose blocks are streamed while they are needed. ``left``: folders that never move.
    """

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        device: torch.device,
        blocks: Mapping[str, Sequence[nn.Module]] | None = None,
        left: Collection[str] = (),
    ) -> None:
        self._networks, self._device = {k: v for k, v in networks.items() if k not in left}, device
        self._blocks = blocks or {}
        self._streams: dict[str, BlockStream] = {}

    def keep_only(self, folders: Set[str]) -> None:
        """Move these to the device and all others off it first, since both at once may not fit."""
        movable = {folder: network for folder, network in self._networks.items() if not lora_layers(network)}
        for folder in movable.keys() - folders:
            if folder in self._streams:
                self._streams[folder].stop()
            else:
                movable[folder].to("cpu")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        for folder in movable.keys() & folders:
            with oom_hint(f"move {folder} to {self._device}", "raise `vram`, or choose another precision"):
                if self._blocks.get(folder):
                    self._stream(folder).start()
                else:
                    movable[folder].to(self._device)

    def _stream(self, folder: str) -> BlockStream:
        if folder not in self._streams:
            network = self._networks[folder].to("cpu")
            self._streams[folder] = BlockStream(network, self._blocks[folder], self._device)
        return self._streams[folder]

    @contextmanager
    def also(self, needed: Set[str], *more: str) -> Iterator[None]:
        """Move ``more`` to the device inside the block, and leave ``needed`` alone there after it."""
        try:
            self.keep_only({*needed, *more})
            yield
        finally:
            self.keep_only(needed)


def stream_denoiser(network: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> BlockStream:
    """Stream the blocks of a network with adapters, which stay on the device; its blocks are fused already."""
    adapters = [adapter for layer in lora_layers(network).values() for adapter in layer.adapters.values()]
    fixed = [tensor for adapter in adapters for tensor in adapter.parameters()]
    aliases: list[torch.Tensor] = []
    for group in sibling_groups(network):
        aliases += [group.weight] if isinstance(group.weight, torch.Tensor) else group.weight
        aliases += [group.bias] if group.bias is not None else []
    with oom_hint("hold two blocks of the base", 'set quantize = "int8" or "nf4", or raise `vram`'):
        stream = BlockStream(network, blocks, device, fixed=fixed, aliases=aliases)
        stream.start()
    return stream
