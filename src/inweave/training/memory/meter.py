"""The memory of one step of a run, measured and compared with the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inweave.ops.tensors.peak import PeakMemory
from inweave.ops.tensors.process import process_memory


class StepMeter:
    """Measures the second step of a run and compares it with the plan; the first also allocates permanent tensors.

    ``expected``: the planned bytes; None measures nothing. ``host``: those of host memory, which is reported only if
    the run keeps networks or inputs of blocks there; None: it does not.
    """

    def __init__(self, device: torch.device, expected: int | None = None, host: int | None = None) -> None:
        self._device, self._expected, self._host, self._calls = device, expected, host, 0

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
        record = {"event": "memory", "text": text, "measured_bytes": measured, "expected_bytes": self._expected}
        return [record, *self._of_host()]

    def _of_host(self) -> list[dict[str, Any]]:
        """Return a record of the process's host memory, if it is planned and the system counts it."""
        memory = process_memory()
        if memory is None or self._host is None:
            return []
        own, peak, expected = (f"{size / 2**30:.2f} GiB" for size in (*memory, self._host))
        text = f"the process has {own} of host memory; the estimate was {expected}; {peak} at most with mapped files"
        sizes = {"host_bytes": memory[0], "host_peak_bytes": memory[1], "expected_host_bytes": self._host}
        return [{"event": "memory", "text": text, **sizes}]

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
