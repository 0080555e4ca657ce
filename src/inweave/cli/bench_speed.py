"""`inweave bench kernels`, `step`, `swap`, `memory`: speed and memory, beside diffusers + PEFT where they are installed.

Each prints a table and writes the same figures with machine, versions, date and command to `--json FILE`, from which
docs/benchmarks.md is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inweave.cli.extras import require
from inweave.cli.output import OK, print_facts, print_lines, print_styled, reporting_errors
from inweave.cli.progress import display

if TYPE_CHECKING:
    from inweave.bench.bench import Bench


class Switch(StrEnum):
    """off or on."""

    off = "off"
    on = "on"


class Checkpointing(StrEnum):
    """What the backward pass recomputes."""

    off = "off"
    selective = "selective"
    full = "full"


class Quantize(StrEnum):
    """What the frozen base is multiplied in."""

    off = "off"
    fp8 = "fp8"


Report = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the figures to this file as JSON.", show_default="none"),
]
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
    typer.Option("--size", min=16, help="Width and height of the images in pixels.", show_default="the model's own"),
]
Rank = Annotated[int, typer.Option("--rank", min=1, help="Rank of the LoRA.")]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Images per step.")]
Targets = Annotated[
    str,
    typer.Option(
        "--targets",
        help="Modules with a LoRA, as in training: attention, attention-mlp, all; or listed: those of diffusers' Flux script.",
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
    tiny: Annotated[bool, typer.Option("--tiny", help="The same rows at sizes for a test.")] = False,
    replays: Annotated[int, typer.Option("--replays", min=1, help="How often a CUDA graph is replayed.")] = 200,
    device: DeviceName = None,
    report: Report = None,
) -> None:
    """Measure kernels by themselves beside plain torch.

    Example: inweave bench kernels lora --json kernels.json
    """
    with measuring("kernels", context, device, report) as bench:
        from inweave.bench.kernel_cases import GROUPS
        from inweave.bench.kernels import measure_kernels

        chosen = groups or list(GROUPS)
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
        Quantize, typer.Option("--quantize", help="Quantize the frozen base: off, fp8.")
    ] = Quantize.off,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps that are timed.")] = 10,
    warmup: Annotated[int, typer.Option("--warmup", min=1, help="Steps before them.")] = 4,
    peers: Peers = True,
    peers_compiled: Annotated[
        bool, typer.Option("--peers-compiled", help="Measure the peers compiled and in CUDA graphs too.")
    ] = False,
    train_steps: Annotated[
        int | None,
        typer.Option(
            "--train",
            min=20,
            metavar="STEPS",
            show_default="none",
            help="Measure so many steps of inweave train instead, data and log included, beside the step alone.",
        ),
    ] = None,
    device: DeviceName = None,
    report: Report = None,
) -> None:
    """Measure a training step of a full-size model with random weights: forward, backward, clipping, AdamW.

    Example: inweave bench step --model sdxl --batch 4 --peers-compiled --json step.json
    """
    with measuring("step" if train_steps is None else "train", context, device, report) as bench:
        from inweave.bench.step import StepCase, measure_step, peer_kinds
        from inweave.bench.train_command import measure_training

        name, pixels = bench.model(model, size)
        recorded = graph or (Switch.on if bench.device.type == "cuda" else Switch.off)
        case = StepCase(
            name, batch, rank, pixels, targets, recorded.value, compiled.value, checkpointing.value, quantize.value, deterministic
        )  # fmt: skip
        if train_steps is not None:
            bench.rows, bench.notes = measure_training(
                case, bench.device, bench.dtype, bench.rates, steps=train_steps, runs=steps, progress=bench.progress
            )
            return
        kinds = peer_kinds(bench.device, compiled=peers_compiled) if peers else []
        bench.rows, bench.notes = measure_step(
            case, bench.device, bench.dtype, bench.rates, runs=steps, warmup=warmup, peers=kinds, progress=bench.progress
        )  # fmt: skip


def swap(
    context: typer.Context,
    model: ModelName = None,
    rank: Rank = 32,
    runs: Annotated[int, typer.Option("--runs", min=1, help="How often each is timed.")] = 7,
    unmerged: Annotated[
        bool,
        typer.Option(
            "--unmerged", help="Measure a forward pass with 1 and 3 LoRAs beside the weights, in place of swaps."
        ),
    ] = False,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images of that pass.")] = 2,
    size: PixelSize = None,
    peers: Peers = True,
    device: DeviceName = None,
    report: Report = None,
) -> None:
    """Measure swapping LoRAs in a full-size model with random weights, from memory and from files.

    Example: inweave bench swap --model sdxl --json swap.json
    """
    with measuring("unmerged" if unmerged else "swap", context, device, report) as bench:
        from inweave.bench.forward import ForwardCase, measure_forward
        from inweave.bench.step import peer_kinds
        from inweave.bench.swap import measure_swap

        name, pixels = bench.model(model, size)
        with_peers = peers and bool(peer_kinds(bench.device, compiled=False))
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
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps that are timed.")] = 5,
    peers: Peers = True,
    device: DeviceName = None,
    report: Report = None,
) -> None:
    """Measure the activation memory of a training step, and what gradient checkpointing saves and costs.

    Example: inweave bench memory --model sdxl --batch 2 --json memory.json
    """
    with measuring("memory", context, device, report) as bench:
        from inweave.bench.memory import measure_memory
        from inweave.bench.step import StepCase, peer_kinds

        name, pixels = bench.model(model, size)
        with_peers = peers and bool(peer_kinds(bench.device, compiled=False))
        bench.rows, bench.notes = measure_memory(
            StepCase(name, batch, rank, pixels, targets), bench.device, bench.dtype, runs=steps, peers=with_peers,
            progress=bench.progress,
        )  # fmt: skip


COMMANDS: dict[str, Callable[..., None]] = {"kernels": kernels, "step": step, "swap": swap, "memory": memory}


@contextmanager
def measuring(name: str, context: typer.Context, device: str | None, file: Path | None) -> Iterator[Bench]:
    """Set up a benchmark; after the block print what it found, and write it to the file."""
    require("train", False)
    with reporting_errors(False):
        with display(plain=True) as screen:
            screen.start("loading torch")
            from inweave.bench.bench import Bench

            bench = Bench(device, screen.start)
            yield bench
        from inweave.bench.report import table

        made = bench.report(name, command_line(context))
        if file is not None:
            made.write(file)
        versions = ", ".join(f"{library} {version}" for library, version in made.versions.items())
        print_facts(made.command, [("machine", made.machine["device"]), ("date", made.date), ("versions", versions)])
        print_table(table(bench.rows))
        print_lines(made.notes)
    raise typer.Exit(OK)


def print_table(lines: Sequence[Sequence[str]]) -> None:
    """Aligned columns: names to the left, figures to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for number, line in enumerate(lines):
        cells = [
            f"{line[0]:<{widths[0]}}",
            *(f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        print_styled("  " + "  ".join(cells), bold=number == 0)


def command_line(context: typer.Context) -> str:
    """The command with the options that were given, without the file of its figures."""
    path = context.command_path.split()
    words = ["inweave", *path[path.index("bench") :]]
    for parameter in context.command.params:
        if parameter.name is None or str(context.get_parameter_source(parameter.name)) != "ParameterSource.COMMANDLINE":
            continue
        value: Any = context.params[parameter.name]
        if parameter.param_type_name == "argument":
            words += [str(each) for each in value]
        elif parameter.opts[0] != "--json":
            flag: Any = parameter
            switched = flag.secondary_opts[0] if flag.is_flag and value is False else flag.opts[0]
            words += [switched] if flag.is_flag else [switched, str(getattr(value, "value", value))]
    return " ".join(words)
