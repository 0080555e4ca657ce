"""Which kernel computes attention of a shape: the fastest one, measured once per machine.

    key      GPU, torch, cuDNN, dtype, (batch, heads, queries, keys, size), causal, deterministic
    time     forward and backward pass together on random numbers, without the time of the host: the device is kept busy until
             everything is queued, as in a recorded step
    bits     where they have to be the same every time, a kernel whose gradients differ between runs is left out: cuDNN 9 has
             no such backward pass, whatever torch's switch says
    stored   ~/.cache/inweave/attention.json, key -> kernel, so that a second run makes the same choice and has the same bits

A kernel that refuses a shape is left out. A file that cannot be read or written costs nothing but another measurement.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from inweave.errors import InweaveError
from inweave.files.documents import read_json
from inweave.files.writing import write_atomic
from inweave.ops.attention.kernels import KERNELS, PLAIN, Kernel, deterministic_calls, sequence_first

_RUNS, _REPEATS = 10, 6
_BUSY = 20_000_000  # cycles, about ten milliseconds: longer than it takes to queue the runs
_MAX_FILE = 1 << 20
#: what computes a shape that cannot be measured now, because a graph is being recorded or memory is short
FALLBACK = "flash"

_chosen: dict[str, str] = {}


def kernel_for(q: torch.Tensor, k: torch.Tensor, causal: bool, deterministic: bool) -> Kernel:
    """The kernel for these queries and keys; measured the first time that such a shape comes."""
    if not q.is_cuda:
        return PLAIN
    key = _key(q, k, causal, deterministic)
    if key not in _chosen:
        _chosen.update(_stored())
    if key not in _chosen:
        if torch.cuda.is_current_stream_capturing():
            return KERNELS[FALLBACK]
        _chosen[key] = _fastest(q, k, causal, deterministic)
        _store()
    return KERNELS[_chosen[key]]


def choices() -> dict[str, str]:
    """What was chosen so far in this process, by shape."""
    return dict(_chosen)


def cache_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inweave" / "attention.json"


def _key(q: torch.Tensor, k: torch.Tensor, causal: bool, deterministic: bool) -> str:
    shape = "x".join(str(size) for size in (*q.shape[:3], k.shape[2], q.shape[3]))
    dtype = str(q.dtype).removeprefix("torch.")
    flags = ("", " causal")[causal] + ("", " deterministic")[deterministic]
    return f"{_machine(q.device.index or 0)}: {dtype} {shape}{flags}"


@cache
def _machine(index: int) -> str:
    return f"{torch.cuda.get_device_name(index)}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"  # type: ignore[no-untyped-call]


def measure(q: torch.Tensor, k: torch.Tensor, causal: bool, deterministic: bool) -> dict[str, float]:
    """Milliseconds of a forward and backward pass by kernel; kernels that refuse the shape are missing."""
    generator = torch.Generator(q.device).manual_seed(0)  # the model's own generator must not notice

    def numbers(like: torch.Tensor) -> torch.Tensor:
        return sequence_first(torch.randn(like.shape, generator=generator, device=q.device, dtype=q.dtype))

    queries, keys, values, grad = numbers(q), numbers(k), numbers(k), numbers(q)
    scale = q.shape[-1] ** -0.5
    times = {}
    for name, kernel in KERNELS.items():

        def gradients(kernel: Kernel = kernel) -> tuple[torch.Tensor, ...]:
            out, lse = kernel.forward(queries, keys, values, causal, scale)
            return kernel.backward(grad, queries, keys, values, sequence_first(out), lse, causal, scale)

        with suppress(RuntimeError), deterministic_calls(deterministic):
            if not deterministic or _repeats_its_bits(gradients):
                times[name] = _milliseconds(gradients)
        # a refusal leaves nothing behind; a fault is raised here, and not by whoever comes next
        torch.cuda.synchronize(q.device)
    return times


def _repeats_its_bits(gradients: Callable[[], tuple[torch.Tensor, ...]]) -> bool:
    first = gradients()
    return all(torch.equal(one, two) for _ in range(_REPEATS) for one, two in zip(first, gradients(), strict=True))


def _fastest(q: torch.Tensor, k: torch.Tensor, causal: bool, deterministic: bool) -> str:
    try:
        with torch.cuda.device(q.device):  # events belong to the current device
            times = measure(q, k, causal, deterministic)
    except torch.cuda.OutOfMemoryError:
        return FALLBACK
    return min(times, key=times.__getitem__) if times else FALLBACK


def _milliseconds(work: Callable[[], object]) -> float:
    work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_BUSY)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(_RUNS):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / _RUNS


def _stored() -> dict[str, str]:
    try:
        document = read_json(cache_file(), _MAX_FILE)
    except (InweaveError, OSError):
        return {}
    return {key: name for key, name in document.items() if isinstance(name, str) and name in KERNELS}


def _store() -> None:
    with suppress(InweaveError, OSError):
        cache_file().parent.mkdir(parents=True, exist_ok=True)
        merged = _stored() | _chosen
        write_atomic(cache_file(), [json.dumps(merged, indent=1, sort_keys=True).encode()], durable=False)
