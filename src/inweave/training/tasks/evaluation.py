"""Evaluation during a run: the validation loss, and sample images.

Networks are in evaluation mode meanwhile, without dropout, and have the weights that are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from inweave.training.output.samples import SampleImage

Sample = Callable[[int], list[SampleImage]]


@contextmanager
def evaluation_mode(networks: Mapping[str, nn.Module], weights: AbstractContextManager[None]) -> Iterator[None]:
    """Put the networks into evaluation mode inside the block, within the context ``weights``."""
    modes = [(module, module.training) for network in networks.values() for module in network.modules()]
    with weights:
        for network in networks.values():
            network.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def sample_events(
    sample: Sample, step: int, mode: AbstractContextManager[None], *, shard: bool
) -> list[dict[str, Any]]:
    """Generate samples and return their log records; a failure is logged, because it must not end the run."""
    try:
        with mode:
            return [image.record() for image in sample(step)]
    except Exception as error:
        if shard and not isinstance(error, OSError):
            raise  # the other processes are waiting for this one inside the network
        return [{"event": "sample failed", "text": f"{type(error).__name__}: {' '.join(str(error).split())}"}]
