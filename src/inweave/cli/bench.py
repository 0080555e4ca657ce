"""`inweave bench embedded`: how well the built-in model draws what it is asked for, and how clearly a style shows."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from inweave.cli.merge import need_torch
from inweave.cli.output import OK, print_facts, print_json, reporting_errors

bench_app = typer.Typer(no_args_is_help=True, help="Measure: quality and speed, as figures.")


@bench_app.callback()
def group() -> None:
    """Measure: quality and speed, as figures."""


@bench_app.command("embedded")
def embedded(
    captions: Annotated[
        int, typer.Option("--captions", min=2, max=256, help="How many captions to draw for recall.")
    ] = 256,
    styled: Annotated[int, typer.Option("--styled", min=2, max=64, help="How many to draw with each LoRA.")] = 16,
    steps: Annotated[int, typer.Option("--steps", min=1, max=150)] = 20,
    seed: Annotated[int, typer.Option("--seed", "-s")] = 0,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            "--lora", metavar="STYLE=FILE", help="A LoRA trained on inweave/STYLE, instead of the shipped ones."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Recall of captions and distance to styles, of the model inside the package."""
    need_torch(as_json)
    from inweave.bench.drive import measure
    from inweave.generate.pipeline import pipeline

    with reporting_errors(as_json):
        started = time.perf_counter()
        given = dict(_style_and_file(text) for text in lora) if lora else None
        pipe = pipeline("inweave/emoji")
        found = measure(pipe, captions=captions, styled=styled, steps=steps, seed=seed, loras=given)
        found["seconds"] = round(time.perf_counter() - started, 1)
    if as_json:
        print_json({"ok": True, **found})
    else:
        rows = [
            (
                "recall",
                f"{found['recall']['top1']:.3f} of {found['recall']['captions']:.0f} captions nearest to their own picture, {found['recall']['top5']:.3f} among the five nearest",
            )
        ]
        rows += [
            (
                name,
                f"to the style {row['to_style']:.3f}, to the base {row['to_base']:.3f} (ratio {row['ratio']:.2f}); {row['share']:.0%} of pictures nearer to the style",
            )
            for name, row in found["styles"].items()
        ]
        rows += [("time", f"{found['seconds']} s, {found['seconds_a_picture']:.2f} s a picture")]
        print_facts("inweave/emoji", rows)
    raise typer.Exit(OK)


def _style_and_file(text: str) -> tuple[str, str]:
    from inweave.errors import ConfigError

    style, equals, file = text.partition("=")
    if not (style and equals and file):
        raise ConfigError(f"--lora {text}: write STYLE=FILE, such as pixel=out/lora.safetensors")
    return style, file
