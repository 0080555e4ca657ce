"""Making adapters and base files for tests: from listings, from arrays, from nothing but a header; and a stopwatch."""

from __future__ import annotations

import gc
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from inweave.adapter import Tensor
from inweave.adapter.tensor import BITS
from inweave.formats.files import write_file
from inweave.targets.compact import expand

DATA = Path(__file__).parent / "data"
FULL = "INWEAVE_FULL_TESTS"
NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}


def sized(sample: int, full: int) -> int:
    """How many: a sample by default, all with `pytest --full`."""
    return full if os.environ.get(FULL) else sample


def figure(text: str) -> None:
    """A measurement for docs/reliability.md; `pytest -rP` shows it."""
    print(f"figure: {text}")


@dataclass
class Cost:
    seconds: float = math.nan  # until the block has ended: less than no limit


@contextmanager
def stopwatch(clock: Callable[[], float]) -> Iterator[Cost]:
    """Measure a block by this clock, without the garbage collector, which takes up to a second for what tests left."""
    collecting, cost = gc.isenabled(), Cost()
    gc.disable()
    began = clock()
    try:
        yield cost
    finally:
        cost.seconds = clock() - began
        if collecting:
            gc.enable()


def tensor(values: object, dtype: str = "F32") -> Tensor:
    """A Tensor from numbers; BF16 by cutting float32, as every writer does for exact values."""
    if dtype == "BF16":
        bits = np.asarray(values, dtype="<f4").view("<u4")
        return Tensor("BF16", bits.shape, (bits >> 16).astype("<u2").tobytes())
    array = np.asarray(values, dtype=NUMPY[dtype])
    return Tensor(dtype, array.shape, array.tobytes())


def random(seed: int, *shape: int, dtype: str = "F32") -> Tensor:
    return tensor(np.random.default_rng(seed).standard_normal(shape) * 0.1, dtype)


def scalar_tensor(value: float, dtype: str = "F32") -> Tensor:
    return tensor(value, dtype)


def summation_error(rank: int, magnitude: Any) -> Any:
    """How far two float32 evaluations of w + up @ down may differ: whatever their order and whether they fuse.

    Each is within (rank + 1) * eps of the exact sum, times the sum of its terms' sizes, which ``magnitude`` bounds.
    """
    return 2 * (rank + 1) * float(np.finfo(np.float32).eps) * magnitude


def array(stored: Tensor) -> np.ndarray:
    if stored.dtype == "BF16":
        bits = np.frombuffer(stored.data, dtype="<u2").astype("<u4") << 16
        return bits.view("<f4").reshape(stored.shape)
    return np.frombuffer(stored.data, dtype=NUMPY[stored.dtype]).reshape(stored.shape)


def zeros(shape: Sequence[int], dtype: str = "F32") -> Tensor:
    return Tensor(dtype, tuple(shape), bytes(int(np.prod(shape, dtype=np.int64)) * BITS[dtype] // 8))


def hollow(shape: Sequence[int], dtype: str = "F32") -> Tensor:
    """A tensor with a shape but no data beyond a scalar's: enough wherever values are not looked at."""
    return Tensor(dtype, tuple(shape), bytes(BITS[dtype] // 8) if tuple(shape) == () else b"")


def write_sparse(
    path: Path, shapes: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> Path:
    """A safetensors file of any size that takes no disk: a header, then a hole full of zeros."""
    document: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in shapes.items():
        end = position + int(np.prod(shape, dtype=np.int64)) * BITS[dtype] // 8
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(document).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + position)
    return path


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Path:
    return write_file(path, tensors, metadata)


def lora_pair(module: str, out: int, into: int, rank: int = 4, *, seed: int = 0, alpha: float | None = None,
              dtype: str = "F32") -> dict[str, Tensor]:  # fmt: skip
    """A kohya-named LoRA pair of random numbers."""
    pair = {
        f"{module}.lora_down.weight": random(seed, rank, into, dtype=dtype),
        f"{module}.lora_up.weight": random(seed + 1, out, rank, dtype=dtype),
    }
    if alpha is not None:
        pair[f"{module}.alpha"] = tensor(alpha, dtype)
    return pair


def dotted_pair(module: str, out: int, into: int, seed: int = 0) -> dict[str, Tensor]:
    """Return a PEFT-named LoRA pair of random numbers, of rank 4."""
    return {f"{module}.lora_A.weight": random(seed, 4, into), f"{module}.lora_B.weight": random(seed + 1, out, 4)}


@cache
def lora_listing(name: str) -> dict[str, Any]:
    """One of tests/data/lora: {base, format, metadata?, adapter_config?, tensors: {key: (dtype, shape)}}."""
    document = json.loads((DATA / "lora" / f"{name}.json").read_text())
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for dtype, packed in document["tensors"].items():
        tensors |= {key: (dtype, shape) for key, shape in expand(packed).items()}
    return document | {"tensors": {key: tensors[key] for key in sorted(tensors)}}


def lora_listings() -> list[str]:
    return sorted(path.stem for path in (DATA / "lora").glob("*.json"))


@cache
def base_listing(name: str) -> dict[str, tuple[int, ...]]:
    """One of tests/data/base: the tensors of a base model as published, in the original naming."""
    return expand(json.loads((DATA / "base" / f"{name}.json").read_text())["tensors"])
