"""cuDNN's deterministic backward pass of attention, which adds in a fixed order and so repeats its bits.

torch never requests it from cuDNN; NVIDIA's own package does (`pip install nvidia-cudnn-frontend`), with torch's cuDNN.
If the package finds another cuDNN first, as in LD_LIBRARY_PATH, it is not used.

    default        parts of dq = scale * ds k are added to memory in the order in which they finish
    fixed order    ds is stored, and dq is one product with it: batch * heads * queries * keys numbers of 16 bits, up to
                   `MAX_WORKSPACE`

On one H200, both passes of 24 heads of 128 and 4,608 tokens (Flux): 1,987 us, in any order 1,813 (`inweave bench
kernels`).

A cuDNN graph belongs to a memory layout, and is built when a layout first occurs: before a CUDA graph is captured,
which then owns the memory of the workspace. It is built in a separate thread: the package keeps some failed attempts,
with the calling frames and all their tensors, until garbage is collected; a CUDA graph captured before that would wait
for their stream. It is kept until the process ends: a captured CUDA graph launches its kernels, but does not own them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inweave.ops.attention.meta import empty_sequence_first

_DISTRIBUTION = "nvidia-cudnn-frontend"
_INPUTS = ("q", "k", "v", "out", "g", "lse")
#: bytes; if a shape needs more, another kernel computes it
MAX_WORKSPACE = 2 << 30

_handles = threading.local()  # cuDNN's handles serve one thread at a time
_builder = ThreadPoolExecutor(1, "inweave-cudnn")


class _Layout(NamedTuple):
    """The properties of a tensor that a cuDNN graph depends on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Graph(NamedTuple):
    """A built cuDNN graph: its names for inputs and results, and the bytes of its workspace."""

    execute: Callable[..., None]
    names: tuple[Any, ...]
    workspace: int


@cache
def frontend_version() -> str | None:
    """Return the version of NVIDIA's package; None if it is not installed."""
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def frontend_problem() -> str | None:
    """Return why NVIDIA's package cannot be used with this torch, and what to do; None if it can."""
    if (version := frontend_version()) is None:
        return f'{_DISTRIBUTION} is not installed: pip install "inweave[deterministic]"'
    try:
        frontend_cudnn: int = importlib.import_module("cudnn").backend_version()
    except Exception as problem:  # it asserts too, and another module may have this name
        return f"{_DISTRIBUTION} {version} cannot be used ({type(problem).__name__}: {problem}): install it again"
    torch_cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if frontend_cudnn != torch_cudnn:
        return (
            f"{_DISTRIBUTION} finds cuDNN {frontend_cudnn}, and torch has {torch_cudnn}: remove the other one "
            "from LD_LIBRARY_PATH, or from this Python's packages (nvidia/cudnn)"
        )
    return None


def fixed_order_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv); raise RuntimeError if cuDNN or this machine cannot compute them in a fixed order."""
    frontend = _frontend()
    tensors = (q, k, v, out, g, lse.unsqueeze(-1))
    layouts = tuple(_Layout(tuple(each.shape), each.stride(), each.dtype) for each in tensors)
    graph = _graph(q.device.index, layouts, causal, scale)
    if graph.workspace > MAX_WORKSPACE:
        raise RuntimeError(
            f"attention in a fixed order needs {graph.workspace >> 20} MiB for this shape, more than "
            f"{MAX_WORKSPACE >> 20}"
        )
    grads = tuple(empty_sequence_first(each) for each in (q, k, v))
    workspace = torch.empty(max(1, graph.workspace), dtype=torch.uint8, device=q.device)
    # addresses, so that the package keeps no tensor
    addresses = (each.data_ptr() for each in (*tensors, *grads))
    try:
        handle = _handle(q.device.index)
        frontend.set_stream(handle=handle, stream=torch.cuda.current_stream(q.device).cuda_stream)
        graph.execute(dict(zip(graph.names, addresses, strict=True)), workspace.data_ptr(), handle=handle)
    except RuntimeError:
        raise
    except Exception as refusal:  # the package's own exceptions have no common base
        raise RuntimeError(
            f"cuDNN cannot compute attention of {tuple(q.shape)} in a fixed order: {refusal}"
        ) from refusal
    return grads[0], grads[1], grads[2]


def _frontend() -> Any:
    if problem := frontend_problem():
        raise RuntimeError(f"attention in a fixed order needs {_DISTRIBUTION}; {problem}")
    return importlib.import_module("cudnn")


def _handle(device: int) -> Any:
    """Return the cuDNN handle of this thread."""
    handles: dict[int, Any] = _handles.__dict__.setdefault("by_device", {})
    if device not in handles:
        with torch.cuda.device(device):
            handles[device] = _frontend().create_handle()
    return handles[device]


@cache
def _graph(device: int, layouts: tuple[_Layout, ...], causal: bool, scale: float) -> _Graph:
    return _builder.submit(_build, device, layouts, causal, scale).result()


def _build(device: int, layouts: tuple[_Layout, ...], causal: bool, scale: float) -> _Graph:
    frontend = _frontend()
    types = {torch.bfloat16: frontend.data_type.BFLOAT16, torch.float16: frontend.data_type.HALF}
    single = frontend.data_type.FLOAT
    if layouts[0].dtype not in types:
        raise RuntimeError(f"attention in a fixed order is for bfloat16 and float16, not for {layouts[0].dtype}")
    types[torch.float32] = single
    torch.cuda.set_device(device)  # of the building thread
    try:
        precision = {"intermediate_data_type": single, "compute_data_type": single}
        graph = frontend.pygraph(io_data_type=types[layouts[0].dtype], handle=_handle(device), **precision)
        inputs = [
            graph.tensor(name=name, dim=list(layout.shape), stride=list(layout.strides), data_type=types[layout.dtype])
            for name, layout in zip(_INPUTS, layouts, strict=True)
        ]
        q, k, v, out, g, lse = inputs
        options = {"attn_scale": scale, "use_causal_mask": causal, "use_deterministic_algorithm": True}
        grads = graph.sdpa_backward(q=q, k=k, v=v, o=out, dO=g, stats=lse, **options)
        for grad, layout in zip(grads, layouts, strict=False):
            _, heads, rows, size = layout.shape
            strides = [rows * heads * size, size, heads * size, 1]
            grad.set_output(True).set_dim(list(layout.shape)).set_stride(strides).set_data_type(types[layout.dtype])
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([frontend.heur_mode.A, frontend.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return _Graph(graph.execute, (*inputs, *grads), int(graph.get_workspace_size()))
    except torch.OutOfMemoryError:
        raise
    except Exception as refusal:  # the package's own exceptions have no common base
        shape = layouts[0].shape
        raise RuntimeError(f"cuDNN refuses attention of {shape} in a fixed order: {refusal}") from refusal
