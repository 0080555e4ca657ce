"""A straightforward implementation of plans, and small bases to apply them to.

This is the meaning of `Placement` in a few lines, for tests only; the package has a faster implementation.

    tensor[target] += back(change(factors, forth(base rows))[source])      forth: swap, transpose, widen
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from inweave.adapter import Adapter, Tensor
from inweave.formats.files import open_container
from inweave.formats.read import read
from inweave.ops.delta import change, padded
from inweave.ops.tensors.decode import TORCH, decode
from inweave.targets.bases import known_index
from inweave.targets.index import ModelIndex, index_from_names
from inweave.targets.links import Naming
from inweave.targets.plan import Placement, Plan, Rows
from inweave.targets.resolve import resolve
from tests.support import DATA, hollow, random, tensor

NAMINGS: tuple[Naming, ...] = ("diffusers", "original")
SPELLINGS = {
    "kohya": ("lora_down.weight", "lora_up.weight"),
    "peft": ("lora_A.weight", "lora_B.weight"),
    "named": ("lora_A.default.weight", "lora_B.default.weight"),
    "bare": ("lora_A", "lora_B"),
    "dotted": ("lora.down.weight", "lora.up.weight"),
    "linear": ("lora_linear_layer.down.weight", "lora_linear_layer.up.weight"),
    "leaf": ("down.weight", "up.weight"),
    "hcp": ("___.layer.W_down", "___.layer.W_up"),
    "candle": ("a0.weight", "b0.weight"),
}
_DOWN = re.compile(r"lora_down|lora_A|W_down|down\.weight$|\.?a\d+\.weight$|:down$")
_UP = re.compile(r"lora_up|lora_B\.?(?!.*bias)|W_up|up\.weight$|\.?b\d+\.weight$|:up$")
_BLOCK = re.compile(r"(?:blocks|layers|refiner)\.(\d+)\.")

#: size in the real model -> size in the small one; unlisted sizes stay
_SIZES = {
    "flux1-dev": {
        3072: 8, 6144: 16, 9216: 24, 12288: 32, 15360: 40, 18432: 48, 21504: 56, 128: 4, 64: 6, 4096: 10, 768: 5,
        256: 7,
    },
    "sd3-medium": {
        1536: 8, 3072: 16, 4608: 24, 6144: 32, 9216: 48, 64: 6, 16: 3, 2048: 5, 4096: 10, 256: 7, 36864: 9,
    },
    "z-image-turbo": {3840: 8, 11520: 24, 10240: 20, 15360: 32, 128: 4, 64: 6, 2560: 5, 256: 7, 1024: 9},
    "lumina2": {2304: 12, 768: 4, 3840: 20, 9216: 48, 96: 3, 64: 6, 1024: 5, 256: 7},
    "wan2.1-i2v-14b": {5120: 8, 13824: 20, 30720: 48, 1280: 10, 4096: 9, 256: 7, 64: 6},
}  # fmt: skip


def lora(
    module: str,
    out: int,
    into: int,
    rank: int = 3,
    *,
    spelling: str = "kohya",
    alpha: float | None = None,
    kernel: Sequence[int] = (),
    dtype: str = "F32",
    seed: int | None = None,
    empty: bool = False,
) -> dict[str, Tensor]:
    """A pair of random factors (or of shapes only) with any suffixes."""
    down, up = SPELLINGS[spelling]
    seed = zlib.crc32(module.encode()) % 10_000 if seed is None else seed
    shapes = {f"{module}.{down}": (rank, into, *kernel), f"{module}.{up}": (out, rank, *(1 for _ in kernel))}
    tensors = {
        key: hollow(shape, dtype) if empty else random(seed + n, *shape, dtype=dtype)
        for n, (key, shape) in enumerate(shapes.items())
    }
    if alpha is not None:
        tensors[f"{module}.{'___.' if spelling == 'hcp' else ''}alpha"] = tensor(alpha, dtype)
    return tensors


def product(pair: Mapping[str, Tensor]) -> torch.Tensor:
    """flat(up) @ flat(down) of the only pair, in float64 and without inweave's formulas."""
    down = next(value for key, value in pair.items() if _DOWN.search(key))
    up = next(value for key, value in pair.items() if _UP.search(key) and not _DOWN.search(key))
    return numbers(up).flatten(1) @ numbers(down).flatten(1)


