"""Which kernel computes attention of a shape: the fastest one, measured once per machine.

    key      GPU, torch, cuDNN, dtype, (batch, heads, queries, keys, size), causal, deterministic; in deterministic runs
             also the version of cuDNN's frontend, if it works
    time     forward and backward pass together on random numbers, without host time: the device is kept busy until
             everything is queued, as in a captured step
    bits     in deterministic runs a kernel whose gradients differ between calls is excluded: torch's call of cuDNN,
             despite torch's switch; cuDNN itself has a deterministic backward pass (`fixed_order`)
    stored   ~/.cache/inweave/attention.json, key -> kernel, so that the next run has the same choices and the same bits
    record   of one run: its choices are part of its checkpoints, and take precedence over those of this machine

A kernel that rejects a shape is excluded; if a deterministic run has no kernel left, the plain formula computes.
Choices that could not be measured for lack of memory are not stored. If the file cannot be read or written, shapes are
measured again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from inweave.errors import InweaveError
from inweave.files.documents import read_json
from inweave.files.writing import write_atomic
from inweave.ops.attention.fixed_order import frontend_problem, frontend_version
from inweave.ops.attention.kernels import ALL, KERNELS, PLAIN, Kernel, deterministic_calls, sequence_first
from inweave.ops.common.select import is_nvidia

_RUNS, _REPEATS = 10, 6
_BUSY = 20_000_000  # cycles, about ten milliseconds: longer than it takes to queue the runs
_MAX_FILE = 1 << 20

_chosen: dict[str, str] = {}  # key -> kernel, of this process or from the file
_unmeasured: set[str] = set()  # keys of fallbacks, chosen without a measurement
_record: dict[str, str] | None = None  # of the current run; global, since backward passes run in other threads


def kernel_for(q: Tensor, k: Tensor, causal: bool, deterministic: bool) -> Kernel:
    """Return the kernel for these queries and keys; a shape is measured when it first occurs."""
    if not is_nvidia(q):
        return PLAIN
    capturing = torch.cuda.is_current_stream_capturing()
    measure = None if capturing else partial(_fastest, q, k, causal, deterministic)
    return ALL[_choose(_key(q, k, causal, deterministic), measure, _fallback(q.dtype))]


@contextmanager
def recorded_choices(record: dict[str, str]) -> Iterator[None]:
    """Use the choices of ``record`` in the block, and add new choices to it."""
    global _record
    before, _record = _record, record
    try:
        yield
    finally:
        _record = before


def machine_name(device: torch.device, deterministic: bool) -> str:
    """Return the first part of the keys of choices on this device: GPU and versions of libraries."""
    return _machine(device.index or 0, deterministic) if is_nvidia(device) else device.type


def _choose(key: str, measure: Callable[[], str | None] | None, fallback: str) -> str:
    """Return the kernel's name.

    ``measure`` is None if nothing can be measured now, and returns None if memory is insufficient.
    """
    if _record is not None and key in _record:
        return _record[key]
    if key not in _chosen:
        _chosen.update(_stored())
    if key not in _chosen and measure is not None:
        fastest = measure()
        _chosen[key] = fallback if fastest is None else fastest
        if fastest is None:
            _unmeasured.add(key)
        else:
            _store()
    name = _chosen.get(key, fallback)
    if _record is not None:
        _record[key] = name
    return name


def _fallback(dtype: torch.dtype) -> str:
    """Return the kernel for shapes that cannot be measured: during capture of a graph, or for lack of memory."""
    return "efficient" if dtype == torch.float32 else "flash"


def cache_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inweave" / "attention.json"


def _key(q: Tensor, k: Tensor, causal: bool, deterministic: bool) -> str:
    shape = "x".join(str(size) for size in (*q.shape[:3], k.shape[2], q.shape[3]))
    dtype = str(q.dtype).removeprefix("torch.")
    flags = ("", " causal")[causal] + ("", " deterministic")[deterministic]
    return f"{_machine(q.device.index or 0, deterministic)}: {dtype} {shape}{flags}"


@cache
def _machine(index: int, deterministic: bool) -> str:
    libraries = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"  # type: ignore[no-untyped-call]
    usable = deterministic and frontend_problem() is None  # only then: other choices stay valid when it is installed
    frontend = f", frontend {frontend_version()}" if usable else ""
    return f"{torch.cuda.get_device_name(index)}, {libraries}{frontend}"


def measure(q: Tensor, k: Tensor, causal: bool, deterministic: bool) -> dict[str, float]:
    """Return the milliseconds of a forward and backward pass by kernel, without kernels that reject the shape."""
    generator = torch.Generator(q.device).manual_seed(0)  # leaves the model's own generator unchanged

    def numbers(like: Tensor) -> Tensor:
        return sequence_first(torch.randn(like.shape, generator=generator, device=q.device, dtype=q.dtype))

    queries, keys, values, grad = numbers(q), numbers(k), numbers(k), numbers(q)
    scale = q.shape[-1] ** -0.5
    times = {}
    for name, kernel in KERNELS.items():
        if kernel.repeats_only and not deterministic:
            continue

        def gradients(kernel: Kernel = kernel) -> tuple[Tensor, ...]:
            out, lse = kernel.forward(queries, keys, values, causal, scale)
            return kernel.backward(grad, queries, keys, values, sequence_first(out), lse, causal, scale)

        try:
            with deterministic_calls(deterministic):
                if not deterministic or _repeats_its_bits(gradients):
                    times[name] = _milliseconds(gradients)
        except torch.OutOfMemoryError:  # not a property of the shape
            raise
        except RuntimeError:
            pass
        # a rejection has no effect; a fault is raised here rather than by the next call
        torch.cuda.synchronize(q.device)
    return times


def _repeats_its_bits(gradients: Callable[[], tuple[Tensor, ...]]) -> bool:
    first = gradients()
    return all(torch.equal(one, two) for _ in range(_REPEATS) for one, two in zip(first, gradients(), strict=True))


def _fastest(q: Tensor, k: Tensor, causal: bool, deterministic: bool) -> str | None:
    try:
        with torch.cuda.device(q.device):  # events belong to the current device
            times = measure(q, k, causal, deterministic)
    except torch.OutOfMemoryError:
        return None
    if not times:
        return "plain" if deterministic else _fallback(q.dtype)
    return min(times, key=times.__getitem__)


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
    return {key: name for key, name in document.items() if isinstance(name, str) and name in ALL}


def _store() -> None:
    with suppress(InweaveError, OSError):
        cache_file().parent.mkdir(parents=True, exist_ok=True)
        merged = _stored() | {key: name for key, name in _chosen.items() if key not in _unmeasured}
        write_atomic(cache_file(), [json.dumps(merged, indent=1, sort_keys=True).encode()], durable=False)
