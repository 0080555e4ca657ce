"""Digests of networks: whether two of them hold the same weights, to the last bit.

Every byte of every tensor is hashed with BLAKE2b, in threads, since it runs without Python's lock: at least 0.7 GB/s on
a core, so a base of 24 GB takes a few seconds on 16 cores, and the time to copy it to the host if it is on a GPU.
`sampled_digest` is what earlier versions compared.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from inweave.models.families.base import ENCODERS
from inweave.models.model import Model

Digests = dict[str, str]  # of tensors, by name
_PIECE = 1 << 24  # values that are copied from a GPU at a time
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
#: keys of a component's configuration that do not affect its outputs
_IRRELEVANT = ("architectures", "dtype", "torch_dtype", "transformers_version", "model_type")


def network_digests(network: nn.Module) -> Digests:
    """Return a digest of every tensor of a network: of its type, its shape and all of its values."""
    tensors = network.state_dict()
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return dict(zip(tensors, pool.map(tensor_digest, tensors.values()), strict=True))


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return a digest of one tensor: of its type, its shape and all of its values."""
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} ".encode(), digest_size=16)
    bits = _bits(tensor)
    for start in range(0, bits.numel(), _PIECE):
        digest.update(bits[start : start + _PIECE].cpu().numpy().data)
    return digest.hexdigest()


def base_digests(networks: Mapping[str, nn.Module], known: Mapping[str, Digests] | None = None) -> Digests:
    """Return the digests of all tensors of a base, before adapters are attached; ``known``: of some networks."""
    digests: Digests = {}
    for folder, network in sorted(networks.items()):
        hashed = (known or {}).get(folder) or network_digests(network)
        digests |= {f"{folder}: {name}": digest for name, digest in hashed.items()}
    return digests


def encoder_digests(model: Model, digests: Mapping[str, Digests]) -> dict[str, str]:
    """Return digests of the VAE and of the text encoders: of their configuration and their weights."""
    identities = {}
    for name, folders in (("vae", ("vae",)), ("text", ENCODERS)):
        rows = []
        for folder in folders:
            if folder not in model.networks:
                continue
            part = model.blueprint.parts[folder]
            config = {k: v for k, v in part.config.items() if not k.startswith("_") and k not in _IRRELEVANT}
            rows.append([folder, part.class_name, config, digests[folder]])
        identities[name] = hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()
    return identities


def sampled_digest(networks: Mapping[str, nn.Module], known: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return a digest of about 64 values of each tensor, as checkpoints of earlier versions have it.

    ``known``: the samples of networks whose weights are not there any more, in the order of their state dict.
    """
    digest = hashlib.sha256()
    for folder, network in sorted(networks.items()):
        samples = (known or {}).get(folder)
        if samples is None:
            samples = [sample_of(folder, key, value) for key, value in network.state_dict().items()]
        for sample in samples:
            digest.update(sample.encode())
    return digest.hexdigest()


def sample_of(folder: str, name: str, tensor: torch.Tensor) -> str:
    """Return about 64 values of a tensor of a network, with its name, type and shape."""
    bits = _bits(tensor)
    sample: list[int] = bits[:: max(bits.numel() // 64, 1)].tolist()
    return str((folder, name, str(tensor.dtype), tuple(tensor.shape), sample))


def _bits(value: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as a row of integers."""
    return value.detach().contiguous().flatten().view(_INTEGERS[value.itemsize])
