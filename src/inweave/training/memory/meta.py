"""The activation memory of a step, measured without allocating it: the model's own networks run on the meta device.

blueprint ──networks without weights──► adapters ──one example forward (and backward)──► peak memory, operations
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from inweave.layers import LoraLayer, lora_layers
from inweave.layers.norms import NormLayer
from inweave.layers.qat import QuantizationAware
from inweave.models import vae
from inweave.models.blank import blank
from inweave.models.blueprint import Blueprint
from inweave.models.families.base import ENCODERS
from inweave.models.families.references import reference_tensors
from inweave.models.model import Model
from inweave.models.quantization import quantize_layers, quantized_names
from inweave.ops.quantized import QuantizedLayer
from inweave.ops.tensors.peak import peak_bytes
from inweave.ops.tensors.work import WorkCounter
from inweave.training.adapters.attach import attach_adapters
from inweave.training.adapters.targets import DENOISER, trained_networks
from inweave.training.config.schema import TrainConfig
from inweave.weights.streaming.stream import listed_blocks

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes; ``activations``: of one example, at the peak; ``encoding``: of one image in the VAE.

    ``operations``: additions and multiplications in the forward pass of one example; ``launches``: its operations that
    make a tensor; ``scores``: the distinct numbers of attention scores (heads * queries * keys) of one example;
    ``scratch``: in which the largest quantized weight is dequantized, or the largest trained one rounded;
    ``quantized``: the parameters of all quantized weights; ``inputs``: of blocks, of one example, in host memory;
    ``blocks``: the bytes of each block, in their order, of networks whose blocks may be streamed.
    """

    weights: Mapping[str, int]
    parameters: int
    activations: int
    encoding: int
    operations: int = 0
    launches: int = 0
    scores: frozenset[int] = frozenset()
    scratch: int = 0
    quantized: int = 0
    inputs: int = 0
    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def measure(
    blueprint: Blueprint,
    config: TrainConfig,
    dtype: torch.dtype,
    checkpoint: Callable[[Mapping[str, nn.Module]], None],
    *,
    backward: bool,
    chunks: int = 1,
    fused: bool = False,
    known: Measured | None = None,
    references: tuple[tuple[int, int], ...] = (),
) -> Measured:
    """Run one example forward; ``backward``: and backward, which adds memory only if activations are recomputed.

    ``chunks``: the text encoder's chunks of a caption. ``fused``: with the blocks that train on a GPU. ``known``: the
    same with other checkpointing, whose operations and encoding are the same. ``references``: sizes of its references.
    """
    model, stored = _stored(blueprint, config.quantize, dtype)
    trained = trained_networks(model, config)
    parameters = _attach(trained, config, checkpoint)
    scratch = stored.scratch
    if config.qat != "off":
        scratch = max(scratch, _rounding(trained[DENOISER], config.qat, dtype))
    if fused:
        from inweave.models.fused.blocks import fuse_blocks  # imports diffusers' networks

        for network in trained.values():
            fuse_blocks(network)
    side = (config.side or model.size) // model.patch * model.patch
    everything = list(model.networks.values())
    counter = WorkCounter() if known is None else None
    step = partial(_step, model, config, (side, chunks), counter, backward=backward, references=references)
    activations = peak_bytes(step, everything)
    if known is not None:
        return replace(
            known, weights=stored.weights, parameters=parameters, activations=activations, scratch=scratch,
            quantized=stored.quantized, blocks=stored.blocks,
        )  # fmt: skip
    assert counter is not None
    encoding = peak_bytes(lambda: _encode(model, side), everything)
    return replace(
        stored, parameters=parameters, activations=activations, encoding=encoding, operations=counter.operations,
        launches=counter.launches, scores=frozenset(counter.scores), scratch=scratch,
    )  # fmt: skip


def stored_bytes(blueprint: Blueprint, format: str, dtype: torch.dtype) -> Measured:
    """Return the bytes of a model's weights with the denoiser in this format; nothing is run."""
    return _stored(blueprint, format, dtype)[1]


def with_weights(measured: Measured, stored: Measured) -> Measured:
    """Return a measurement as it would be with other weights, of a format whose activations are the same."""
    fields = ("weights", "scratch", "quantized", "blocks")
    return replace(measured, **{name: getattr(stored, name) for name in fields})


def _stored(blueprint: Blueprint, format: str, dtype: torch.dtype) -> tuple[Model, Measured]:
    """Return a model without weights, its denoiser quantized, and the bytes of its weights."""
    model = blank(blueprint, dtype, quantized=format == "keep")
    if format not in ("off", "keep"):
        quantize_layers(model.denoiser, format, _META)
    scratch = max(map(_scratch, model.networks.values()))
    quantized = _quantized_parameters(model.denoiser)
    blocks = {
        folder: tuple(map(_bytes, model.family.blocks(network)))
        for folder, network in model.networks.items()
        if folder in (*ENCODERS, blueprint.denoiser.folder)
    }
    weights = {folder: _bytes(network) for folder, network in model.networks.items()}
    return model, Measured(weights, 0, 0, 0, scratch=scratch, quantized=quantized, blocks=blocks)