def numbers(stored: Tensor) -> torch.Tensor:
    return decode(stored, dtype=torch.float64)


def halves(rows: torch.Tensor) -> torch.Tensor:
    """(shift, scale) <-> (scale, shift)"""
    half = rows.shape[0] // 2
    return torch.cat([rows[half:], rows[:half]])


@dataclass(frozen=True)
class Base:
    """A model with random weights, created on first access, or with the weights that are passed."""

    index: ModelIndex
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.weights:
            return self.weights[name]
        shape = next(c.tensors[name] for c in self.index if name in c.tensors)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def plan(self, adapter: Adapter | Mapping[str, Tensor], *, strict: bool = True) -> Plan:
        return resolve(adapter if isinstance(adapter, Adapter) else read(adapter), self.index, strict=strict)

    def merged(
        self, adapter: Adapter | Mapping[str, Tensor], strength: float = 1.0, *, strict: bool = True
    ) -> dict[str, torch.Tensor]:
        """Return every tensor that the adapter changes, with its new value."""
        result: dict[str, torch.Tensor] = {}
        for placement in self.plan(adapter, strict=strict).placements:
            name = placement.tensor
            before = self._zeros(placement) if placement.creates else self[name]
            after = result.setdefault(name, padded(before, placement.widen).clone())
            start, length = placement.target or (0, after.shape[0])
            after[start : start + length] += self._change(placement, before, strength)
        return result

    def changes(
        self, adapter: Adapter | Mapping[str, Tensor], strength: float = 1.0, *, strict: bool = True
    ) -> dict[str, torch.Tensor]:
        """Return the same tensors, minus the base."""
        return {name: after - self[name] for name, after in self.merged(adapter, strength, strict=strict).items()}

    def _zeros(self, placement: Placement) -> torch.Tensor:
        weight_name = placement.tensor.removesuffix("bias") + "weight"
        shapes = next((c.tensors for c in self.index if weight_name in c.tensors), {})
        shape = shapes[weight_name][:1] if weight_name in shapes else placement.shape
        return torch.zeros(shape, dtype=torch.float64)

    def _change(self, placement: Placement, before: torch.Tensor, strength: float) -> torch.Tensor:
        factors = placement.factors
        view = _forth(before, placement.target, placement.swap, placement.transpose)
        if placement.whole:
            view = torch.cat([_forth(self[p.tensor], p.rows, p.swap, p.transpose) for p in placement.whole])
        elif placement.source and factors.shape()[0] > 0:
            start, length = placement.source
            room = torch.zeros(factors.shape()[0], *view.shape[1:], dtype=view.dtype)
            room[start : start + length] = view
            view = room
        delta = change(factors, padded(view, placement.widen), strength)
        if placement.source and delta.shape[0] != placement.source[1]:
            delta = delta[placement.source[0] : sum(placement.source)]
        delta = halves(delta) if placement.swap else delta
        return delta.T if placement.transpose else delta


def _forth(tensor: torch.Tensor, rows: Rows | None, swap: bool, transpose: bool) -> torch.Tensor:
    part = tensor if rows is None else tensor[rows[0] : rows[0] + rows[1]]
    part = part.T if transpose else part
    return halves(part) if swap else part


def known(name: str, naming: Naming = "diffusers") -> Base:
    return Base(known_index(name, naming))


