"""One memory pool and one stream for CUDA graphs that run one at a time.

    run      do work eagerly on the stream, its memory from the pool, so that handles and memory are not held twice
    record   record the same work: nothing is computed; what it allocates lies in the pool

Results that are read after the next replay have to lie outside of the pool.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Literal

import torch

ErrorMode = Literal["global", "thread_local", "relaxed"]


class GraphPool:
    """What the graphs of one user on one device share.

    ``errors``: what other threads may do while a graph is recorded, see `torch.cuda.graph`.
    """

    def __init__(self, device: torch.device, errors: ErrorMode = "global") -> None:
        self.device = device
        self._errors = errors
        self._pool: tuple[int, int] | None = None
        self._keeper: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def bytes(self) -> int:
        """The memory of the pool."""
        pool = self._pool
        segments = torch.cuda.memory_snapshot() if pool is not None else ()  # type: ignore[no-untyped-call]
        return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == pool)

    @property
    def device_bytes(self) -> int:
        """The memory of the device."""
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def run(self, work: Callable[[], None]) -> None:
        """Do ``work`` eagerly."""
        stream, pool = self._side_stream(), self._shared_pool()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        number = self._number()
        with torch.cuda.stream(stream):
            torch._C._cuda_beginAllocateCurrentStreamToPool(number, pool)
            try:
                work()
            finally:
                torch._C._cuda_endAllocateToPool(number, pool)
                torch._C._cuda_releasePool(number, pool)
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Return a graph of ``work``.

        Raises:
            Exception: what ``work`` does cannot be recorded, or there is no memory for it.
        """
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        pool, stream = self._shared_pool(), self._side_stream()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=self._errors):  # type: ignore[arg-type]
                work()
        except Exception:
            del graph
            self._end_recording()
            raise
        return graph

    def release(self) -> None:
        """Give the memory back; no graph of it may be replayed again."""
        self._pool = self._keeper = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def _end_recording(self) -> None:
        """Reset the CUDA generator from a cloned state: a failed capture leaves it in capture mode."""
        generator = torch.cuda.default_generators[self._number()]
        generator.graphsafe_set_state(generator.clone_state())

    def _number(self) -> int:
        return torch.cuda.current_device() if self.device.index is None else self.device.index

    def _shared_pool(self) -> tuple[int, int]:
        """Return the memory pool; an empty graph keeps it alive while there is no other."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._keeper = torch.cuda.CUDAGraph()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the graph is empty
                with torch.cuda.graph(
                    self._keeper, pool=self._pool, stream=self._side_stream(), capture_error_mode=self._errors
                ):
                    pass
        return self._pool

    def _side_stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._stream
