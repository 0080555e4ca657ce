"""Which encoders these are: what is cached of their answers belongs to them alone."""

from __future__ import annotations

import hashlib
import json

import torch

from weft.models.blueprint import ENCODERS
from weft.models.model import Model

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: of a configuration: where it was read and who wrote it
_TELLS_NOTHING = ("architectures", "dtype", "torch_dtype", "transformers_version", "model_type")


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
                bits = value.detach().contiguous().flatten().view(_BITS[value.itemsize])
                some = bits[:: max(bits.numel() // 64, 1)].tolist()
                told = (folder, key, value.dtype, tuple(value.shape), int(bits.sum(dtype=torch.int64)), some)
                digest.update(str(told).encode())
        found[name] = digest.hexdigest()
    return found
