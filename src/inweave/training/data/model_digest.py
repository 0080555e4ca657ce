"""Which encoders these are: what is cached of their answers belongs to them alone."""

from __future__ import annotations

import hashlib
import json

import torch

from inweave.models.blueprint import ENCODERS
from inweave.models.model import Model

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: of a configuration: where it was read and who wrote it
_TELLS_NOTHING = ("architectures", "dtype", "torch_dtype", "transformers_version", "model_type")


def bits_of(value: torch.Tensor) -> torch.Tensor:
    """A tensor's numbers as whole numbers, in a row."""
    return value.detach().contiguous().flatten().view(_BITS[value.itemsize])


def some_of(bits: torch.Tensor) -> list[int]:
    """About 64 of them, from all over: enough to tell two models apart, and read in no time."""
    found: list[int] = bits[:: max(bits.numel() // 64, 1)].tolist()
    return found


def identity(model: Model) -> dict[str, str]:
    """What decides the numbers of encoders: how they are configured, the sum of all their bits, and some of them."""
    found = {}
    for name, folders in (("vae", ("vae",)), ("text", ENCODERS)):
        digest = hashlib.sha256()
        for folder in folders:
            if folder not in model.networks:
                continue
            part = model.blueprint.parts[folder]
            said = {k: v for k, v in part.config.items() if not k.startswith("_") and k not in _TELLS_NOTHING}
            digest.update(f"{part.class_name} {json.dumps(said, sort_keys=True, default=str)}".encode())
            for key, value in model.networks[folder].state_dict().items():
                bits = bits_of(value)
                total = int(bits.sum(dtype=torch.int64))
                told = (folder, key, value.dtype, tuple(value.shape), total, some_of(bits))
                digest.update(str(told).encode())
        found[name] = digest.hexdigest()
    return found
