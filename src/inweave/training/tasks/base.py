"""What is learnt, seen from the loop: examples in batches, random numbers drawn on the host, a loss on the device.

The loop knows nothing of pictures or words. A task says which networks take adapters, which examples make up each batch
of an epoch, what a batch is as plain tensors (everything random included), and the loss of such tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from inweave.training.data.batches import Order

Tensors = dict[str, torch.Tensor]


class Task(Protocol):
    """One kind of training. ``networks`` go by the component names adapters use ("unet", "te1", "model")."""

    @property
    def networks(self) -> Mapping[str, nn.Module]: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def order(self) -> Order:
        """Which examples make up each batch of the run."""
        ...

    @property
    def held_out(self) -> Sequence[tuple[int, ...]]:
        """Batches that are never trained on."""
        ...

    def draw(self, batch: tuple[int, ...], generator: torch.Generator) -> Tensors:
        """A batch as tensors on the host."""
        ...

    def loss(self, inputs: Tensors) -> torch.Tensor:
        """A scalar; a function of the tensors alone."""
        ...

    def fingerprint(self) -> str:
        """Changes when the data or what is made of it changes."""
        ...

    def metadata(self) -> dict[str, str]:
        """What the trained file should say about its data."""
        ...


def generator_for(seed: int, *place: int) -> torch.Generator:
    """Random numbers that depend on the seed and the place in the run alone: a resumed run draws the same."""
    return torch.Generator().manual_seed(number_for(seed, *place))


def number_for(seed: int, *place: Any) -> int:
    text = "/".join(str(part) for part in (seed, *place))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
