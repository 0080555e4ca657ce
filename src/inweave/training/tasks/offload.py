"""Offloading: networks stay in host memory until they are needed on the device.

    encode images      the VAE alone
    encode captions    the text encoders alone
    train              the networks of a step
    generate samples   the same, and temporarily those that generating needs

A network with trainable adapters never moves: the optimizer holds the addresses of its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager

import torch
from torch import nn

from inweave.layers import lora_layers
from inweave.training.execution.oom import oom_hint


class Offloader:
    """Moves the networks of a model, named by their folders, between the host and ``device``."""

    def __init__(self, networks: Mapping[str, nn.Module], device: torch.device) -> None:
        self._networks, self._device = networks, device

    def keep_only(self, folders: Set[str]) -> None:
        """Move these to the device and all others off it first, since both at once may not fit."""
        movable = {folder: network for folder, network in self._networks.items() if not lora_layers(network)}
        for folder in movable.keys() - folders:
            movable[folder].to("cpu")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        for folder in movable.keys() & folders:
            with oom_hint(f"move {folder} to {self._device}", "raise `vram`, or choose another precision"):
                movable[folder].to(self._device)

    @contextmanager
    def also(self, needed: Set[str], *more: str) -> Iterator[None]:
        """Move ``more`` to the device inside the block, and leave ``needed`` alone there after it."""
        try:
            self.keep_only({*needed, *more})
            yield
        finally:
            self.keep_only(needed)
