"""`inweave bench`: the quality of the built-in model and its styles, and the cost of a LoRA.

Speed and memory compared with other libraries (kernels, step, swap, memory) are in `inweave.cli.bench_speed`, the
simulation of many runners in `inweave.cli.bench_cluster`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from inweave.cli import bench_bars, bench_cluster, bench_speed
from inweave.cli.console import OK, PROBLEMS, print_facts, print_json, reporting_errors
from inweave.cli.extras import require
from inweave.cli.options import JSON
from inweave.cli.progress import display

bench_app = typer.Typer(no_args_is_help=True, help="Measure quality and speed.")


@bench_app.callback()
def group() -> None:
    """Measure quality and speed."""


for name, command in {**bench_speed.COMMANDS, "cluster": bench_cluster.cluster}.items():
    bench_app.command(name)(command)


@bench_app.command("embedded")
def embedded(
    captions: Annotated[
        int, typer.Option("--captions", min=2, max=256, help="How many captions to generate for recall.")
    ] = 256,
    styled: Annotated[
        int, typer.Option("--styled", min=2, max=64, help="How many images to generate with each LoRA.")
    ] = 16,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, max=150, help="Sampling steps per image.", show_default="20")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", "-s", help="Random seed of every image.")] = 0,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            "--lora", metavar="STYLE=FILE", help="A LoRA trained on inweave/STYLE, instead of the bundled ones."
        ),
    ] = None,
    bars: Annotated[
        str | None,
        typer.Option(
            "--bars",
            metavar="NAMES",
            show_default="none",
            help="Measure what a model for adapters must reach, instead: all, or some of subjects, seeds, colors, "
            "counts, pairs, seams, style, identity, stack, with commas between.",
        ),
    ] = None,
    share: Annotated[
        float, typer.Option("--share", min=0.01, max=1, help="Of --bars: measure this share of the images.")
    ] = 1.0,
    held_out: Annotated[
        Path | None,
        typer.Option(
            "--held-out", metavar="FOLDER", help="Of --bars: captioned images of an unknown style.", show_default="none"
        ),
    ] = None,
    sheets: Annotated[
        Path | None,
        typer.Option("--sheets", metavar="FOLDER", help="Of --bars: write the images as sheets.", show_default="none"),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Of --bars: another version of the model, as a folder.")
    ] = "inweave/emoji",
    guidance: Annotated[
        float | None, typer.Option("--guidance", help="Of --bars.", show_default="the model's own")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Of --bars: auto, cpu, cuda, ...", show_default="auto")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Measure the built-in model: recall of captions, and distance of its LoRAs to their styles; or its bars.

    Example: inweave bench embedded --captions 64
    Example: inweave bench embedded --bars subjects,seeds --share 0.1
    """
    require("generate", as_json)
    if bars is not None:
        adapters = dict(_style_and_file(text) for text in lora) if lora else {}
        settings = {} if guidance is None else {"guidance": guidance}
        bench_bars.report(
            bars, model, device, settings | ({"steps": steps} if steps else {}), as_json,
            share=share, held_out=held_out, sheets=sheets, loras=adapters,
        )  # fmt: skip
    with reporting_errors(as_json), display(as_json, plain=True) as progress:
        started = time.perf_counter()
        loras = dict(_style_and_file(text) for text in lora) if lora else None
        progress.start("loading inweave/emoji")
        from inweave.bench.measure import measure
        from inweave.generate.pipeline import pipeline

        pipe = pipeline("inweave/emoji")
        figures = measure(
            pipe, captions=captions, styled=styled, steps=steps or 20, seed=seed, loras=loras, progress=progress.update
        )
        figures["seconds"] = round(time.perf_counter() - started, 1)
    if as_json:
        print_json({"ok": True, **figures})
    else:
        recall = figures["recall"]
        rows = [
            (
                "recall",
                f"{recall['top1']:.3f} of {recall['captions']:.0f} captions are nearest to their own image, "
                f"{recall['top5']:.3f} among the five nearest",
            )
        ]
        rows += [
            (
                name,
                f"distance {row['to_style']:.3f} to the style, {row['to_base']:.3f} to the base "
                f"(ratio {row['ratio']:.2f}); {row['share']:.0%} of images are nearer to the style",
            )
            for name, row in figures["styles"].items()
        ]
        rows += [("time", f"{figures['seconds']} s, {figures['seconds_per_image']:.2f} s per image")]
        print_facts("inweave/emoji", rows)
    raise typer.Exit(OK)


@bench_app.command("lora")
def lora_cost(
    lora: Annotated[str, typer.Option("--lora", metavar="NAME[:STRENGTH]", help="The LoRA to measure.")] = "pixel:0.8",
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, help="How often to measure.")] = 5,
    steps: Annotated[int, typer.Option("--steps", min=1, max=150, help="Sampling steps per image.")] = 20,
    device: Annotated[
        str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...", show_default="auto")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Measure what a LoRA adds to the time of an image of the built-in model; exit code 1 above the limit.

    Example: inweave bench lora --lora pixel:0.8
    """
    require("generate", as_json)
    with reporting_errors(as_json), display(as_json, plain=True) as progress:
        progress.start("loading inweave/emoji")
        from inweave.bench.cost import measure_cost
        from inweave.generate.pipeline import pipeline

        pipe = pipeline("inweave/emoji", device=device)
        figures = measure_cost(pipe, lora, rounds=rounds, steps=steps, progress=progress.update)
    is_cheap = figures["ratio"] <= figures["limit"]
    if as_json:
        print_json({"ok": is_cheap, **figures})
    else:
        share = f"{figures['ratio'] - 1:+.1%}, limit {figures['limit'] - 1:+.0%}"
        rows = [("base", f"{figures['base']:.3f} s"), ("with LoRA", f"{figures['lora']:.3f} s ({share})")]
        print_facts(lora, rows)
    raise typer.Exit(OK if is_cheap else PROBLEMS)


def _style_and_file(text: str) -> tuple[str, str]:
    from inweave.errors import ConfigError

    style, equals, file = text.partition("=")
    if not (style and equals and file):
        raise ConfigError(f"--lora {text}: write STYLE=FILE, such as pixel=out/lora.safetensors")
    return style, file
