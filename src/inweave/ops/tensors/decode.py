"""Stored bytes to torch tensors and back: the only place where an adapter's tensor becomes a torch tensor.

    decode   bytes --view--> stored dtype --device--> --float32, if 8-bit float--> requested dtype
    encode   the bits of a torch tensor, in its own dtype

Nothing is copied if the stored dtype is the requested one, the buffer is writable and its address is aligned. A
read-only buffer (`bytes`, a file mapped with ACCESS_READ) is copied once: torch has no read-only tensors, and a write
to one would end the process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from inweave.adapter.tensor import Tensor
from inweave.errors import FormatError, TargetError
from inweave.ops.tensors.subclasses import class_of, holds_others, is_sharded, whole

#: `decode` with a fixed dtype and device
Reader = Callable[[Tensor], torch.Tensor]

TORCH: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "C64": torch.complex64,
}  # fmt: skip
#: the names of dtypes in files
DTYPE_NAMES = {dtype: name for name, dtype in TORCH.items()}


def decode(
    tensor: Tensor, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return ``tensor`` in ``dtype`` on ``device`` (the CPU by default)."""
    stored = _stored(tensor)
    if stored.is_complex() and not dtype.is_complex:
        raise FormatError(f"a {tensor.dtype} tensor of shape {tensor.shape} cannot be read as {dtype}")
    if device is not None:
        stored = stored.to(device)
    if tensor.dtype.startswith("F8") and stored.dtype != dtype:
        stored = stored.to(torch.float32)
    return stored.to(dtype)


def encode(tensor: torch.Tensor) -> Tensor:
    """Return the bits of ``tensor``, copied to the host; those of all processes for a sharded one.

    Raises:
        TargetError: it has no numbers (the meta device), or is quantized.
    """
    if tensor.is_meta:
        raise TargetError("on the meta device, so it has no numbers; load them first")
    if holds_others(tensor) and not is_sharded(tensor):
        raise TargetError(f"stored as {class_of(tensor)}, whose numbers are not those that were trained")
    host = whole(tensor.detach()).cpu().contiguous()
    return Tensor(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), host.flatten().view(torch.uint8).numpy().tobytes())


def _stored(tensor: Tensor) -> torch.Tensor:
    """Return the bytes unchanged, in their own dtype."""
    if tensor.dtype not in TORCH:
        raise FormatError(f"dtype {tensor.dtype} is not supported; supported are {', '.join(TORCH)}")
    data, dtype = memoryview(tensor.data), TORCH[tensor.dtype]
    expected = tensor.numel * tensor.itemsize
    if data.nbytes != expected:
        raise FormatError(
            f"a {tensor.dtype} tensor of shape {tensor.shape} must have {expected} bytes, got {data.nbytes}"
        )
    if expected == 0:
        return torch.empty(tensor.shape, dtype=dtype)
    raw = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
    if raw.data_ptr() % tensor.itemsize:
        raw = raw.clone()
    return raw.view(dtype).reshape(tensor.shape)
