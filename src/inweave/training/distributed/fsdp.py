"""A frozen base too large for one process, sharded over all of them: FSDP2 for the base, no change for the adapters.

    base       every weight is split along its first axis, and each process holds one shard
    a block    all-gathered, forward, freed; all-gathered once more for its backward pass
    adapters   replicated on every process, in the flat buffers: sums, optimizer, checkpoints and files do not change
    quantized  a weight's numbers and scales are split alike, as they have a row for each output, and gathered as bytes;
               a block is dequantized layer by layer, as in a single process

The base is moved from host memory to the device block by block, so that no device ever holds more than its shards and
the blocks being computed. It is frozen: it has no gradients to reduce.

The adapter is the same as with a replicated base, bit for bit on the CPU; if the input of a block is also used
elsewhere (the skip connections of UNets), gradients add up in another order, and it is the same up to rounding.

A block is gathered from all processes at once, so all of them run the network equally often:

    a step       has as many micro-batches on each process, and is never split by one that ran out of memory
    validation   in rounds; a process without a batch in the last one evaluates one that does not count (`World.turns`)
    samples      all processes generate, the first one writes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from inweave.errors import ConfigError
from inweave.layers import LoraLayer
from inweave.models.model import Model
from inweave.ops.quantized import QuantizedLinear
from inweave.training.config.schema import TrainConfig
from inweave.training.distributed.world import World


def check_shard(config: TrainConfig, world: World) -> None:
    """Raise ConfigError if `shard` is set in a single process."""
    if config.shard and world.size == 1:
        raise ConfigError(
            "shard: there is only one process to hold the base; start several (inweave train --gpus 2), or leave it out"
        )


def shard_model(model: Model, trained: Mapping[str, nn.Module], world: World) -> str:
    """Shard the denoiser; the other trained networks are small, and are moved to the device as a whole."""
    model.release_weaver()
    for network in trained.values():
        if network is not model.denoiser:
            network.to(model.device)
    return shard_base(model.denoiser, world, model.device)


def shard_base(network: nn.Module, world: World, device: torch.device) -> str:
    """Leave each process its shard of every frozen weight of ``network``, on ``device``; returns a note for the log.

    Trainable parameters have to be on the device already, and do not change.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if device.type == "cuda":
        torch.cuda.set_device(device)  # fully_shard uses the current device
    mesh = init_device_mesh(device.type, (world.size,))
    for layer in _quantized_layers(network):
        layer.become_parameters()
    whole = {weight for weight in network.parameters() if weight.requires_grad or weight.ndim == 0}
    for weight in whole:
        weight.data = weight.data.to(device)
    for module in (*blocks(network), network):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    local, total = frozen_bytes(network)
    return f"shard: this process holds {local:,} of {total:,} bytes of the frozen base, one of {world.size} shards"


def blocks(network: nn.Module) -> list[nn.Module]:
    """Return the modules to gather: the smallest that the library does not split, else the items of module lists."""
    kinds = set(getattr(network, "_no_split_modules", None) or ())
    modules = [module for module in network.modules() if type(module).__name__ in kinds and module is not network]
    if not modules:
        return _list_items(network)
    outer = {id(module) for module in modules if any(inner in modules for inner in list(module.modules())[1:])}
    return [module for module in modules if id(module) not in outer]


def _list_items(network: nn.Module) -> list[nn.Module]:
    """Return the items of the outermost module lists."""
    items: list[nn.Module] = []
    for child in network.children():
        items += list(child) if isinstance(child, nn.ModuleList) else _list_items(child)
    return items


def _quantized_layers(network: nn.Module) -> Iterator[QuantizedLinear]:
    for module in network.modules():
        base = module.base if isinstance(module, LoraLayer) else module
        if isinstance(base, QuantizedLinear):
            yield base


def frozen_bytes(network: nn.Module) -> tuple[int, int]:
    """Return (bytes that this process holds, bytes of the whole base)."""
    whole, storages = 0, dict[int, int]()  # layers that were quantized as one matrix share its memory
    weight: Any
    tensors = {id(tensor): tensor for layer in _quantized_layers(network) for tensor in layer.stored_tensors}
    tensors |= {id(weight): weight for weight in network.parameters()}
    for weight in tensors.values():
        if not weight.requires_grad:
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
            whole += weight.numel() * weight.element_size()
    return sum(storages.values()), whole
