"""Variants of a training step on one GPU: its time, whether it repeats its bits, and where the time goes.

PYTHONPATH=src:.:.gpu-bundle/site python3 bench/ablation.py sdxl sdxl:plain sdxl:unfused:4 flux1-dev:compile,profile

MODEL[:FLAG,FLAG...[:BATCH]]
flash       torch's own attention without cuDNN instead of measured kernels
unfused     diffusers' blocks, unchanged
plain       LoRA layers by the general path
apart       no product for several layers
cublas      the adapter's backward pass by cuBLAS alone
last        the adapter's part of the output added after the frozen product
gelu        the GELU with tanh by torch, and so by Inductor in compiled blocks
compile, eager, deterministic, fp8, full, selective       as the settings of training
adafactor   the optimizer, which runs eagerly after a recorded backward pass
quantizer   fp8, compiled: rows quantized by a separate kernel, not by the one that produces them
separate    fp8: two frozen layers with GELU between them layer by layer
listed      Flux: the modules that diffusers' example script trains
copies      the largest copies, and the operations that cause them
profile     kernels by kind, on the screen and in $OUT/profile_*.txt
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from inweave.cli.environment import use_expandable_segments

use_expandable_segments()  # as training does, before torch is imported

# ruff: noqa: E402
import torch

from inweave.bench.models import random_batch, random_model
from inweave.bench.step import GIB, RATE, RandomTask, StepCase, fresh_memory, peak_bytes, step_config
from inweave.bench.timing import quantiles, wall_seconds
from inweave.layers import fused, lora_layers
from inweave.models.fused import feed_forward as fused_feed_forward
from inweave.models.fused import joint as fused_joint
from inweave.models.fused.blocks import fuse_blocks
from inweave.models.quantization import quantize_denoiser
from inweave.models.siblings import stack_siblings
from inweave.ops.activation import autograd as activation
from inweave.ops.attention import MeasuredAttention
from inweave.ops.fp8 import select as fp8_select
from inweave.ops.linear import select
from inweave.ops.quantized.fp8 import Fp8Weight
from inweave.training.adapters.attach import attach_adapters
from inweave.training.distributed.world import World
from inweave.training.execution import kernels
from inweave.training.memory.checkpointing import apply_checkpointing
from inweave.training.optim.flat import FlatParameters
from inweave.training.step import Step

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
RANKS = {"flux1-dev": 16, "sd3.5-large": 16}
#: words in a kernel's name -> what it belongs to; the first that fits
KINDS = {
    "copies": ("memcpy", "memset"),
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "convolution": ("conv", "fprop", "dgrad", "implicit"),
    "products": ("gemm", "cublas", "nvjet", "cutlass", "splitk"),
    "inductor": ("triton_",),
    "torch": ("at::native",),
}
IN_TWO_LAUNCHES = select._in_two_launches
ADAPTER_FIRST = select._adapter_first
USES_OPERATOR = activation._uses_operator
IS_TRACED = fp8_select.is_traced
TRACED_ROWS = Fp8Weight.traced_rows
IS_FROZEN_IN_8_BITS = fused_feed_forward.is_frozen_in_8_bits


def case_of(model: str, flags: set[str], batch: int) -> StepCase:
    return StepCase(
        model,
        batch=batch,
        rank=RANKS.get(model, 32),
        targets="listed" if "listed" in flags else "all" if model.startswith("flux") else "attention",
        checkpointing=next((mode for mode in ("full", "selective") if mode in flags), "off"),
        graph="off" if "eager" in flags else "on",
        deterministic="deterministic" in flags,
    )


def switch(flags: set[str]) -> None:
    """Turn off the features that the flags exclude."""
    measured: Any = (lambda **_: nullcontext()) if "flash" in flags else MeasuredAttention
    kernels.MeasuredAttention = measured  # type: ignore[misc]
    fused.DEVICES = frozenset() if "plain" in flags else frozenset({"cuda"})  # type: ignore[misc]
    two: Any = (lambda *_: False) if "cublas" in flags else IN_TWO_LAUNCHES
    select._in_two_launches = two
    first: Any = (lambda *_: False) if "last" in flags else ADAPTER_FIRST
    select._adapter_first = first
    operator: Any = (lambda *_: False) if "gelu" in flags else USES_OPERATOR
    activation._uses_operator = operator
    traced: Any = (lambda: False) if "quantizer" in flags else IS_TRACED
    fp8_select.is_traced = traced
    rows: Any = (lambda *_: (None, None)) if "quantizer" in flags else TRACED_ROWS
    Fp8Weight.traced_rows = rows  # type: ignore[method-assign]
    frozen: Any = (lambda *_: False) if "separate" in flags else IS_FROZEN_IN_8_BITS
    fused_feed_forward.is_frozen_in_8_bits = fused_joint.is_frozen_in_8_bits = frozen


def measure(tag: str) -> None:
    model_name, _, rest = tag.partition(":")
    names, _, batch = rest.partition(":")
    flags = set(filter(None, names.split(",")))
    case = case_of(model_name, flags, int(batch or 1))
    config = step_config(case, DEVICE, DTYPE)
    if "adafactor" in flags:
        config = config.model_copy(update={"optimizer": "adafactor"})
    switch(flags)
    with fresh_memory(DEVICE):
        model = random_model(case.model, DEVICE, DTYPE)
        task = RandomTask(model, config)
        trainable = attach_adapters(task.networks, config)
        layers = sum(len(lora_layers(network)) for network in task.networks.values())
        if "fp8" in flags:
            print(quantize_denoiser(model, "fp8", DEVICE))
        if "unfused" not in flags:
            for network in task.networks.values():
                fuse_blocks(network)
                if "apart" not in flags:
                    stack_siblings(network)
        step = Step(task, FlatParameters(trainable.parameters, trainable.multipliers, DEVICE), config, World())
        context = partial(kernels.step_kernels, DEVICE, deterministic=config.deterministic)
        apply_checkpointing(task.networks, config.gradient_checkpointing, context, random=False)
        if "compile" in flags:
            step.blocks.start()
        batches = [random_batch(model, case.batch, case.size)]
        numbers = iter(range(1_000_000))

        def update() -> None:
            step.run(next(numbers), RATE, batches)

        at_rest = torch.cuda.memory_allocated(DEVICE)
        peaks = [
            peak_bytes(DEVICE) or 0
        ]  # what only the first update needs (measuring attention, cuDNN's choice) is part of the peak
        for _ in range(3):
            update()
            torch.cuda.synchronize(DEVICE)
            peaks.append(peak_bytes(DEVICE) or 0)
        low, middle, high = sorted(quantiles(wall_seconds(update, DEVICE, runs=8, warmup=1)))
        print(
            f"{tag}: {middle * 1e3:.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f}), {layers} layers, peak "
            f"{(peak_bytes(DEVICE) or 0) / GIB:.2f} GiB (at rest {at_rest / GIB:.2f}, before and after each of the "
            f"first updates {', '.join(f'{peak / GIB:.2f}' for peak in peaks)}), "
            f"same bits: {repeats_bits(step, batches)}, loss {float(step.loss):.5f}, "
            f"problems: {step.graphs.problem or step.blocks.problem or 'none'}",
            flush=True,
        )
        if "profile" in flags:
            profile(tag, update)
        if "copies" in flags:
            list_copies(step, batches)


def repeats_bits(step: Step, batches: list[Any]) -> bool:
    """Return whether three backward passes of the same batch have the same gradients."""
    results = []
    for _ in range(3):
        step._retry_split(lambda: step._accumulate(7, batches), batches)
        results.append(step.flat.grads.clone())
    return all(torch.equal(results[0], other) for other in results[1:])


def list_copies(step: Step, batches: list[Any]) -> None:
    """List the copies of an unrecorded step by shape, and the operations that cause them."""
    step.graphs.enabled = False
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, record_shapes=True) as record:
        step._retry_split(lambda: step._accumulate(7, batches), batches)
        torch.cuda.synchronize()
    counts: Counter[str] = Counter()
    for event in record.events() or ():
        if event.name == "aten::copy_" and event.device_time > 20:
            parents, parent = [], event.cpu_parent
            while parent is not None and len(parents) < 4:
                parents.append(parent.name[:40])
                parent = parent.cpu_parent
            counts[f"{event.input_shapes[:2]} < {' < '.join(parents)}"] += int(event.device_time)
    for text, time in counts.most_common(12):
        print(f"    copy {time / 1e3:7.2f} ms {text}", flush=True)


def profile(tag: str, update: Any) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        update()
        torch.cuda.synchronize()
    times: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for event in record.events() or ():
        if event.device_time:
            lower = event.name.lower()
            kind = next(
                (kind for kind, words in KINDS.items() if any(word in lower for word in words)), "own and others"
            )
            times[kind, event.name[:100]] += event.device_time
            counts[kind, event.name[:100]] += 1
    by_kind: Counter[str] = Counter()
    for (kind, _), time in times.items():
        by_kind[kind] += time
    shares = ", ".join(f"{kind} {time / 1e3:.1f} ms" for kind, time in by_kind.most_common())
    print(f"    {sum(counts.values())} kernels, {sum(times.values()) / 1e3:.1f} ms: {shares}", flush=True)
    lines = [f"{time / 1e3:9.3f} ms {counts[key]:6d} {key[0]:14s} {key[1]}" for key, time in times.most_common(80)]
    name = f"profile_{tag.replace(':', '_').replace(',', '-')}.txt"
    (Path(os.environ.get("OUT", ".")) / name).write_text("\n".join(lines))


if __name__ == "__main__":
    for tag in sys.argv[1:]:
        try:
            measure(tag)
        except Exception:  # a variant that fails is a result, and the others are still to come
            traceback.print_exc(limit=-6)
            print(f"{tag}: failed", flush=True)
        gc.collect()
