"""Which kernel computes attention of a shape: the fastest one, measured once per machine.

    key      GPU, torch, cuDNN, dtype, (batch, heads, queries, keys, size), causal, deterministic, and then cuDNN's frontend if it works
    time     forward and backward pass together on random numbers, without the time of the host: the device is kept busy until
             everything is queued, as in a recorded step
    bits     where they have to be the same every time, a kernel whose gradients differ between runs is left out: torch's call of
             cuDNN, whatever torch's switch says; cuDNN itself has such a backward pass (`fixed_order`)
    stored   ~/.cache/inweave/attention.json, key -> kernel, so that a second run makes the same choice and has the same bits
    record   of one run: what it used is part of its checkpoints, and comes before what this machine has stored

A kernel that refuses a shape is left out; where none is left whose bits repeat, and they have to, the plain formula computes. What
could not be measured because memory was short is not stored. A file that cannot be read or written costs nothing but another measurement.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path

import torch

from inweave.errors import InweaveError
from inweave.files.documents import read_json
from inweave.files.writing import write_atomic
from inweave.ops.attention.fixed_order import frontend_problem, frontend_version
from inweave.ops.attention.kernels import ALL, KERNELS, PLAIN, Kernel, deterministic_calls, sequence_first

_RUNS, _REPEATS = 10, 6
_BUSY = 20_000_000  # cycles, about ten milliseconds: longer than it takes to queue the runs
_MAX_FILE = 1 << 20

_chosen: dict[str, str] = {}  # by this process, or stored
_unmeasured: set[str] = set()  # of these, what was not
_record: dict[str, str] | None = None  # of the run that is computing; its backward passes are in other threads


def kernel_for(q: torch.Tensor, k: torch.Tensor, causal: bool, deterministic: bool) -> Kernel:
    """The kernel for these queries and keys; measured the first time that such a shape comes."""
    if not q.is_cuda:
        return PLAIN
    capturing = torch.cuda.is_current_stream_capturing()
    measure = None if capturing else partial(_fastest, q, k, causal, deterministic)
    return ALL[_choose(_key(q, k, causal, deterministic), measure, _fallback(q.dtype))]


@contextmanager
def recorded_choices(record: dict[str, str]) -> Iterator[None]:
    """Inside the block choices are those of ``record``, which gets whatever is chosen besides."""
    global _record
    before, _record = _record, record
    try:
        yield
    finally:
        _record = before


def machine_name(device: torch.device, deterministic: bool) -> str:
    """What choices on this device are made for; the first part of their keys."""
    return _machine(device.index or 0, deterministic) if device.type == "cuda" else device.type


def _choose(key: str, measure: Callable[[], str | None] | None, fallback: str) -> str:
    """The kernel's name; ``measure`` None: nothing can be measured now. It returns None where memory is too short for it."""
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
    """What computes a shape that cannot be measured now, because a graph is being recorded or memory is short."""
    return "efficient" if dtype == torch.float32 else "flash"


def cache_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inweave" / "attention.json"


def _key(q: torch.Tensor, k: torch.Tensor, causal: bool, deterministic: bool) -> str:
    shape = "x".join(str(size) for size in (*q.shape[:3], k.shape[2], q.shape[3]))
    dtype = str(q.dtype).removeprefix("torch.")
    flags = ("", " causal")[causal] + ("", " deterministic")[deterministic]
    return f"{_machine(q.device.index or 0, deterministic)}: {dtype} {shape}{flags}"


@cache
def _machine(index: int, deterministic: bool) -> str:
    libraries = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"  # type: ignore[no-untyped-call]
    usable = deterministic and frontend_problem() is None  # for nothing else: other choices stay when it is installed
    frontend = f", frontend {frontend_version()}" if usable else ""
    return f"{torch.cuda.get_device_name(index)}, {libraries}{frontend}"


def measure(q: torch.Tensor, k: torch.Tensor, causal: bool, deterministic: bool) -> dict[str, float]:
    """Milliseconds of a forward and backward pass by kernel; kernels that refuse the shape are missing."""
    generator = torch.Generator(q.device).manual_seed(0)  # the model's own generator must not notice

    def numbers(like: torch.Tensor) -> torch.Tensor:
        return sequence_first(torch.randn(like.shape, generator=generator, device=q.device, dtype=q.dtype))

    queries, keys, values, grad = numbers(q), numbers(k), numbers(k), numbers(q)
    scale = q.shape[-1] ** -0.5
    times = {}
    for name, kernel in KERNELS.items():
        if kernel.repeats_only and not deterministic:
            continue

        def gradients(kernel: Kernel = kernel) -> tuple[torch.Tensor, ...]:
            out, lse = kernel.forward(queries, keys, values, causal, scale)
            return kernel.backward(grad, queries, keys, values, sequence_first(out), lse, causal, scale)

        try:
            with deterministic_calls(deterministic):
                if not deterministic or _repeats_its_bits(gradients):
                    times[name] = _milliseconds(gradients)
        except torch.OutOfMemoryError:  # which says nothing about the shape
            raise
        except RuntimeError:
            pass
        # a refusal leaves nothing behind; a fault is raised here, and not by whoever comes next
        torch.cuda.synchronize(q.device)
    return times


def _repeats_its_bits(gradients: Callable[[], tuple[torch.Tensor, ...]]) -> bool:
    first = gradients()
    return all(torch.equal(one, two) for _ in range(_REPEATS) for one, two in zip(first, gradients(), strict=True))


def _fastest(q: torch.Tensor, k: torch.Tensor, causal: bool, deterministic: bool) -> str | None:
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
