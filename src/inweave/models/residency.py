"""Whether a model fits on a device whole, for generating: `offload = "auto"` streams its blocks otherwise.

    needed = weights + memory to decode one image of the model's own size + RESERVE      on the meta device
    free   = of the device, after torch's allocator has given back what it holds unused

Decoding needs the most activations: features of every pixel. A GPU alone has memory of its own; nothing is streamed
to others.
"""

from __future__ import annotations

import gc
from typing import Literal, get_args

import torch

from inweave.errors import ConfigError
from inweave.models import vae
from inweave.models.blank import blank
from inweave.models.blueprint import Blueprint
from inweave.models.offload import weight_bytes
from inweave.ops.quantized import FORMATS
from inweave.ops.tensors.device import choose_device, choose_dtype
from inweave.ops.tensors.peak import peak_bytes

#: where weights are between two uses: on the device, or in host memory
Offload = Literal["off", "auto", "blocks"]
#: workspaces of cuBLAS and cuDNN, activations of a step beside those of decoding, adapters
RESERVE = 1 << 30


def is_offloaded(
    offload: Offload,
    blueprint: Blueprint,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    quantized: str,
) -> bool:
    """Return whether a model is to be loaded with `offload`; the others are arguments of `load_model`.

    Raises:
        ConfigError: ``offload`` is not one of the setting's values, or this machine does not have the device.
    """
    if offload not in get_args(Offload):
        raise ConfigError(f"offload: expected {', '.join(get_args(Offload))}, got {offload!r}")
    if offload != "auto":
        return offload == "blocks"
    target = choose_device(device)
    return not fits(blueprint, target, choose_dtype(dtype, target), quantized)


def needed_bytes(blueprint: Blueprint, dtype: torch.dtype, quantized: str) -> int:
    """Return the device memory that generating takes with all weights there; nothing is read."""
    from inweave.models.quantization import quantize_layers  # needs `inweave.layers`

    model = blank(blueprint, dtype, quantized=quantized == "keep")
    if quantized in FORMATS:
        quantize_layers(model.denoiser, quantized, torch.device("meta"))
    shape = model.latent_space.shape(model.size, model.size)
    latents = torch.empty(shape, dtype=dtype, device="meta")
    with torch.no_grad():
        decoding = peak_bytes(lambda: vae.decode(model.vae, latents), [model.vae])
    return sum(map(weight_bytes, model.networks.values())) + decoding + RESERVE


def fits(blueprint: Blueprint, device: torch.device, dtype: torch.dtype, quantized: str) -> bool:
    """Return whether a model can be on the device whole, besides what is there now."""
    if device.type != "cuda":
        return True
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return needed_bytes(blueprint, dtype, quantized) <= free
