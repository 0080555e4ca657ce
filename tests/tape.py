"""Operations recorded on the CPU and played again, as a CUDA graph plays kernels again: for tests without a GPU.

    record   run work, and note each operation of it with the tensors that it read and wrote
    replay   run the same operations on the same tensors; Python around them is not called

What a graph cannot hold is refused as a GPU refuses it: numbers that are read from a tensor, and tensors that are made
from numbers of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_HOST = ("_local_scalar_dense", "nonzero", "lift_fresh", "equal", "is_nonzero")


class Tape(TorchDispatchMode):
    """The operations of some work."""

    def __init__(self) -> None:
        super().__init__()
        self.replays = 0
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _HOST:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        made = func(*args, **(kwargs or {}))
        infos = [each.alias_info for each in func._schema.returns]
        if not any(info is not None and not info.is_write for info in infos):  # a view follows what it shows
            outputs = [] if any(infos) else [each for each in tree_leaves(made) if torch.is_tensor(each)]
            self.operations.append((func, args, kwargs or {}, outputs))
        return made

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, outputs in self.operations:
            made = [each for each in tree_leaves(func(*args, **kwargs)) if torch.is_tensor(each)] if outputs else None
            if made is None:
                func(*args, **kwargs)
                continue
            for output, value in zip(outputs, made, strict=True):
                output.copy_(value)


class TapePool:
    """What records for a `RecordedDenoiser` on the CPU."""

    device = torch.device("cpu")
    device_bytes = 1
    bytes = 0

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self, work: Callable[[], None]) -> Tape:
        tape = Tape()
        with tape:
            work()
        self.tapes.append(tape)
        return tape

    def release(self) -> None:
        pass
