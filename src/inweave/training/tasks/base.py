"""A task, as the training loop sees it: batches of examples, randomness sampled on the host, a loss on the device.

The loop knows nothing of images or texts. A task defines the trained networks, the examples of each batch of an epoch,
the tensors of a batch (everything random included), and the loss of such tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from inweave.models.families.base import Tensors
from inweave.training.config.schema import TrainConfig
from inweave.training.data.batches import Order

OnProgress = Callable[[str, int, int], None]  # (activity, done, total)
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Task(Protocol):
    """A kind of training. The keys of ``networks`` are the component names of adapters ("unet", "te1", "model")."""

    @property
    def networks(self) -> Mapping[str, nn.Module]: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def order(self) -> Order:
        """The examples of each batch of the run."""

    @property
    def held_out(self) -> Sequence[tuple[int, ...]]:
        """Validation batches, which are never trained on."""

    def sample_batch(self, batch: tuple[int, ...], generators: Sequence[torch.Generator]) -> Tensors:
        """Return a batch as tensors on the host; all randomness of an example is drawn from its own generator."""

    def loss(self, inputs: Tensors) -> torch.Tensor:
        """Return a scalar that is a function of the tensors alone."""

    def new_notes(self) -> list[str]:
        """Return lines for the log about the data of the steps since the last call."""

    # A task may have `weight(inputs)`: how much a batch counts in the mean loss of an update, such as the number of its
    # trained tokens; `loss` is then the mean over that weight. Without it all micro-batches count alike.

    def fingerprint(self) -> str:
        """Return a digest that changes when the data, or its processing, changes."""

    def metadata(self) -> dict[str, str]:
        """Return the metadata of the trained file about the data."""


def generators_for(seed: int, positions: Iterable[Sequence[int]]) -> list[torch.Generator]:
    """Return one generator per example: splitting a batch, or sharing it among processes, changes no random number."""
    return [generator_for(seed, *position) for position in positions]


def generator_for(seed: int, *position: int) -> torch.Generator:
    """Return a generator that depends on the seed and the position alone: a resumed run samples the same numbers."""
    return torch.Generator().manual_seed(seed_for(seed, *position))


def seed_for(seed: int, *position: Any) -> int:
    text = "/".join(str(part) for part in (seed, *position))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def no_validation(config: TrainConfig) -> str:
    return f"validation_split: a share of {config.validation_split:g} of the dataset is less than one example; raise it"
