"""What happens to each weight of a base while it loads: the denoiser's are hashed, then quantized.

A run is known by the weights of the base's file, which are gone once they are quantized. So a denoiser in the cache of
quantized bases (`inweave.models.quantized_cache`) comes with the digests of the weights that it was made from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from inweave.models.model import Model
from inweave.models.quantization import Quantizer
from inweave.models.quantized_cache import CachedBase
from inweave.training.config.schema import TrainConfig
from inweave.training.data.digests import Digests, sample_of, tensor_digest


class Arrivals:
    """Called with (folder, network, name of a tensor) when a tensor is in place; ``blank``: the model without weights.

    ``digests``: of the denoiser's tensors before they are quantized.
    """

    def __init__(
        self,
        blank: Model,
        config: TrainConfig,
        device: torch.device,
        *,
        staged: bool,
        cached: CachedBase | None = None,
    ) -> None:
        self._folder = blank.blueprint.denoiser.folder
        self._names = tuple(blank.denoiser.state_dict())
        self._format, self._device = config.quantize, device
        self._store = torch.device("cpu") if staged else device
        self._quantizer: Quantizer | None = None
        self._cached = cached
        self._samples: dict[str, str] = {} if cached is None else dict(cached.extra["samples"])
        self.digests: Digests = {} if cached is None else dict(cached.extra["digests"])

    def __call__(self, folder: str, network: nn.Module, name: str) -> None:
        if folder != self._folder or self._format in ("off", "keep") or self._cached is not None:
            return
        if self._quantizer is None:
            self._quantizer = Quantizer(network, self._format, self._device, self._store)
        module, _, leaf = name.rpartition(".")
        tensor = getattr(network.get_submodule(module), leaf).detach()
        self.digests[name], self._samples[name] = tensor_digest(tensor), sample_of(folder, name, tensor)
        self._quantizer.arrived(name)

    @property
    def samples(self) -> list[str]:
        """Samples of the denoiser's tensors in the order of its state dict."""
        return [self._samples[name] for name in self._names]

    @property
    def extra(self) -> dict[str, Any]:
        """What the cache of quantized bases has to record."""
        return {"digests": self.digests, "samples": self._samples}

    def note(self) -> str:
        """Return what was quantized, for the log."""
        if self._cached is not None:
            return self._cached.note
        return "" if self._quantizer is None else self._quantizer.note()


def usable(cached: CachedBase | None, blank: Model) -> CachedBase | None:
    """Return a cached base if it has the digests of all tensors: one that was quantized for generating has none."""
    names = blank.denoiser.state_dict().keys()
    if cached is None or any(cached.extra.get(name, {}).keys() != names for name in ("digests", "samples")):
        return None
    return cached
