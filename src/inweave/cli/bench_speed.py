"""`inweave bench kernels`, `step`, `generate`, `swap`, `memory`: speed and memory, beside diffusers + PEFT if present.

Their output is in `inweave.cli.bench_report`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer

from inweave.cli.bench_report import measuring, refuse_unused


class Switch(StrEnum):
    """off or on."""

    off = "off"
    on = "on"


class Checkpointing(StrEnum):
    """Modes of gradient checkpointing."""

    off = "off"
    selective = "selective"
    full = "full"


class Quantize(StrEnum):
    """Quantization of the frozen base."""

    off = "off"
    fp8 = "fp8"
    int8 = "int8"
    int8_hadamard = "int8-hadamard"
    nf4 = "nf4"
    nf4_hadamard = "nf4-hadamard"


Report = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE", help="Write the figures to this file as JSON; -: print JSON instead of the table.",
        show_default="none",
    ),
]  # fmt: skip
DeviceName = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...", show_default="auto")]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="A published model, such as sdxl, sd3.5-large or flux1-dev; its weights are random.",
        show_default="sdxl on a GPU, inweave/emoji elsewhere",
    ),
]  # fmt: skip
Peers = Annotated[bool, typer.Option("--peers/--no-peers", help="Measure diffusers + PEFT too, if installed.")]
PixelSize = Annotated[
    int | None,
    typer.Option("--size", min=16, help="Width and height of the images in pixels.", show_default="the model's"),
]
Rank = Annotated[int, typer.Option("--rank", min=1, max=4096, help="Rank of the LoRA.")]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Images per step.")]
Targets = Annotated[
    str,
    typer.Option(
        "--targets",
        help="Modules to adapt, as in training: attention, attention-mlp, all; or listed: those of diffusers' Flux "
        "script.",
    ),
]


def kernels(
    context: typer.Context,
    groups: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[GROUP]...", help="Which kernels: lora, norm, activation, attention, merge.", show_default="all"
        ),
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="The same kernels at sizes that take seconds on a CPU.")] = False,
    replays: Annotated[int, typer.Option("--replays", min=1, help="Timed replays of each CUDA graph, on a GPU.")] = 200,
    device: DeviceName = None,
    report: Report = None,
) -> None:
    """Measure single kernels against plain torch.

    Example: inweave bench kernels lora --json kernels.json
    """
    with measuring("kernels", context, device, report) as bench:
        from inweave.bench.kernel_cases import GROUPS
        from inweave.bench.kernels import ensure_groups, measure_kernels

        chosen = groups or list(GROUPS)
        ensure_groups(chosen)
        bench.rows = measure_kernels(
            chosen, bench.device, bench.dtype, bench.rates, tiny=tiny, replays=replays, progress=bench.progress
        )


def step(
    context: typer.Context,
    model: ModelName = None,
    batch: Batch = 1,
    rank: Rank = 32,
    size: PixelSize = None,
    targets: Targets = "attention",
    graph: Annotated[
        Switch | None,
        typer.Option("--graph", help="Record the step as CUDA graphs: off, on.", show_default="on on a GPU"),
    ] = None,
    compiled: Annotated[Switch, typer.Option("--compile", help="Compile the model's blocks: off, on.")] = Switch.off,
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic/--no-deterministic", help="Give the same bits in every run."),
    ] = False,
    checkpointing: Annotated[
        Checkpointing, typer.Option("--gradient-checkpointing", help="off, selective or full.")
    ] = Checkpointing.off,
    quantize: Annotated[
        Quantize,
        typer.Option("--quantize", help="Quantize the frozen base: off, fp8, int8, int8-hadamard, nf4, nf4-hadamard."),
    ] = Quantize.off,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to time.")] = 10,
    warmup: Annotated[int, typer.Option("--warmup", min=1, help="Steps before the timed ones.")] = 4,
    peers: Peers = True,
    peers_compiled: Annotated[
        bool, typer.Option("--peers-compiled", help="Measure diffusers + PEFT compiled and in CUDA graphs too.")
    ] = False,
    train_steps: Annotated[
        int | None,
        typer.Option(
            "--train",
            min=20,
            metavar="STEPS",
            show_default="none",
            help="Run inweave train for this many steps, data and log included, and compare it with the step alone.",
        ),
    ] = None,
    device: DeviceName = None,
    report: Report = None,
) -> None:
    """Measure a training step of a full-size model with random weights: forward, backward, clipping, AdamW.

    Example: inweave bench step --model sdxl --batch 4 --peers-compiled --json step.json
    """
    if train_steps is not None:
        refuse_unused(context, "with --train", "warmup", "peers_compiled")
    elif not peers:
        refuse_unused(context, "with --no-peers", "peers_compiled")
    with measuring("step" if train_steps is None else "train", context, device, report) as bench:
        from inweave.bench.step import StepCase, measure_step, peer_kinds
        from inweave.bench.train_command import measure_training

        name, pixels = bench.model(model, size)
        recorded = graph or (Switch.on if bench.device.type == "cuda" else Switch.off)
        case = StepCase(
            name, batch, rank, pixels, targets, recorded.value, compiled.value, checkpointing.value, quantize.value,
            deterministic,
        )  # fmt: skip
        if train_steps is not None:
            bench.rows, bench.notes = measure_training(
                case, bench.device, bench.dtype, bench.rates, steps=train_steps, runs=steps, progress=bench.progress
            )
            return
        kinds = peer_kinds(bench.device, compiled=peers_compiled) if bench.with_peers(peers) else []
        bench.rows, bench.notes = measure_step(
            case, bench.device, bench.dtype, bench.rates, runs=steps, warmup=warmup, peers=kinds,
            progress=bench.progress,
        )  # fmt: skip


def generate(
    context: typer.Context,
    model: ModelName = None,
    size: PixelSize = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, max=150, help="Steps per image.", show_default="the model's")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, max=100, help="Images of the batch.")] = 4,
    loras: Annotated[
        int,
        typer.Option("--loras", min=0, max=32, help="Requests with a LoRA each, of ranks 4 to 128, in one batch."),
    ] = 8,
    clients: Annotated[
        int, typer.Option("--clients", min=0, max=1000, help="Requests that join a running batch, a LoRA each.")
    ] = 0,
    quantize: Annotated[
        Quantize,
        typer.Option("--quantize", help="Quantize the denoiser: off, fp8, int8, int8-hadamard, nf4, nf4-hadamard."),
    ] = Quantize.off,
    graph: Annotated[str, typer.Option("--graph", help="Steps recorded in CUDA graphs: auto or off.")] = "off",
    runs: Annotated[int, typer.Option("--runs", min=1, help="Timed runs of each row.")] = 5,
    peers: Peers = True,
    peers_compiled: Annotated[
        bool, typer.Option("--peers-compiled", help="Measure diffusers compiled too, which takes minutes.")
    ] = False,
    device: DeviceName = None,
    report: Report = None,
) -> None:
    """Measure images of a full-size model with random weights: the first, one, a batch, and a batch of LoRAs.

    Example: inweave bench generate --model sdxl --peers-compiled --json generate.json
    """
    if not peers:
        refuse_unused(context, "with --no-peers", "peers_compiled")
    with measuring("generate", context, device, report) as bench:
        from inweave.bench.generate import GenerateCase, measure_generate
        from inweave.bench.models import published_blueprint

        name, pixels = bench.model(model, size)
        blueprint = published_blueprint(name)
        case = GenerateCase(
            name,
            pixels,
            steps or (blueprint.variant or blueprint.family).steps,
            batch,
            loras,
            quantize.value,
            clients,
            graph,  # type: ignore[arg-type]
        )
        kinds = ["eager", *(["compiled"] if peers_compiled else [])] if bench.with_peers(peers) else []
        bench.rows, bench.notes = measure_generate(
            case, bench.device, bench.dtype, runs=runs, peers=kinds, progress=bench.progress
        )


def swap(
    context: typer.Context,
    model: ModelName = None,
    rank: Rank = 32,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Timed runs of each operation.")] = 7,
    unmerged: Annotated[
        bool,
        typer.Option("--unmerged", help="Measure a forward pass with 1 and 3 unmerged LoRAs instead of swaps."),
    ] = False,
    batch: Annotated[int, typer.Option("--batch", min=1, help="With --unmerged: images per forward pass.")] = 2,
    size: PixelSize = None,
    peers: Peers = True,
    device: DeviceName = None,
    report: Report = None,
) -> None:
    """Measure swapping LoRAs in a full-size model with random weights, from memory and from files.

    Example: inweave bench swap --model sdxl --json swap.json
    """
    if not unmerged:
        refuse_unused(context, "without --unmerged", "batch", "size")
    with measuring("unmerged" if unmerged else "swap", context, device, report) as bench:
        from inweave.bench.forward import ForwardCase, measure_forward
        from inweave.bench.swap import measure_swap

        name, pixels = bench.model(model, size)
        with_peers = bench.with_peers(peers)
        if unmerged:
            bench.rows, bench.notes = measure_forward(
                ForwardCase(name, batch, rank, pixels), bench.device, bench.dtype, bench.rates, runs=2 * runs + 1,
                peers=with_peers, progress=bench.progress,
            )  # fmt: skip
            return
        bench.rows, bench.notes = measure_swap(
            name, rank, bench.device, bench.dtype, bench.rates, runs=runs, peers=with_peers, progress=bench.progress
        )


def memory(
    context: typer.Context,
    model: ModelName = None,
    batch: Batch = 1,
    rank: Rank = 32,
    size: PixelSize = None,
    targets: Targets = "attention",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to time.")] = 5,
    peers: Peers = True,
    device: DeviceName = None,
    report: Report = None,
) -> None:
    """Measure the activation memory of a training step, and the savings and the cost of gradient checkpointing.

    Example: inweave bench memory --model sdxl --batch 2 --json memory.json
    """
    with measuring("memory", context, device, report) as bench:
        from inweave.bench.memory import measure_memory
        from inweave.bench.step import StepCase

        name, pixels = bench.model(model, size)
        with_peers = bench.with_peers(peers)
        bench.rows, bench.notes = measure_memory(
            StepCase(name, batch, rank, pixels, targets), bench.device, bench.dtype, runs=steps, peers=with_peers,
            progress=bench.progress,
        )  # fmt: skip


COMMANDS: dict[str, Callable[..., None]] = {
    "kernels": kernels, "step": step, "generate": generate, "swap": swap, "memory": memory,
}  # fmt: skip
