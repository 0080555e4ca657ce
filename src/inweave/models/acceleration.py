"""What makes the networks of a model faster on a GPU, before adapters are placed in them.

    denoiser        fused blocks; one product for queries, keys and values; calls recorded (`models.recorded`)
    autoencoder     fused norms on channels-last memory

Weights of the denoiser keep their names, shapes and layout, and nothing moves afterwards: adapters are merged in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from inweave.adapter.components import FOLDERS
from inweave.models.recorded import Pool, RecordedDenoiser
from inweave.ops.tensors.graphs import GraphPool

#: whether calls of the denoiser are recorded in CUDA graphs
Graph = Literal["auto", "off"]


def accelerate(networks: Mapping[str, nn.Module], denoiser: str) -> None:
    """Fuse the blocks of networks in place, on a device with kernels for it (`has_kernels`)."""
    from inweave.models.fused.blocks import fuse_blocks  # imports diffusers' networks, for seconds
    from inweave.models.siblings import join_siblings

    fuse_blocks(networks[denoiser], in_place=True)
    join_siblings(networks[denoiser])
    fuse_blocks(networks["vae"])


def record_calls(model: Any, pool: Pool | None = None) -> None:
    """Let a model's denoiser be recorded; ``pool``: what records, by default CUDA graphs."""
    view = weakref.ref(model)  # a circle would hold its memory until the garbage collector runs

    def denoise(latents: Tensor, t: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        own: Any = view()
        prediction: Tensor = own.family.denoise(own, latents, t, inputs)
        return prediction

    def layout(latents: Tensor) -> Hashable:
        own: Any = view()
        component = FOLDERS[own.blueprint.denoiser.folder]
        return own.row_adapters.layout(component, latents) if "row_adapters" in vars(own) else None

    pool = pool or GraphPool(model.device, errors="thread_local")
    model.recorded = RecordedDenoiser(denoise, model.denoiser, pool, layout)
