"""A training step of a small network with SDXL's structure, by this package and by PEFT: the same base, factors and
batch.

    truth     PEFT in float64 on the same rounded weights, factors and inputs
    error     of all gradients together:  |g - truth| / |truth| ; and the largest of those of single factors

Ours may be at most twice as far from the truth as PEFT's in the same precision: another order of the same sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import diffusers
import peft
import torch
from torch import nn

from inweave.bench.models import random_batch
from inweave.bench.step import RandomTask, without_cudnn_attention
from inweave.layers import lora_layers
from inweave.models import bundled
from inweave.models.families.base import Tensors
from inweave.models.fused.blocks import fuse_blocks
from inweave.models.model import Model
from inweave.models.siblings import stack_siblings
from inweave.training.adapters.attach import NAME, attach_adapters
from inweave.training.config.schema import TrainConfig
from inweave.training.distributed.world import World
from inweave.training.execution.kernels import step_kernels
from inweave.training.memory.checkpointing import apply_checkpointing
from inweave.training.optim.flat import FlatParameters
from inweave.training.step import Step
from tests.peers.tiny_models import SECOND, WIDTH, randomise
from tests.unit.training.image_sets import shared_model

RANK, ALPHA, RATE = 4, 2.0, 1e-3
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp32"}
#: SDXL's blocks with smaller numbers; heads of 16, which every kernel of attention takes
_UNET = {
    "block_out_channels": [32, 64, 128], "attention_head_dim": [2, 4, 8], "transformer_layers_per_block": [1, 1, 2],
    "norm_num_groups": 8, "cross_attention_dim": WIDTH + SECOND, "sample_size": 16, "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + SECOND,
}  # fmt: skip


@dataclass(frozen=True)
class Gradients:
    """Of one batch, by the name of the factor, in float64 on the CPU."""

    loss: float
    factors: dict[str, torch.Tensor]

    def error(self, truth: Gradients) -> float:
        assert self.factors.keys() == truth.factors.keys() and len(self.factors) > 100
        gap = sum(float((self.factors[name] - right).square().sum()) for name, right in truth.factors.items())
        return float((gap / sum(float(right.square().sum()) for right in truth.factors.values())) ** 0.5)

    def largest_error(self, truth: Gradients) -> float:
        """That of the factor whose gradient is furthest from the truth, in parts of its own size."""
        return max(float((self.factors[name] - right).norm() / right.norm()) for name, right in truth.factors.items())


def small_sdxl(device: torch.device, dtype: torch.dtype) -> Model:
    """A model whose denoiser is on the device, its weights those of bfloat16: every precision has the same base."""
    class_name, config = bundled.component_config("sdxl", "unet")
    unet = getattr(diffusers, class_name).from_config({**config, **_UNET})
    randomise(unet, 7)
    unet.to(torch.bfloat16).to(device, dtype).requires_grad_(False)
    shared = shared_model("sdxl")
    networks = {**shared.networks, "unet": unet}
    return replace(shared, networks=networks, weaver=cast("Any", None), device=device, dtype=dtype)


def step_config(device: torch.device, dtype: torch.dtype, **settings: Any) -> TrainConfig:
    usual: dict[str, Any] = {
        "dataset": "-", "rank": RANK, "alpha": ALPHA, "targets": "all", "learning_rate": RATE, "max_grad_norm": 0.0,
        "precision": PRECISIONS[dtype], "device": str(device), "graph": "off", "compile": "off",
    }  # fmt: skip
    return TrainConfig.of(**{**usual, **settings})


def our_step(device: torch.device, dtype: torch.dtype, **settings: Any) -> Step:
    """A step in the order of `inweave.training.session.prepare`, with fused blocks on every device."""
    config, model = step_config(device, dtype, **settings), small_sdxl(device, dtype)
    task = RandomTask(model, config)
    trainable = attach_adapters(task.networks, config)
    generator = torch.Generator().manual_seed(3)
    for parameter in trainable.parameters.values():  # both factors, or half of the gradients would be zero
        parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    step = Step(task, FlatParameters(trainable.parameters, trainable.multipliers, device), config, World())
    step.compile(model, before=None)
    assert fuse_blocks(task.networks["unet"]) > 100
    assert stack_siblings(task.networks["unet"]) > 30
    kernels = partial(step_kernels, device, deterministic=config.deterministic)
    apply_checkpointing(task.networks, config.gradient_checkpointing, kernels, random=False)
    return step


def batch_of(step: Step, size: int, seed: int = 1) -> Tensors:
    task = cast("RandomTask", step.task)
    return random_batch(task.model, 2, size, seed=seed)


def our_gradients(step: Step, batch: Tensors, updates: int) -> Gradients:
    """Of the last of several updates, which change nothing: the rate is zero. The third one of a recorded step is a
    replay.
    """
    before = step.flat.values.clone()
    for number in range(updates):
        step.run(number, 0.0, [batch])
    assert torch.equal(step.flat.values, before) and int(step.skipped) == 0
    names = {id(parameter): name for name, parameter in step.flat.parameters.items()}
    grads, factors = step.flat.gradients(), {}
    for module, layer in lora_layers(step.task.networks["unet"]).items():
        for role, factor in layer.branch(NAME).roles().items():
            factors[f"{module}.{role}"] = grads[names[id(factor)]].detach().double().cpu()
    return Gradients(float(step.loss), factors)


def peft_gradients(step: Step, batch: Tensors, dtype: torch.dtype, compute: torch.dtype | None = None) -> Gradients:
    """PEFT's on the modules and factors of ``step``, the base in ``dtype``; ``compute``: by autocast, with float32
    factors.
    """
    device = step.task.device
    model = small_sdxl(device, dtype)
    layers = lora_layers(step.task.networks["unet"])
    unet = model.denoiser
    unet.add_adapter(peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(layers)))  # type: ignore[operator]
    modules = {name: module for name, module in unet.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)}
    assert modules.keys() == layers.keys()
    parameters: dict[str, nn.Parameter] = {}
    for name, module in modules.items():
        branch = layers[name].branch(NAME)
        for role, theirs in (("down", cast("Any", module).lora_A), ("up", cast("Any", module).lora_B)):
            parameter = parameters[f"{name}.{role}"] = theirs["default"].weight
            ours = getattr(branch, role).detach()
            if compute is None and dtype == torch.float64 and step.task.dtype != torch.float32:
                ours = ours.to(step.task.dtype)  # type: ignore[attr-defined]  # both compute with rounded factors
            assert parameter.shape == ours.shape
            parameter.data = ours.to(torch.float32 if compute is not None else dtype).clone()
    task = RandomTask(model, step_config(device, dtype))
    inputs = {
        name: value.to(dtype) if name.startswith("text.") and value.is_floating_point() else value
        for name, value in batch.items()
    }
    with without_cudnn_attention():
        with torch.autocast(device.type, compute or torch.bfloat16, enabled=compute is not None):
            loss = task.loss(inputs)
        loss.backward()  # type: ignore[no-untyped-call]
    grads = {name: cast("torch.Tensor", p.grad).double().cpu() for name, p in parameters.items()}
    return Gradients(float(loss.detach()), grads)


def assert_as_exact_as_peft(step: Step, size: int, updates: int) -> None:
    """The gradients of a step against PEFT's in the same precision, both measured against float64."""
    batch, dtype = batch_of(step, size), cast("Any", step.task).dtype
    mine = our_gradients(step, batch, updates)
    theirs = peft_gradients(step, batch, dtype, None if dtype == torch.float32 else dtype)
    truth = peft_gradients(step, batch, torch.float64)
    unit = torch.finfo(torch.float32).eps  # times and losses are float32, in the truth too
    figures = (mine.error(truth), theirs.error(truth), mine.largest_error(truth), theirs.largest_error(truth))
    assert all(value.isfinite().all() for value in mine.factors.values())
    assert 0 < figures[0] <= 2 * figures[1] + unit, figures
    assert figures[2] <= 2 * figures[3] + unit, figures
    off = abs(mine.loss - truth.loss) / truth.loss
    assert off <= 2 * figures[1] + unit, (off, figures)  # a mean of many errors: less than that of the gradients


def trained_bits(step: Step, size: int, updates: int) -> dict[str, torch.Tensor]:
    """Everything that ``steps`` real updates leave behind: their losses, the last gradients, values, the optimizer's
    state.
    """
    losses = []
    for number in range(updates):
        step.run(number, RATE, [batch_of(step, size, seed=number)])
        losses.append(step.loss.clone())
    state = {name: value.clone() for name, value in step.state().items()}
    return {"losses": torch.stack(losses), "gradients": step.flat.grads.clone(), **state}


def differing(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> list[str]:
    """Names of what has not the same bits."""
    assert one.keys() == two.keys() and len(one) > 100
    return [name for name in one if not torch.equal(one[name], two[name])]
