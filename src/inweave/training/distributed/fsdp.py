"""A frozen base too large for one process, spread over all of them: FSDP2 for the base, nothing new for the adapters.

    base       every weight is cut along its first axis, and each process holds one piece
    a block    gathered, forward, let go; gathered once more for its backward pass
    adapters   whole on every process, in the flat buffers: sums, optimizer, checkpoints and files know of nothing

The base comes from the host's memory and goes to the device block by block, so that no device ever holds more than its
pieces and the blocks at work. It is frozen: no gradient of it is made, added up or cut.

The adapter is that of processes that hold the whole base, bit for bit on the CPU; where what goes into a block is also
used beside it (the skip connections of UNets), gradients add up in another order, and it is the same up to rounding.

A block is gathered from all processes at once, so all of them go through the network equally often:

    a step       as many micro-batches everywhere, never cut in pieces by one process that ran out of memory
    validation   in rounds; who has no batch left in the last one judges one that does not count (`World.turns`)
    samples      all processes draw, the first one writes
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from inweave.errors import ConfigError
from inweave.models.model import Model
from inweave.training.config.schema import TrainConfig
from inweave.training.distributed.world import World
from inweave.weights.weaver import Weaver


def check_shard(config: TrainConfig, world: World) -> None:
    """Refuse what would otherwise show on a full device."""
    if config.shard and world.size == 1:
        raise ConfigError(
            "shard: there is one process, and nobody to share the base with; start several (inweave train --gpus 2), "
            "or leave shard out"
        )


def shard_model(model: Model, trained: Mapping[str, nn.Module], world: World) -> str:
    """`shard_base` of the denoiser; what else learns is small, and goes to the device whole."""
    model.weaver = Weaver({})  # the one it was made with holds every weight, and in training nothing is woven
    for network in trained.values():
        if network is not model.denoiser:
            network.to(model.device)
    return shard_base(model.denoiser, world, model.device)


def shard_base(network: nn.Module, world: World, device: torch.device) -> str:
    """Leave each process its piece of every frozen weight of ``network``, on ``device``; returns what to say about it.

    Parameters that learn have to be on the device already, and stay as they are.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if device.type == "cuda":
        torch.cuda.set_device(device)  # fully_shard takes the current one
    mesh = init_device_mesh(device.type, (world.size,))
    whole = {weight for weight in network.parameters() if weight.requires_grad or weight.ndim == 0}
    for weight in whole:
        weight.data = weight.data.to(device)
    for module in (*blocks(network), network):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    held, all_of_it = frozen_bytes(network)
    return f"shard: this process holds {held:,} of {all_of_it:,} bytes of the frozen base, one of {world.size} pieces"


def blocks(network: nn.Module) -> list[nn.Module]:
    """What is gathered at once: the smallest modules the library does not split, else what its outermost lists hold."""
    kinds = set(getattr(network, "_no_split_modules", None) or ())
    found = [module for module in network.modules() if type(module).__name__ in kinds and module is not network]
    if not found:
        return _listed(network)
    outer = {id(module) for module in found if any(inner in found for inner in list(module.modules())[1:])}
    return [module for module in found if id(module) not in outer]


def _listed(network: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in network.children():
        found += list(child) if isinstance(child, nn.ModuleList) else _listed(child)
    return found


def frozen_bytes(network: nn.Module) -> tuple[int, int]:
    """(those this process holds, those of the whole base)."""
    held = whole = 0
    weight: Any
    for weight in network.parameters():
        if not weight.requires_grad:
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            held += local.untyped_storage().nbytes()
            whole += weight.numel() * weight.element_size()
    return held, whole
