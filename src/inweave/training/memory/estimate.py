"""The memory of a run, and the operations of a step; their time is predicted in `inweave.training.memory.speed`.

    weights     = of the networks, in the precision, or quantized (`quantize`)
    a step      = weights + 8 bytes per trainable parameter (fp32 master weight, gradient) + optimizer state
                  + 2 bytes per trainable parameter on a GPU, for its copy in the model's 16-bit precision
                  + batch size * activation memory of one example
                  + with `quantize`: the largest weight, dequantized; with `qat`: the largest trained one, rounded
                  + with `deterministic`, if cuDNN computes attention in a fixed order: 2 bytes per score of the largest
                  attention within `MAX_WORKSPACE`
    caching     = weights + the VAE's memory to encode one image
    total       = the larger of the two + the memory that CUDA and its libraries reserve

    staged      the networks are on the device one after the other: VAE, text encoders, then the denoiser
    streamed    of a network whose blocks are streamed (`offload`), the device holds its other tensors, the blocks that
                stay, and SLOTS times the largest of the others
    host        = all weights, if staged or streamed, + HOST; else HOST, since loading needs a few buffers
                  + with `offload_activations`: batch size * the inputs of blocks of one example

The activation memory of one example is measured on the meta device (`inweave.training.memory.meta`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from inweave.layers.fused import DEVICES
from inweave.models.blueprint import Blueprint
from inweave.models.families.base import ENCODERS
from inweave.models.model import Model
from inweave.ops.attention import MAX_WORKSPACE, frontend_version
from inweave.ops.tensors.device import DTYPES, choose_device
from inweave.ops.tensors.peak import MetaAttention
from inweave.training.config.schema import TrainConfig
from inweave.training.memory.checkpointing import apply_checkpointing
from inweave.training.memory.meta import Measured, measure, stored_bytes, with_weights
from inweave.training.memory.speed import CONVERSION, KERNELS, OTHER_CONVERSION, PASSES, PRODUCTS
from inweave.weights.streaming.activations import HostActivations
from inweave.weights.streaming.stream import SLOTS, streamed_blocks

CONTEXT = 768 << 20  # CUDA's memory outside of the allocator: context and kernels; 758 MiB on an H200
RESERVE = CONTEXT + (256 << 20)  # and inside of it: workspaces of cuBLAS and cuDNN
GIB = 1 << 30
#: host memory of the process without weights: Python, the libraries, CUDA's own (an allowance, not measured)
HOST = 3 * GIB

#: the name of a language model among networks
LANGUAGE_MODEL = "model"

#: optimizer -> bytes of its state per trained parameter; 8 for the others
_STATE_BYTES = {
    "adamw8bit": 2.03, "prodigy": 16.0, "adafactor": 4.0, "lion": 4.0, "came": 5.0, "torch.optim.SGD": 4.0,
    "torch.optim.Adagrad": 4.0, "torch.optim.RMSprop": 4.0, "torch.optim.Muon": 4.0, "dadapt_adam": 12.0,
    "dadapt_adan": 20.0, "dadapt_adagrad": 16.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LanguageModelSpec:
    """The counterpart of a blueprint for a language model: its precision, and a function that measures one example."""

    dtype: torch.dtype
    measure: Callable[[TrainConfig, torch.dtype, Callable[[Mapping[str, nn.Module]], None]], Measured]


Measurable = Model | Blueprint | LanguageModelSpec


def estimate(
    model: Measurable, config: TrainConfig, steps: int = 0, *, staged: bool = False, chunks: int = 1
) -> dict[str, Any]:
    """Return bytes by kind and their sum at the peak of the run; ``chunks``: see `Measurements`."""
    return sum_up(Measurements(model, config, chunks=chunks), config, staged=staged) | {"steps": steps}


class Measurements:
    """Measurements of one model, each made when it is first needed.

    ``side``: of the largest images, if the dataset overrides the resolution of the configuration.
    ``chunks``: the text encoder's chunks of the longest caption.
    ``references``: sizes of the reference images of an example, those with the most pixels.
    ``device``: to plan for, in place of the one of the configuration.
    """

    def __init__(
        self,
        model: Measurable,
        config: TrainConfig,
        side: int | None = None,
        chunks: int = 1,
        device: torch.device | None = None,
        references: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.device = device or choose_device(config.device)
        self._language = model if isinstance(model, LanguageModelSpec) else None
        self.blueprint: Blueprint | None = model if isinstance(model, Blueprint) else getattr(model, "blueprint", None)
        self.own: torch.dtype = getattr(model, "dtype", None) or DTYPES.get(config.precision, torch.bfloat16)
        self._config, self._side, self._chunks, self._references = config, side, chunks, references
        self._cache: dict[tuple[torch.dtype, str, str, bool], Measured] = {}
        self._stored: dict[tuple[str, torch.dtype], Measured] = {}

    @property
    def trained(self) -> str:
        """The folder of the network whose blocks may be streamed: the denoiser, or a language model."""
        return LANGUAGE_MODEL if self.blueprint is None else self.blueprint.denoiser.folder

    def dtype(self, config: TrainConfig) -> torch.dtype:
        """Return the precision as loaded, unless a plan changed it."""
        return self.own if config.precision == self._config.precision else DTYPES[config.precision]

    def at(self, config: TrainConfig) -> Measured:
        key = self.dtype(config), config.gradient_checkpointing, config.quantize, moves_inputs(config)
        if key not in self._cache and self._config.quantize == "auto" and config.quantize not in ("auto", "off"):
            assert self.blueprint is not None
            plain = self.at(config.model_copy(update={"quantize": "off"}))  # activations are the same
            weights = config.quantize, key[0]  # the same with any gradient checkpointing
            if weights not in self._stored:
                self._stored[weights] = stored_bytes(self.blueprint, *weights)
            self._cache[key] = with_weights(plain, self._stored[weights])
        elif key not in self._cache:
            self._cache[key] = self._measure(config, *key[:2], moves=key[3])
        return self._cache[key]

    def _measure(self, config: TrainConfig, dtype: torch.dtype, mode: str, *, moves: bool) -> Measured:
        activations = HostActivations(torch.device("meta")) if moves else None
        checkpoint = partial(apply_checkpointing, mode=mode, recompute_in=MetaAttention, activations=activations)
        measured = self._measured(config, dtype, mode, checkpoint)
        return replace(measured, inputs=0 if activations is None else activations.host_bytes)

    def _measured(self, config: TrainConfig, dtype: torch.dtype, mode: str, checkpoint: Any) -> Measured:
        if self._language is not None:
            return self._language.measure(config, dtype, checkpoint)
        assert self.blueprint is not None
        at_size = config if self._side is None else config.model_copy(update={"resolution": self._side})
        backward = mode != "off"  # recomputing needs memory too
        fused = self.device.type == "cuda" and not config.shard
        same = (dtype, config.quantize)
        known = next((each for key, each in self._cache.items() if (key[0], key[2]) == same), None)
        return measure(
            self.blueprint, at_size, dtype, checkpoint, backward=backward, chunks=self._chunks, fused=fused,
            known=known, references=self._references,
        )  # fmt: skip


def moves_inputs(config: TrainConfig) -> bool:
    """Return whether inputs of blocks are in host memory between the passes; "auto" is a plan's to decide."""
    return config.offload_activations == "on" and config.gradient_checkpointing != "off"


