"""Offloading: networks stay in host memory until they are needed on the device.

    encode images      the VAE alone
    encode captions    the text encoders alone
    train              the networks of a step
    generate samples   the same, and temporarily those that generating needs

    an image           prompts: text encoders; steps: denoiser; decoding: VAE; between two images: nothing

A network whose blocks are streamed (`inweave.weights.streaming`) has two of them on the device at a time. One with
trainable adapters never moves: the optimizer holds the addresses of its parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager

import torch
from torch import nn

from inweave.errors import MergeStateError
from inweave.ops.tensors.oom import oom_hint
from inweave.weights.streaming.stream import BlockStream


class Offloader:
    """Moves the networks of a model, named by their folders, between the host and ``device``.

    ``blocks``: of the networks whose blocks are streamed while they are needed. ``left``: folders that never move.
    ``advice``: what to do about too little memory on the device. ``peak_bytes``: the most weights that were there.
    """

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        device: torch.device,
        blocks: Mapping[str, Sequence[nn.Module]] | None = None,
        left: Collection[str] = (),
        advice: str = "raise `vram`, or choose another precision",
    ) -> None:
        self._networks, self._device = {k: v for k, v in networks.items() if k not in left}, device
        self._blocks = blocks or {}
        self._advice = advice
        self._streams: dict[str, BlockStream] = {}
        self._there: frozenset[str] = frozenset()  # or on their way there
        self._settled = True  # no move was interrupted
        self.peak_bytes = 0

    def keep_only(self, folders: Set[str]) -> None:
        """Move these to the device and all others off it first, since both at once may not fit."""
        from inweave.layers import lora_layers  # images without offloading do not need it

        movable = {folder: network for folder, network in self._networks.items() if not lora_layers(network)}
        self._there, self._settled = frozenset(folders), False
        for folder in movable.keys() - folders:
            if folder in self._streams:
                self._streams[folder].stop()
            else:
                movable[folder].to("cpu")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        for folder in movable.keys() & folders:
            with oom_hint(f"move {folder} to {self._device}", self._advice):
                if self._blocks.get(folder):
                    self._stream(folder).start()
                else:
                    movable[folder].to(self._device)
        self._settled = True
        self.peak_bytes = max(self.peak_bytes, sum(map(self._bytes, movable.keys() & folders)))

    def _bytes(self, folder: str) -> int:
        """Return the bytes that a network takes on the device."""
        return self._streams[folder].device_bytes if folder in self._streams else weight_bytes(self._networks[folder])

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

    @contextmanager
    def using(self, *folders: str) -> Iterator[None]:
        """Have these on the device inside the block, besides those that are there; it may be nested."""
        before = self._there
        if before.issuperset(folders):
            yield
            return
        with self.also(before, *folders):
            yield

    def rest(self) -> None:
        """Ensure that all networks are in host memory, where adapters are merged, also after an interrupt.

        Raises:
            MergeStateError: They are computing.
        """
        if self._there:
            raise MergeStateError(f"{', '.join(sorted(self._there))}: computing; swap adapters between two images")
        if not self._settled:
            self.keep_only(frozenset())

    def report(self) -> dict[str, int]:
        """Return the bytes of all weights in host memory, and of the most that were on the device at a time."""
        return {"host_bytes": sum(map(weight_bytes, self._networks.values())), "device_bytes": self.peak_bytes}


def weight_bytes(network: nn.Module) -> int:
    """Return the bytes of a network's tensors."""
    return sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
