"""Packed weights of safetensors files: which stored tensors make up a weight, by names, dtypes and small texts.

    scaled     F8 or I8 [out, in], beside `weight_scale` or `scale_weight` (ComfyUI) or `weight_scale_inv`: one scale,
               one per row, or one per block of 128; `scale_input` and `input_scale` are those of activations
    bnb int8   I8 [out, in] beside `SCB` [out], the largest numbers of the rows
    bnb 4 bit  U8 [n, 1], two codes in a byte, beside absmax, quant_map and a JSON text (quant_state): nf4 or fp4

What cannot be unpacked is `refused` with its name, but has the shape of the model's weight: nvfp4 (two values in a
byte), mxfp8, and whatever else a `comfy_quant` text names. A plain F8 weight needs nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from inweave.errors import FormatError

Shape = tuple[int, ...]
STATE = ".quant_state.bitsandbytes__"
LONGEST_STATE = 4096
BLOCK = 128  # of both sides, for `weight_scale_inv`
_LARGEST_BLOCK = 1 << 20  # of bitsandbytes; its own are 64 to 4096
_MOST_AXES = 8
_BNB = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_SCALES = ("weight_scale", "scale_weight", "weight_scale_inv")
_IGNORED = (".scale_input", ".input_scale", ".comfy_quant", ".weight_format", ".weight_scale_2")
_KNOWN = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise", "int8_rowwise")
_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}


class Stored(Protocol):
    """What a header says of a tensor."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> Shape: ...


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight. ``parts``: role -> stored tensor; ``state``: of bitsandbytes; ``refused``: what cannot be unpacked."""

    kind: str
    shape: Shape
    dtype: str
    parts: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Packing:
    """The packed weights of a file, and the tensors that only accompany them."""

    weights: Mapping[str, Packed]
    companions: frozenset[str]


def packing_of(tensors: Mapping[str, Stored], read: Callable[[str], bytes]) -> Packing:
    """Find the packed weights; ``read`` returns the bytes of a small tensor. Raise FormatError for a broken state."""
    weights: dict[str, Packed] = {}
    companions: set[str] = set()
    for name, stored in tensors.items():
        if name.endswith((*_BNB, *_IGNORED, "scaled_fp8")) or STATE in name:
            companions.add(name)
        module, dot, leaf = name.rpartition(".")
        if (leaf in _SCALES or leaf == "SCB") and f"{module}{dot}weight" in tensors:
            companions.add(name)
        if leaf == "weight":
            packed = _packed(name, stored, tensors, read)
            if packed is not None:
                weights[name] = packed
    return Packing(weights, frozenset(companions))


def _packed(name: str, stored: Stored, tensors: Mapping[str, Stored], read: Callable[[str], bytes]) -> Packed | None:
    module = name.removesuffix("weight")
    for kind in ("nf4", "fp4"):
        if f"{name}{STATE}{kind}" in tensors:
            return _bnb(name, kind, stored, tensors, read(f"{name}{STATE}{kind}"))
    if stored.dtype == "I8" and f"{module}SCB" in tensors:
        return Packed("bitsandbytes int8", stored.shape, "F16", {"numbers": name, "scales": f"{module}SCB"})
    scale = next((f"{module}{leaf}" for leaf in _SCALES if f"{module}{leaf}" in tensors), None)
    if stored.dtype == "U8" and scale is not None and f"{module}weight_scale_2" in tensors:
        shape = (stored.shape[0], stored.shape[1] * 2) if len(stored.shape) == 2 else stored.shape
        return Packed("nvfp4", shape, "BF16", refused="nvfp4")
    if (declared := _comfy_format(module, tensors, read)) not in ("", *_KNOWN):
        return Packed(declared, stored.shape, "BF16", refused=declared)
    if scale is None or not (stored.dtype.startswith("F8_E") or stored.dtype == "I8"):
        return None
    kind = f"scaled {stored.dtype}"
    if tensors[scale].dtype in ("U8", "F8_E8M0"):
        return Packed("mxfp8", stored.shape, "BF16", refused="mxfp8")
    if not _fits(tensors[scale].shape, stored.shape):
        reason = f"{stored.dtype} with scales {list(tensors[scale].shape)}"
        return Packed(kind, stored.shape, "BF16", refused=reason)
    return Packed(kind, stored.shape, "BF16", {"numbers": name, "scales": scale})


def _fits(scale: Shape, weight: Shape) -> bool:
    """Return whether there is one scale, one per row, or one per block."""
    rows = weight[0] if weight else 1
    per_row = ((rows,), (rows, 1), (rows, *[1] * (len(weight) - 1)))
    return math.prod(scale) == 1 or scale in (*per_row, blocks_of(weight))


def blocks_of(weight: Shape) -> Shape:
    """Return the numbers of blocks along the axes of a weight: the shape of their scales."""
    return tuple(-(-side // BLOCK) for side in weight)


def _comfy_format(module: str, tensors: Mapping[str, Stored], read: Callable[[str], bytes]) -> str:
    """Return the format that ComfyUI's text about a layer names, "" without one."""
    name = f"{module}comfy_quant"
    if name not in tensors:
        return ""
    try:
        document = json.loads(read(name))
        rotated = bool(document.get("convrot")) or "hadamard" in document
        return f"{document['format']}{' with rotated inputs (convrot)' if rotated else ''}"[:80]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "a comfy_quant text that is not ComfyUI's JSON"


def _bnb(name: str, kind: str, stored: Stored, tensors: Mapping[str, Stored], text: bytes) -> Packed:
    try:
        state = json.loads(text)
        shape = tuple(int(size) for size in state["shape"])
        block, nested = int(state.get("blocksize", 64)), "nested_blocksize" in state
        dtype = _DTYPES.get(state.get("dtype", ""), "BF16")
        offset = float(state.get("nested_offset", 0.0)) if nested else 0.0
        nested_block = int(state["nested_blocksize"]) if nested else 0
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        raise FormatError(f"{name}: the quantization state of a weight is not bitsandbytes' JSON") from None
    if not 1 <= block <= _LARGEST_BLOCK or (nested and not 1 <= nested_block <= _LARGEST_BLOCK):
        raise FormatError(f"{name}: blocks of {block} numbers and {nested_block} scales, not 1 to {_LARGEST_BLOCK:,}")
    if not math.isfinite(offset):
        raise FormatError(f"{name}: its nested_offset is {offset}, not a finite number")
    if len(shape) > _MOST_AXES:
        raise FormatError(f"{name}: a weight of {len(shape)} axes, not at most {_MOST_AXES}")
    if any(size < 1 for size in shape) or (math.prod(shape) + 1) // 2 != math.prod(stored.shape):
        raise FormatError(f"{name}: a weight of {list(shape)} cannot be packed into {list(stored.shape)} bytes")
    parts = {suffix[1:]: f"{name}{suffix}" for suffix in _BNB if f"{name}{suffix}" in tensors}
    settings = {"block": block, "nested_block": nested_block, "offset": offset}
    needed = {"absmax", "quant_map"} | ({"nested_absmax", "nested_quant_map"} if nested else set())
    missing = sorted(needed - parts.keys())
    refused = f"bitsandbytes {kind} without {missing[0]}" if missing else ""
    return Packed(f"bitsandbytes {kind}", shape, dtype, {"numbers": name, **parts}, settings, refused)
