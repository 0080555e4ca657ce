"""A training step of a full-size model with random weights: forward, backward, clipping and AdamW.

ours      `inweave.training.step.Step`, as in a run, on a batch that is on the device
peers     the same model with PEFT's layers on the same modules, as diffusers' example scripts train it: autocast,
          float32 factors, torch's AdamW. Compiled: its repeated blocks. Captured: the whole step in one CUDA graph
limit     forward and backward operations of the frozen base at the rate of a large product. The gradient of an input
          costs one forward pass, that of attention two and a half; weights get none
memory    torch's peak allocation, model included, over warm-up, recording and timed steps
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from inweave.bench.clocks import ClockLog
from inweave.bench.models import random_batch, random_model
from inweave.bench.operations import step_operations
from inweave.bench.report import BenchRow
from inweave.bench.timing import Rates, capture, quantiles, wall_seconds
from inweave.errors import ConfigError
from inweave.layers import lora_layers
from inweave.models.families.base import Tensors
from inweave.models.fused.blocks import fuse_blocks
from inweave.models.model import Model
from inweave.models.quantization import quantize_denoiser
from inweave.models.siblings import stack_siblings
from inweave.training.adapters.attach import attach_adapters
from inweave.training.adapters.targets import trained_networks
from inweave.training.config.schema import TrainConfig
from inweave.training.data.batches import Order
from inweave.training.distributed.world import World
from inweave.training.execution.capture import StepGraphs
from inweave.training.execution.compilation import repeated_blocks
from inweave.training.execution.kernels import step_kernels
from inweave.training.memory.checkpointing import apply_checkpointing
from inweave.training.memory.quantize_setting import quantize_problems
from inweave.training.optim.flat import FlatParameters
from inweave.training.step import Step
from inweave.training.tasks.objective import make_objective

RATE = 1e-4
PEER = "diffusers + PEFT"
PEER_RUNS = 6  # a peer's step takes several times as long
GIB = 1 << 30
#: "listed": the modules that diffusers' example script for Flux trains
LISTED = (
    "to_k", "to_q", "to_v", "to_out.0", "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out", "ff.net.0.proj",
    "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
)  # fmt: skip
SAME_LOSS = 0.05  # relative difference allowed between first losses: half precision, and a quantized base


@dataclass(frozen=True, slots=True)
class StepCase:
    """The settings of a step; ``targets``: as in training, or "listed"."""

    model: str
    batch: int = 1
    rank: int = 32
    size: int = 1024
    targets: str = "attention"
    graph: str = "on"
    compile: str = "off"
    checkpointing: str = "off"
    quantize: str = "off"
    deterministic: bool = False

    @property
    def name(self) -> str:
        parts = [self.model, f"batch {self.batch}", f"{self.size} pixels", f"rank {self.rank} on {self.targets}"]
        parts += [f"checkpointing {self.checkpointing}"] if self.checkpointing != "off" else []
        parts += [f"{self.quantize} base"] if self.quantize != "off" else []
        parts += ["compiled"] if self.compile == "on" else []
        parts += ["deterministic"] if self.deterministic else []
        return ", ".join([*parts, "CUDA graph" if self.graph == "on" else "eager"])


class RandomTask:
    """A task with one random batch of a random model."""

    def __init__(self, model: Model, config: TrainConfig) -> None:
        self.model, self.config = model, config
        self.device, self.dtype = model.device, model.dtype
        self.networks: Mapping[str, nn.Module] = trained_networks(model, config)
        self.objective = make_objective(model, config.objective, model.device)
        self.order = Order((1,), (1,), 1, config.seed)
        self.held_out: Sequence[tuple[int, ...]] = ()

    def sample_batch(self, batch: tuple[int, ...], generators: Sequence[torch.Generator]) -> Tensors:
        return random_batch(self.model, len(batch), int(self.config.side or self.model.size))

    def loss(self, inputs: Tensors) -> torch.Tensor:
        model, family = self.model, self.model.family
        latents, noise, times = inputs["latents"], inputs["noise"], inputs["times"]
        noisy, target = self.objective.noised(latents, noise, times)
        text = {name.removeprefix("text."): value for name, value in inputs.items() if name.startswith("text.")}
        conditioning = family.batch_inputs(model, text, inputs["sizes"], latents.shape, self.config.guidance)
        prediction = family.denoise(model, noisy.to(model.dtype), self.objective.timestep(times), conditioning)
        return self.objective.loss_of(prediction, target, times, None, None)

    def new_notes(self) -> list[str]:
        return []

    def fingerprint(self) -> str:
        return "random"

    def metadata(self) -> dict[str, str]:
        return {}


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Seconds of a step, peak bytes (on a GPU), and notes.

    ``loss``: of the first step, where adapters are zero, so equal work gives an equal loss. ``resting``: bytes between
    steps: model, adapter, gradients, optimizer.
    """

    median: float
    low: float
    high: float
    peak: int | None
    loss: float
    notes: tuple[str, ...] = ()
    resting: int | None = None