def measure_network(
    network: nn.Module,
    config: TrainConfig,
    checkpoint: Callable[[Mapping[str, nn.Module]], None],
    loss: Callable[[], torch.Tensor],
) -> Measured:
    """Measure one network on the meta device with the loss of one example, forward and backward.

    In a language model the gradient of the logits is the peak of a step.
    """
    weights = {"model": _bytes(network)}
    blocks = {"model": tuple(map(_bytes, listed_blocks(network)))}
    parameters = _attach({"model": network}, config, checkpoint)
    counter = WorkCounter()

    def step() -> None:
        with counter:
            value = loss()
        torch.autograd.backward(value)

    peak = peak_bytes(step, [network])
    return Measured(
        weights, parameters, peak, 0, counter.operations, counter.launches, frozenset(counter.scores), blocks=blocks
    )


def _bytes(network: nn.Module) -> int:
    quantized = (module for module in network.modules() if isinstance(module, QuantizedLayer))
    packed = sum(tensor.nbytes for module in quantized for tensor in module.quantized)
    return packed + sum(parameter.nbytes for parameter in network.parameters())


def _quantized_parameters(network: nn.Module) -> int:
    return sum(math.prod(module.shape) for module in network.modules() if isinstance(module, QuantizedLayer))


def _scratch(network: nn.Module) -> int:
    """Return the bytes in which the largest quantized weight is dequantized."""
    layers = (module for module in network.modules() if isinstance(module, QuantizedLayer))
    sizes = (int(math.prod(each.shape) * each.scratch_per_parameter) for each in layers)
    return max(sizes, default=0)


def _rounding(denoiser: nn.Module, format: str, dtype: torch.dtype) -> int:
    """Return the bytes in which the largest trained weight is rounded (`qat`)."""
    names = quantized_names(denoiser, format)
    layers = [layer for name, layer in lora_layers(denoiser).items() if name in names and isinstance(layer, LoraLayer)]
    largest = max(layers, key=lambda layer: layer.geometry.out * layer.geometry.columns, default=None)
    if largest is None:
        return 0
    operation = QuantizationAware(largest, format)
    return peak_bytes(lambda: operation.weight(largest.acting, dtype), [denoiser])


def _attach(
    networks: Mapping[str, nn.Module], config: TrainConfig, checkpoint: Callable[[Mapping[str, nn.Module]], None]
) -> int:
    """Attach the adapters; returns the number of trainable parameters."""
    dora = config.network == "dora"  # it would read weights, which do not exist: magnitudes are added afterwards
    changes = {"start_from": None, "qat": "off"} | ({"network": "lora"} if dora else {})
    settings = config.model_copy(update=changes, check=False)
    attach_adapters(networks, settings)
    for network in networks.values():
        _finish(network, dora=dora)
    checkpoint(networks)
    return sum(p.numel() for network in networks.values() for p in network.parameters() if p.requires_grad)


def _finish(network: nn.Module, *, dora: bool) -> None:
    """Move adapters to the meta device too, with gradients, which a run allocates before its first step."""
    network._apply(lambda tensor: tensor.to(_META))  # type: ignore[no-untyped-call]
    for layer in lora_layers(network).values():
        for term in layer.adapters.values():
            if dora and not isinstance(layer, NormLayer):
                term.magnitude = nn.Parameter(torch.empty(layer.out, device=_META))
            for parameter in term.parameters():
                parameter.grad = torch.empty_like(parameter)


@torch.no_grad()
def _encode(model: Model, side: int) -> None:
    vae.encode_distribution(model.vae, torch.empty(1, 3, side, side, dtype=model.vae.dtype, device=_META))


def _step(
    model: Model,
    config: TrainConfig,
    sizes: tuple[int, int],
    counter: WorkCounter | None,
    *,
    backward: bool,
    references: tuple[tuple[int, int], ...] = (),
) -> None:
    side, chunks = sizes
    family = model.family
    latents = torch.empty(model.latent_space.shape(side, side), dtype=model.dtype, device=_META)
    with torch.set_grad_enabled(config.train_text_encoders):
        text = family.encode(model, family.example_ids(model, chunks, _META), config.clip_skip)
    shapes = (model.latent_space.shape(*size) for size in references)
    text |= reference_tensors([torch.empty(shape, dtype=model.dtype, device=_META) for shape in shapes])
    inputs = family.batch_inputs(model, text, torch.empty(1, 6, device=_META), latents.shape, config.guidance)
    with counter or nullcontext():
        prediction = family.denoise(model, latents, torch.empty(1, device=_META), inputs)
    loss = prediction.float().square().mean()
    if backward:
        torch.autograd.backward(loss)
