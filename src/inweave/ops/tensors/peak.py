"""Peak memory of a piece of work, on the meta device or for real.

Every tensor that an operation makes is counted until its storage is freed, so activations that autograd stores, that
gradient checkpointing drops, and that it recomputes are all included.

On the meta device torch computes the shapes of many operations in Python, up to 10 ms for a norm. A network repeats its
blocks, so shapes are remembered by operation and arguments, in `shapes.py`.

Attention is assumed to be fused, which is true on every GPU: on the meta device torch would choose the plain
implementation, which stores tokens x tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inweave.ops.tensors.shapes import run_on_meta


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
        else:
            result = run_on_meta(operation, args, kwargs or {})
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


class MetaAttention(TorchFunctionMode):
    """Lets attention on the meta device store its inputs, its result and one number per row, like fused attention."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if function is functional.scaled_dot_product_attention:
            inputs = (*args, *(options[name] for name in ("query", "key", "value") if name in options))[:3]
            if inputs[0].is_meta and inputs[0].dim() == 4:  # torch fuses no other
                return torch.ops.aten._scaled_dot_product_flash_attention.default(*inputs)[0]
        return function(*args, **options)


def peak_bytes(work: Callable[[], object], networks: Iterable[nn.Module]) -> int:
    """Return the peak of bytes allocated on the meta device during ``work``, not counting earlier tensors."""
    memory = PeakMemory()
    for network in networks:
        for tensor in (*network.parameters(), *network.buffers()):
            memory.ignore(tensor)
            if tensor.grad is not None:
                memory.ignore(tensor.grad)
    with MetaAttention(), memory:
        work()
    return memory.peak
