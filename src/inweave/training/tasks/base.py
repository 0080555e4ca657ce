"""A task, as the training loop sees it: batches of examples, randomness sampled on the host, a loss on the device.

The loop knows nothing of images or texts. A task says which networks are trained, which examples make up each batch of an
epoch, what a batch is as plain tensors (everything random included), and what the loss of such tensors is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from inweave.training.config.schema import TrainConfig
from inweave.training.data.batches import Order

Tensors = dict[str, torch.Tensor]


class Task(Protocol):
    """One kind of training. ``networks`` go by the component names that adapters use ("unet", "te1", "model")."""

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
        """Validation batches, which are never trained on."""
        ...

    def sample_batch(self, batch: tuple[int, ...], generators: Sequence[torch.Generator]) -> Tensors:
        """Return a batch as tensors on the host, everything random sampled: each example's from its own generator."""
        ...

    def loss(self, inputs: Tensors) -> torch.Tensor:
        """Return a scalar that is a function of the tensors alone."""
        ...

    def fingerprint(self) -> str:
        """Return a digest that changes when the data, or what is made of it, changes."""
        ...

    def metadata(self) -> dict[str, str]:
        """Return what the trained file's metadata should say about the data."""
        ...


def generators_for(seed: int, positions: Iterable[Sequence[int]]) -> list[torch.Generator]:
    """One generator per example: how a batch is split, or shared among processes, changes no random number."""
    return [generator_for(seed, *position) for position in positions]


def generator_for(seed: int, *position: int) -> torch.Generator:
    """A generator that depends on the seed and the position in the run alone: a resumed run samples the same numbers."""
    return torch.Generator().manual_seed(seed_for(seed, *position))


def seed_for(seed: int, *position: Any) -> int:
    text = "/".join(str(part) for part in (seed, *position))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def no_validation(config: TrainConfig) -> str:
    return f"validation_split: a share of {config.validation_split:g} of the dataset is less than one example; raise it"