def measure_step(
    case: StepCase,
    device: torch.device,
    dtype: torch.dtype,
    rates: Rates,
    *,
    runs: int = 10,
    warmup: int = 4,
    peers: Sequence[str] = ("eager",),
    progress: Callable[[str], None] | None = None,
) -> tuple[list[BenchRow], list[str]]:
    """Return rows of time and memory, and notes; ``peers``: eager, compiled, captured, or compiled+captured."""
    report = progress or (lambda text: None)
    report(f"{case.name}: inweave")
    ours, modules = our_step(case, device, dtype, runs=runs, warmup=warmup)
    notes = [*ours.notes]
    figures: dict[str, StepFigures] = {}
    for kind in peers:
        report(f"{case.name}: {PEER}, {kind}")
        try:
            figures[f"{PEER}, {kind}"] = peer_step(
                case, device, dtype, modules, kind, runs=min(runs, PEER_RUNS), warmup=min(warmup, 2)
            )
        except Exception as error:  # a failing peer is a result too, and ours is measured already
            notes.append(f"{PEER}, {kind}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    for name, each in figures.items():
        if not abs(each.loss - ours.loss) <= SAME_LOSS * abs(ours.loss):
            notes.append(
                f"{name}: not the same work: its first loss is {each.loss:.4g}, that of inweave {ours.loss:.4g}"
            )
    limit = step_limit(case, dtype, rates)
    details = {"10 %": ours.low * 1e3, "90 %": ours.high * 1e3}
    theirs = {name: each.median * 1e3 for name, each in figures.items()}
    rows = [BenchRow(case.name, "ms", ours.median * 1e3, theirs, limit, details)]
    if ours.peak is not None:
        peaks = {name: each.peak / GIB for name, each in figures.items() if each.peak is not None}
        memory = {}
        if ours.resting is not None:
            memory = {"between steps": ours.resting / GIB, "above": (ours.peak - ours.resting) / GIB}
        rows.append(BenchRow(f"{case.name}: peak memory", "GiB", ours.peak / GIB, peaks, None, memory))
    return rows, notes


def step_limit(case: StepCase, dtype: torch.dtype, rates: Rates) -> float | None:
    """Return milliseconds; None for fp8 products, whose rate was not measured."""
    if case.quantize != "off":
        return None
    return rates.seconds(step_operations(case.model, case.batch, case.size, dtype), 0) * 1e3


def step_config(case: StepCase, device: torch.device, dtype: torch.dtype) -> TrainConfig:
    """Return the settings of a run with the same steps."""
    settings: dict[str, Any] = {
        "dataset": "-", "rank": case.rank, "targets": LISTED if case.targets == "listed" else case.targets,
        "batch_size": case.batch, "resolution": case.size, "gradient_checkpointing": case.checkpointing,
        "graph": case.graph, "compile": case.compile, "deterministic": case.deterministic, "quantize": case.quantize,
        "learning_rate": RATE, "max_grad_norm": 1.0,
        "precision": {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32"), "device": str(device),
    }  # fmt: skip
    return TrainConfig.of(**settings)


@dataclass(frozen=True, slots=True)
class ReadyStep:
    """A step that can be repeated; ``loss``: of the last one; ``modules``: those with an adapter."""

    update: Callable[[], None]
    loss: Callable[[], float]
    modules: Sequence[str]
    notes: Callable[[], list[str]] = list
    graphs: StepGraphs | None = None


def ready_step(case: StepCase, device: torch.device, dtype: torch.dtype) -> ReadyStep:
    """Set up this package's step, in the order of `inweave.training.session.prepare`."""
    config = step_config(case, device, dtype)
    model = random_model(case.model, device, dtype)
    task = RandomTask(model, config)
    trainable = attach_adapters(task.networks, config)
    flat = FlatParameters(trainable.parameters, trainable.multipliers, device)
    step = Step(task, flat, config, World())
    if problems := quantize_problems(model.denoiser, config, device):
        raise ConfigError(problems)
    remarks = [quantize_denoiser(model, config.quantize, device)] if config.quantize != "off" else []
    step.compile(model, before=None)
    if device.type == "cuda":
        for network in task.networks.values():
            fuse_blocks(network)
            stack_siblings(network)
    kernels = partial(step_kernels, device, deterministic=config.deterministic)
    apply_checkpointing(task.networks, config.gradient_checkpointing, kernels, random=False)
    batches = [random_batch(model, case.batch, case.size)]
    numbers = iter(range(1_000_000))

    def notes() -> list[str]:
        events = [*remarks, *(event["text"] for event in step.new_events(1))]
        return events if bool(step.loss.isfinite()) else [*events, "the loss is not finite"]

    modules = [name for network in task.networks.values() for name in lora_layers(network)]
    return ReadyStep(
        lambda: step.run(next(numbers), RATE, batches), lambda: float(step.loss), modules, notes, step.graphs
    )


def ready_peer(
    case: StepCase, device: torch.device, dtype: torch.dtype, modules: Sequence[str], kind: str
) -> ReadyStep:
    """Set up the step of diffusers' example scripts, with PEFT layers on ``modules``; checkpointing is full or off."""
    from peft import LoraConfig

    captured = "captured" in kind
    model = random_model(case.model, device, dtype)
    denoiser = model.denoiser
    denoiser.add_adapter(
        LoraConfig(r=case.rank, lora_alpha=case.rank, init_lora_weights="gaussian", target_modules=list(modules))
    )
    trainable = [parameter for parameter in denoiser.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.data = parameter.data.float()
    if case.checkpointing != "off":
        denoiser.enable_gradient_checkpointing()
    denoiser.train()
    if "compiled" in kind:
        for block in repeated_blocks(denoiser):
            block.compile(fullgraph=False)
    task = RandomTask(model, step_config(case, device, dtype))
    batch = random_batch(model, case.batch, case.size)
    options: dict[str, Any] = {"fused": True, "capturable": True} if captured else {}
    optimizer = torch.optim.AdamW(trainable, lr=RATE, **options)
    losses: list[torch.Tensor] = []

    def update() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32, cache_enabled=not captured):
            loss = task.loss(batch)
        losses[:] = [loss.detach()]
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not captured)

    return ReadyStep(update, lambda: float(losses[0]), modules)


def our_step(
    case: StepCase, device: torch.device, dtype: torch.dtype, *, runs: int, warmup: int
) -> tuple[StepFigures, Sequence[str]]:
    """Measure this package's step; also return the names of the trained modules."""
    with fresh_memory(device):
        step = ready_step(case, device, dtype)
        step.update()
        first = step.loss()
        with ClockLog(device) as clocks:
            samples = wall_seconds(step.update, device, runs=runs, warmup=warmup)
        notes = (*step.notes(), *([] if clocks.note is None else [clocks.note]))
        figures = StepFigures(*quantiles(samples), peak_bytes(device), first, notes, resting_bytes(device))
        return figures, step.modules


def peer_step(
    case: StepCase,
    device: torch.device,
    dtype: torch.dtype,
    modules: Sequence[str],
    kind: str,
    *,
    runs: int,
    warmup: int,
) -> StepFigures:
    """Measure the peer's step; ``kind``: eager, compiled, captured, or compiled+captured."""
    with fresh_memory(device), without_cudnn_attention():
        step = ready_peer(case, device, dtype, modules, kind)
        step.update()
        first = step.loss()
        work = capture(step.update, device).replay if "captured" in kind else step.update
        samples = wall_seconds(work, device, runs=runs, warmup=warmup)
        return StepFigures(*quantiles(samples), peak_bytes(device), first)


def missing_peer() -> str | None:
    """Return the library that the peer lacks; None if both are installed."""
    return next((name for name in ("diffusers", "peft") if find_spec(name) is None), None)


def peer_kinds(device: torch.device, *, compiled: bool) -> list[str]:
    """Return the kinds of peer steps to measure."""
    kinds = ["eager", *(["compiled"] if compiled else [])]
    if device.type == "cuda" and compiled:
        kinds += ["captured", "compiled+captured"]
    return kinds


# the device


@contextmanager
def fresh_memory(device: torch.device) -> Iterator[None]:
    """Free the memory of earlier work on the device before the block, and count its peak from there."""
    _free(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        yield
    finally:
        if "torch._dynamo" in sys.modules:  # compiled code keeps the model alive
            torch.compiler.reset()


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for every stream that has multiplied
        torch.cuda.empty_cache()


def peak_bytes(device: torch.device) -> int | None:
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None


def resting_bytes(device: torch.device) -> int | None:
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else None


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Disable cuDNN, whose backward pass reads out of bounds if gradient and output differ in layout (Flux)."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)