def sum_up(measurements: Measurements, config: TrainConfig, *, staged: bool, resident: int = 0) -> dict[str, Any]:
    """Return bytes by kind and their sum for one configuration; ``resident``: blocks that stay on the device."""
    measured = measurements.at(config)
    weights, parameters = measured.weights, measured.parameters
    host, copied = (sum(weights.values()) if staged else 0), 0
    denoiser = measurements.trained
    if config.offload == "blocks" and staged:  # of text encoders while they encode, of the denoiser always
        blocks = {folder: measured.blocks.get(folder, ()) for folder in (denoiser, *ENCODERS)}
        slots = {folder: SLOTS * max(sizes, default=0) for folder, sizes in blocks.items()}
        moving = streamed_blocks(len(blocks[denoiser]), resident)
        slots[denoiser] = SLOTS * max((blocks[denoiser][number] for number in moving), default=0)
        copied = sum(blocks[denoiser][number] for number in moving)
        away = {folder: sum(sizes) for folder, sizes in blocks.items()} | {denoiser: copied}
        weights = {folder: size - away.get(folder, 0) + slots.get(folder, 0) for folder, size in weights.items()}
    encoders = sum(weights.get(folder, 0) for folder in ENCODERS)
    working = sum(weights.values())
    if staged and measurements.blueprint is not None:
        frozen = sum(weights.get(folder, 0) for folder in measurements.blueprint.family.frozen_encoders)
        needed = 0 if config.cache_text else encoders
        needed = encoders - frozen if config.train_text_encoders else needed
        needed += 0 if config.cache_latents else weights["vae"]
        working = weights[denoiser] + needed
    copies = measurements.device.type in DEVICES and measurements.dtype(config).itemsize == 2
    per_parameter = 8 + _STATE_BYTES.get(config.optimizer, 8.0) + (4 if config.ema_decay else 0) + (2 if copies else 0)
    trained = int(parameters * per_parameter)
    activations = measured.activations * config.batch_size + measured.scratch
    if config.deterministic and copies and frontend_version():
        workspaces = (2 * scores * config.batch_size for scores in measured.scores)
        activations += max((size for size in workspaces if size <= MAX_WORKSPACE), default=0)
    vae = (weights.get("vae", 0) if staged else sum(weights.values())) + measured.encoding
    caching = max(vae, encoders if staged else 0)
    training = working + trained + activations + (0 if config.cache_latents else measured.encoding)
    mode, micro_batches = config.gradient_checkpointing, config.gradient_accumulation
    # a batch with a regularization image is predicted by the base first; they are half of the images where balanced
    more = min(1.0, config.batch_size / 2) if config.prior_prediction else 0.0
    dequantized = measured.quantized * (PRODUCTS[mode] + more) * micro_batches
    inputs = measured.inputs * config.batch_size
    return {
        "weights_bytes": working,
        "trained_parameters": parameters,
        "trained_bytes": trained,
        "activation_bytes": activations,
        "caching_bytes": caching,
        "reserved_bytes": RESERVE,
        "operations_per_step": int(measured.operations * (PASSES[mode] + more) * config.batch_size * micro_batches),
        "launches_per_step": int(measured.launches * (KERNELS[mode] + more) * micro_batches),
        "converted_per_step": int(dequantized * CONVERSION.get(config.quantize, OTHER_CONVERSION)),
        "copied_per_step": int(((2 + more) * copied + inputs) * micro_batches),
        "inputs_bytes": inputs,
        "host_bytes": host + inputs + HOST,
        "total_bytes": max(training, caching) + RESERVE,
    }
