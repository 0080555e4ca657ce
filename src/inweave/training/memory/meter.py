"""Peak memory of a piece of work, on the meta device or for real, and of one step of a run.

Every tensor that an operation makes is counted until its storage is freed, so activations that autograd stores, that
gradient checkpointing drops, and that it recomputes are all included.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of storages on one type of device while the mode is active."""

    def __init__(self, device_type: str = "meta") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}

    def ignore(self, tensor: torch.Tensor) -> None:
        """Exclude a tensor that existed before."""
        self._known[tensor.untyped_storage()._cdata] = None

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._device_type != "meta":  # an unknown argument existed before, and results may be views of it
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._known:
                    self.ignore(tensor)
        result = operation(*args, **(kwargs or {}))
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self._device_type:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()

        def freed(_: object) -> None:
            self.live -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


class StepMeter:
    """Measures the second step of a run and compares it with the plan; the first also allocates permanent tensors.

    ``expected``: the planned bytes; None measures nothing.
    """

    def __init__(self, device: torch.device, expected: int | None = None) -> None:
        self._device, self._expected, self._calls = device, expected, 0

    def __call__(self, step: Callable[[], None]) -> list[dict[str, Any]]:
        """Do a step; returns a log record about its memory after the second call."""
        self._calls += 1
        if self._calls != 2 or self._expected is None:
            step()
            return []
        retries = self._retries()
        measured = self._on_gpu(step) if self._device.type == "cuda" else self._on_cpu(step)
        measured_text, expected_text = (f"{size / 2**30:.2f} GiB" for size in (measured, self._expected))
        text = f"a step uses {measured_text} of activation memory; the estimate was {expected_text}"
        if (retried := self._retries() - retries) > 0:
            text += f"; the allocator emptied its cache {retried} times to fit, which is slow: raise vram a little"
        return [{"event": "memory", "text": text, "measured_bytes": measured, "expected_bytes": self._expected}]

    def _retries(self) -> int:
        """Return how often the allocator emptied its cache because it had reached the limit."""
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))

    def _on_gpu(self, step: Callable[[], None]) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        step()
        return int(torch.cuda.max_memory_allocated(self._device)) - before

    def _on_cpu(self, step: Callable[[], None]) -> int:
        memory = PeakMemory("cpu")
        with memory:
            step()
        return memory.peak
