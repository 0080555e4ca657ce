"""The original bits of weights that are being changed: saved before the first change, never recomputed.

    device   a copy on the same device: restoring costs one device copy
    host     a copy in (pinned) host memory: the device keeps its memory, restoring goes over the bus
    file     read again from the source the model was built from: no memory at all

`auto` uses the device if the copies fit, else the host, else the file.
"""

from __future__ import annotations

import os
from typing import Literal, get_args

import torch

from inweave.errors import ConfigError, MemoryBudgetError, TargetError
from inweave.weights.source import FileSource, WeightSource

Keep = Literal["auto", "device", "host", "file"]

#: device memory to leave free after the copies, for activations and everything else
HEADROOM = 2 * 1024**3


class Pristine:
    """Originals of one network's tensors, by name."""

    def __init__(self, keep: Keep, source: WeightSource | None) -> None:
        if keep not in get_args(Keep):
            raise ConfigError(f"keep must be one of {', '.join(get_args(Keep))}, got {keep!r}")
        if keep == "file" and source is None:
            raise TargetError("keep='file' needs sources: what the model was built from")
        self.keep = keep
        self._requested = keep
        self._source = source
        self._saved: dict[str, torch.Tensor] = {}
        self._in_source: set[str] = set()  # merged while it was built, so that its original is only in the source
        self._as_in_source: set[str] = set()  # verified to be the same in the source

    def decide(self, device: torch.device, needed: int) -> None:
        """Settle `auto` for a device and the bytes of all weights that may change."""
        if self._requested != "auto":
            return
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            fits_device, fits_host = free - needed > HEADROOM, _free_host_memory() - needed > HEADROOM
            self.keep = "device" if fits_device else "host" if fits_host or self._source is None else "file"
            return
        mapped = isinstance(self._source, FileSource)
        self.keep = "file" if mapped else "device"

    def check(self) -> None:
        """Raise if originals would have to come from a file that has changed."""
        if self.keep == "file" and isinstance(self._source, FileSource):
            self._source.check_unchanged()

    def lies_in_source(self, name: str) -> None:
        """Record that the live tensor was merged while it was built: its original is in the source."""
        if self._source is None:
            raise TargetError(f"{name}: built with adapters, so its original must come from the model's source")
        self._in_source.add(name)

    def save(self, name: str, live: torch.Tensor) -> None:
        """Remember ``live``; must be called while it is still original."""
        if name in self._saved or name in self._as_in_source:
            return
        built = name in self._in_source
        if self.keep == "file" and (built or self._is_in_source(name, live)):
            return
        try:
            if built:
                live = self._from_source(name, live)
            if self.keep == "host" and live.is_cuda:
                copy = torch.empty(live.shape, dtype=live.dtype, pin_memory=True)
                copy.copy_(live)
            else:
                copy = live if built else live.detach().clone()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise MemoryBudgetError(
                f"no room to keep the original of {name} ({live.nbytes:,} bytes) with keep={self.keep!r}: {error}"
            ) from None
        self._saved[name] = copy

    def _is_in_source(self, name: str, live: torch.Tensor) -> bool:
        """Return whether the source holds these very bits, so that no copy is needed; the file may have changed
        since.
        """
        assert self._source is not None
        quantized = live.dtype == torch.uint8  # the bytes of a layer: a source has its numbers
        if not quantized and name in self._source.names() and same_bits(self._from_source(name, live), live):
            self._as_in_source.add(name)
            return True
        return False

    def forget(self, name: str) -> None:
        """Take the live tensor as the original from now on."""
        self._saved.pop(name, None)
        self._in_source.discard(name)
        self._as_in_source.discard(name)

    def convert(self, name: str, live: torch.Tensor) -> None:
        """Move or convert the original as the model was while it was changed."""
        saved = self._saved.get(name)
        if saved is None:  # in the source, which is read in the dtype that is needed
            return
        device = torch.device("cpu") if self.keep == "host" else live.device
        self._saved[name] = saved.to(device=device, dtype=live.dtype)

    def get(self, name: str, live: torch.Tensor) -> torch.Tensor:
        """Return the original of ``live``, in its dtype; on its device unless kept in host memory."""
        if name in self._saved:
            return self._saved[name]
        if name in self._in_source:
            return self._from_source(name, live)
        if name not in self._as_in_source or self._source is None:
            return live  # never changed, so still original
        # never a view: a model built on the CPU may share the same map, and has written to it
        return self._source.get(name, dtype=live.dtype, device="cpu", owned=True)

    def _from_source(self, name: str, live: torch.Tensor) -> torch.Tensor:
        assert self._source is not None
        return self._source.get(name, dtype=live.dtype, device=live.device, owned=True)

    def is_resident(self, name: str, live: torch.Tensor) -> bool:
        """Return whether the original is kept on the device of the weight, where a kernel can read it."""
        return name in self._saved and self._saved[name].device == live.device


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Equal in every bit: NaN equals itself, and zeros have signs."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    left, right = one.detach().reshape(-1), two.detach().to(one.device).reshape(-1)
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def _free_host_memory() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0