@lru_cache
def small(name: str, naming: Naming = "diffusers") -> Base:
    """A known transformer shrunk: the first and the last block of each stack, narrow; names without a prefix."""
    component = known_index(name, naming).denoiser
    shapes = {key.removeprefix(component.prefix): shape for key, shape in component.tensors.items()}
    last: dict[str, int] = {}
    for key in shapes:
        if block := _BLOCK.search(key):
            stack = key[: block.start(1)]
            last[stack] = max(last.get(stack, 0), int(block[1]))
    ends = {
        key: tuple(_SIZES[name].get(size, size) for size in shape)
        for key, shape in shapes.items()
        if not (block := _BLOCK.search(key)) or int(block[1]) in (0, last[key[: block.start(1)]])
    }
    return Base(index_from_names(ends))


def torch_base(shapes: Mapping[str, Sequence[int]]) -> Base:
    """Any other model, by names and shapes."""
    return Base(index_from_names({name: tuple(shape) for name, shape in shapes.items()}))


def shape_of(base: str, name: str) -> tuple[int, ...]:
    """Return the shape of the weight of "component:module", by its diffusers name."""
    component, _, part = name.partition(":")
    return known_index(base).components[component].parts[f"{part}.weight"]


def places(base: str, naming: Naming, adapter: Adapter | Mapping[str, Tensor]) -> dict[str, Placement]:
    """Return component:module -> its placement, for an adapter that must fit completely."""
    placements = known(base, naming).plan(adapter).placements
    by_place = {f"{p.component}:{p.tensor.removesuffix('.weight')}": p for p in placements}
    assert len(by_place) == len(placements)
    return by_place


def lands(base: str, module: str, diffusers: str | Sequence[str], original: str | None = None, rows: Rows | None = None,
          *, spelling: str = "kohya", dialect: str | None = None, rank: int = 3) -> None:  # fmt: skip
    """Assert that a LoRA of ``module`` is placed exactly at "component:module", in diffusers names (several, for a
    fused layer) and in those of a single file, on ``rows`` of it.
    """
    parts = [diffusers] if isinstance(diffusers, str) else list(diffusers)
    shapes = [shape_of(base, part) for part in parts]
    _, into, *kernel = shapes[0]
    pair = lora(module, sum(s[0] for s in shapes), into, rank, kernel=kernel, spelling=spelling, empty=True)
    adapter = read(pair)
    if dialect is not None:
        assert adapter.dialects == (dialect,)
    assert list(places(base, "diffusers", adapter)) == parts
    if original is not None:
        ((name, placement),) = places(base, "original", adapter).items()
        assert (name, placement.target) == (original, rows)


def close(result: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-9) -> None:
    assert result.shape == expected.shape
    assert expected.abs().max() > 1e-6, "nothing is compared"
    torch.testing.assert_close(result.double(), expected.double(), rtol=tolerance, atol=tolerance)


def golden(name: str, strength: float = 1.0) -> tuple[Adapter, Base, dict[str, torch.Tensor]]:
    """A file of tests/data/golden: the adapter in it, its base, and that base as the trainer merges it."""
    container = open_container(DATA / "golden" / f"{name}.safetensors")
    metadata, stored = container.metadata, container.tensors
    module = "" if name.startswith("peft") else "test."
    keys = {key: item for key, item in stored.items() if not key.startswith(("base.", "expected_"))}
    start = f"expected_{strength}."
    base = {module + key[5:]: numbers(item) for key, item in stored.items() if key.startswith("base.")}
    merged = {module + key[len(start) :]: numbers(item) for key, item in stored.items() if key.startswith(start)}
    config = json.loads(metadata["adapter_config"]) if "adapter_config" in metadata else None
    index = index_from_names({key: tuple(item.shape) for key, item in base.items()})
    return read(keys, {"ss_network_args": metadata.get("kwargs", "")}, config), Base(index, base), merged


def pack(values: torch.Tensor) -> Tensor:
    """Return a stored tensor of any dtype that torch has."""
    names = {dtype: name for name, dtype in TORCH.items()}
    raw = values.detach().contiguous().flatten().view(torch.uint8)
    return Tensor(names[values.dtype], tuple(values.shape), bytes(raw.tolist()))
