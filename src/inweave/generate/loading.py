"""Loading a model for generating: where its weights are (`--offload`), and the cache of quantized bases.

A denoiser that is quantized here is written to ~/.cache/inweave/quantized, and read from there the next time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

from torch import nn

from inweave.errors import ConfigError
from inweave.models.acceleration import Graph, record_calls
from inweave.models.blueprint import Blueprint
from inweave.models.model import Model, Quantize, load_model
from inweave.models.quantized_cache import QuantizedCache
from inweave.models.residency import Offload, is_offloaded
from inweave.models.sd.selection import without_libraries
from inweave.ops.common.select import has_kernels
from inweave.ops.quantized import FORMATS
from inweave.ops.tensors.device import choose_device, choose_dtype

#: disk space for quantized bases
CACHE_GB = 32.0


def cache_folder() -> Path:
    """Return the folder of quantized bases."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inweave" / "quantized"


def load_for_images(
    blueprint: Blueprint,
    *,
    device: Any,
    dtype: Any,
    quantize: Quantize,
    offload: Offload,
    cache_gb: float,
    graph: Graph = "off",
    lora_cache_gb: float = 4.0,
    **options: Any,
) -> Model:
    """Load a model; ``cache_gb``: disk space for quantized bases, 0 for none; ``options``: others of `load_model`.

    ``graph``: "auto" records calls of the denoiser in CUDA graphs, on a GPU that holds the weights.

    Raises:
        ConfigError: ``offload``, ``graph``, ``cache_gb`` or ``lora_cache_gb`` is not one of their values.
    """
    if graph not in get_args(Graph):
        raise ConfigError(f"graph: {graph!r} is unknown; use {' or '.join(get_args(Graph))}")
    for name, size in (("quantized_cache_gb", cache_gb), ("lora_cache_gb", lora_cache_gb)):
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size < 2**20:
            raise ConfigError(f"{name}: expected gigabytes, 0 or more, got {size!r}")
    offloaded = is_offloaded(offload, blueprint, device, dtype, quantize)
    recorded = graph == "auto" and not offloaded and not blueprint.family.own_pipeline
    recorded = recorded and has_kernels(choose_device(device))
    plain = choose_device(device).type == "cpu" and quantize == "off" and not offloaded
    if plain and not blueprint.family.own_pipeline:
        blueprint = without_libraries(blueprint)
    cache, key, notes = QuantizedCache(cache_folder(), cache_gb), "", list[str]()
    if quantize in FORMATS:
        target = choose_device(device)
        key = cache.key(blueprint.denoiser, quantize, choose_dtype(dtype, target), target)
    cached = cache.find(key)

    def store(denoiser: nn.Module, note: str) -> None:
        notes.extend(filter(None, [cache.problem, cache.store(key, denoiser, note, {})]))

    model = load_model(
        blueprint, device=device, dtype=dtype, quantized=quantize, offload=offloaded, cached=cached,
        on_quantized=store, accelerated=recorded,
        lora_bytes=int(lora_cache_gb * 1024**3), **options,
    )  # fmt: skip
    if recorded:
        record_calls(model)
    if cached is not None:
        notes.append("read from the cache")
    model.quantizing = "; ".join(filter(None, [model.quantizing, *notes]))
    return model
