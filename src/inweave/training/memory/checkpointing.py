"""Gradient checkpointing: recompute activations in the backward pass instead of storing them.

off         every activation is stored
selective   products with frozen weights and attention are stored, including a LoRA computed in the same operation;
            cheap operations, the adapters' own products included, are recomputed, and so is the widening product of
            a feed-forward part, whose result is the largest activation of a block
full        only the inputs of blocks are stored, everything inside is recomputed

The libraries' own switches are used. diffusers accepts the checkpointing function. transformers checkpoints a layer
only in training mode, which would also enable the dropout of the base: only the layer itself is put into training mode,
and back into evaluation mode while it computes.

The inputs of blocks can be in host memory meanwhile (`inweave.weights.streaming.activations`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from inweave.ops.common.transient import is_transient
from inweave.weights.streaming.activations import HostActivations

#: operation that selective checkpointing stores -> the index of its weight, if it has one
_STORED = {
    "mm": 1, "addmm": 2, "fp8_linear": 1, "fp8_product": 2, "quantized_linear": 1, "lora_linear": 1,
    "bmm": None, "baddbmm": None, "convolution": 1, "quantized_conv2d": None,
    "_scaled_dot_product_flash_attention": None, "_scaled_dot_product_efficient_attention": None,
    "_scaled_dot_product_cudnn_attention": None,
    "_scaled_dot_product_flash_attention_for_cpu": None, "attention": None,
}  # fmt: skip

#: operators whose weight is (out, in), or packed in rows of one output, and whose first argument is the input
_OUTPUTS_FIRST = ("lora_linear", "fp8_linear", "fp8_product", "quantized_linear")

#: columns of a feed-forward part for each of its inputs: 4, or 8 with a gate
_WIDENING = 4


def supports_checkpointing(network: nn.Module) -> bool:
    """Return whether a network can recompute its blocks."""
    return bool(getattr(network, "_supports_gradient_checkpointing", True))  # an attribute of diffusers


def apply_checkpointing(
    networks: Mapping[str, nn.Module],
    mode: str,
    recompute_in: Callable[[], AbstractContextManager[Any]] | None = None,
    *,
    random: bool = True,
    activations: HostActivations | None = None,
) -> None:
    """Enable gradient checkpointing in every network that supports it; the dropout of the base does not change.

    ``random``: whether a block reads torch's generator, whose state is then kept for the recomputation.
    ``activations``: what holds the inputs of blocks in host memory; None: they stay on the device.
    ``recompute_in``: a context for recomputations, which run inside of autograd, where function modes are not active.
    """
    if mode == "off":
        return
    recompute: Any = partial(checkpoint, use_reentrant=False, preserve_rng_state=random)
    if mode == "selective" or recompute_in is not None:
        recompute = partial(recompute, context_fn=partial(_contexts, mode, recompute_in or nullcontext))
    if activations is not None:
        recompute = activations.around(recompute)
    network: Any
    for network in networks.values():
        if not supports_checkpointing(network):
            continue
        if activations is not None:
            activations.watch(network)
        if hasattr(network, "enable_gradient_checkpointing"):
            network.enable_gradient_checkpointing(recompute)
            continue
        layer: Any
        for layer in network.modules():
            if any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(layer).__mro__):
                layer._gradient_checkpointing_func = _layer_checkpoint(layer, recompute)
                layer.gradient_checkpointing = layer.training = True


def _contexts(
    mode: str, recompute_in: Callable[[], AbstractContextManager[Any]]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a block's forward pass and of its recomputation."""
    forward, recompute = (
        create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
        if mode == "selective"
        else (nullcontext(), nullcontext())
    )
    return forward, _both(recompute, recompute_in())


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


def _layer_checkpoint(layer: nn.Module, recompute: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function a transformers layer calls with its forward pass and its positional arguments."""

    def call(forward: Callable[..., Any], *arguments: Any) -> Any:
        def evaluate(*inputs: Any) -> Any:
            layer.training = False
            try:
                return forward(*inputs)
            finally:
                layer.training = True

        if not torch.is_grad_enabled():
            return evaluate(*arguments)
        # a key-value cache has no use in training, and the recomputation would append to it again
        return recompute(evaluate, *(None if hasattr(value, "get_seq_length") else value for value in arguments))

    return call


def _policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    if is_transient():
        return CheckpointPolicy.PREFER_RECOMPUTE
    name = operation.__name__.partition(".")[0] if hasattr(operation, "__name__") else str(operation)
    weight = _STORED.get(name)
    # a trainable weight is of low rank: its product is cheap, and as large as the sum it is part of
    cheap = weight is not None and (arguments[weight].requires_grad or _widens(name, arguments[0], arguments[weight]))
    return CheckpointPolicy.MUST_SAVE if name in _STORED and not cheap else CheckpointPolicy.PREFER_RECOMPUTE


def _widens(name: str, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether a product's result has many times the columns of its input.

    Such results are half of SDXL's stored activations, and computing them takes a ninth of a step's operations.
    """
    if weight.dim() != 2:
        return False
    out, into = (weight.shape[0], x.shape[-1]) if name in _OUTPUTS_FIRST else weight.shape[::-1]
    return out >= _WIDENING * into
