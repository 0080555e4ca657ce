"""`inweave generate`: a prompt becomes pictures, with any stack of LoRAs."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inweave.cli.merge import need_torch
from inweave.cli.output import OK, print_json, printable, reporting_errors

if TYPE_CHECKING:
    from inweave.generate.config import GenerateConfig
    from inweave.generate.denoise import Progress
    from inweave.generate.pipeline import Pipeline, Result

MODEL = "inweave/emoji"


def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to show; - reads it from standard input.")] = None,
    lora: Annotated[list[str] | None, typer.Option("--lora", "-l", metavar="NAME[:STRENGTH]", help="A LoRA by file or name; again for more. a:0.8, a:TE:UNET.")] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="A .png file; - writes the PNG to standard output.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="inweave/emoji (built in), a diffusers folder, a checkpoint, or a hub id.")] = None,
    negative: Annotated[str | None, typer.Option("--negative", "-n", help="What to keep away from.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", "-s", help="Same seed, same picture.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="1 to 150.")] = None,
    guidance: Annotated[float | None, typer.Option("--guidance", "-g", help="0 to 30.")] = None,
    width: Annotated[int | None, typer.Option("--width", "-W", help="64 to 4096, by 8.")] = None,
    height: Annotated[int | None, typer.Option("--height", "-H", help="64 to 4096, by 8.")] = None,
    sampler: Annotated[str | None, typer.Option("--sampler", help="euler, euler_ancestral, ddim, ddpm, dpm_solver_multistep, uni_pc.")] = None,
    schedule: Annotated[str | None, typer.Option("--schedule", help="simple, karras, exponential, sgm_uniform, ddim_uniform.")] = None,
    clip_skip: Annotated[int | None, typer.Option("--clip-skip", help="2 takes CLIP's layer before the last.")] = None,
    count: Annotated[int | None, typer.Option("--count", "-c", help="Pictures, with seeds counting up.")] = None,
    init: Annotated[str | None, typer.Option("--init", help="A picture to start from.")] = None,
    strength: Annotated[float | None, typer.Option("--strength", help="How far to leave it: 0 keeps it, 1 forgets it.")] = None,
    mask: Annotated[str | None, typer.Option("--mask", help="Where to repaint: white.")] = None,
    feather: Annotated[int | None, typer.Option("--feather", help="Pixels over which new fades into old.")] = None,
    grid: Annotated[list[str] | None, typer.Option("--grid", help="A sheet over strength=0,0.5,1 or seed=1,2,3; twice for a table.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="A sheet: without LoRAs, with each, with all.")] = False,
    repeat: Annotated[Path | None, typer.Option("--from", help="A picture to repeat, from the settings in it.")] = None,
    lora_dir: Annotated[list[Path] | None, typer.Option("--lora-dir", help="Where LoRA names are looked up (default: ./loras).")] = None,
    part: Annotated[list[str] | None, typer.Option("--part", metavar="PART=FILE", help="A part a checkpoint lacks: vae=ae.safetensors.")] = None,
    variant: Annotated[str | None, typer.Option("--variant", help="Say which model a checkpoint is: sd2.1-base, sdxl-turbo ...")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1 ...")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="fp32, fp16, bf16.")] = None,
    allow_download: Annotated[bool, typer.Option("--allow-download", help="A hub id may be fetched.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> None:  # fmt: skip
    """Generate pictures from text, or from text and a picture, with stacked LoRAs."""
    need_torch(as_json)
    from inweave.errors import ConfigError
    from inweave.generate.find import LoraFinder, checked_request
    from inweave.generate.pipeline import pipeline

    with reporting_errors(as_json):
        if out == "-" and as_json:
            raise ConfigError("--json and -o - both write to standard output; choose one")
        settings: dict[str, Any] = {}
        if repeat is not None:
            from inweave.generate.record import read_record

            record = read_record(repeat)
            settings, model = record["config"], model or record["model"].get("name")
        text = sys.stdin.read().strip() if prompt == "-" else prompt
        given = {
            "prompt": text, "negative_prompt": negative, "seed": seed, "steps": steps, "guidance": guidance, "width": width,
            "height": height, "sampler": sampler, "schedule": schedule, "clip_skip": clip_skip, "count": count,
            "init": init, "strength": strength, "mask": mask, "feather": feather, "loras": lora or None,
        }  # fmt: skip
        settings = settings | {name: value for name, value in given.items() if value is not None}
        if "prompt" not in settings:
            raise ConfigError('a prompt is needed: inweave generate "a red apple" -o apple.png')
        folders = lora_dir or [place for place in (Path("loras"),) if place.is_dir()]
        config = checked_request(settings, LoraFinder(folders))
        pipe = pipeline(
            model or MODEL, lora_folders=folders, device=device, dtype=dtype, variant=variant, parts=_parts(part),
            allow_download=allow_download,
        )  # fmt: skip
        started = time.perf_counter()
        if grid or compare:
            done = _sheet(pipe, config, grid or [], compare, out, as_json)
        else:
            done = _pictures(pipe, config, out, as_json)
    done["seconds"] = round(time.perf_counter() - started, 3)
    if as_json:
        print_json({"ok": True, **done})
    elif out != "-":
        for image in done["images"]:
            typer.echo(printable(f"{image['path']}  (seed {image['seed']})" if "seed" in image else image["path"]))
        for row in done["loras"]:
            typer.secho(printable(f"  {row['name']}: {row['modules']} modules changed"), fg="bright_black")
    if not as_json:
        for warning in done["warnings"]:
            typer.secho(printable(f"warning: {warning}"), fg="yellow", err=True)
    raise typer.Exit(OK)


def _pictures(pipe: Pipeline, config: GenerateConfig, out: str | None, quiet: bool) -> dict[str, Any]:
    with _bar(quiet) as progress:
        result = pipe(config, progress=progress)
    images = []
    for number, record in enumerate(result.records):
        seed = record["config"]["seed"]
        if out == "-":
            _to_stdout(result, number)
            continue
        path = _place(out, config.prompt, seed, number, len(result.images))
        result.save(path, number)
        images.append({"path": str(path), "seed": seed, "settings": record["config"]})
    return {"images": images, "loras": [each.as_dict() for each in result.loras], "warnings": result.warnings}


def _sheet(
    pipe: Pipeline, config: GenerateConfig, grid: list[str], compared: bool, out: str | None, quiet: bool
) -> dict[str, Any]:
    from inweave.errors import ConfigError
    from inweave.generate.sweep import Axis, compare, sweep

    if grid and compared:
        raise ConfigError("--grid and --compare make one sheet each; choose one")
    if config.seed in (None, -1):  # one seed for the whole sheet, or its cells could not be compared
        config = config.model_copy(update={"seed": pipe.settle(config).config.seed})
    with _bar(quiet) as progress:
        if grid:
            made = sweep(pipe, config, [Axis.read(text) for text in grid], progress=progress)
        else:
            made = compare(pipe, config, progress=progress)
    image = made.sheet.draw()
    results = [result for line in made.results for result in line]
    path = "-"
    if out == "-":
        image.save(sys.stdout.buffer, format="PNG")
    else:
        found = _place(out, config.prompt, config.seed or 0, 0, 1)
        image.save(found, format="PNG")
        path = str(found)
    loras = {each.name: each.as_dict() for result in results for each in result.loras}
    cells = [result.records[0]["config"] for result in results]
    warnings = list(dict.fromkeys(warning for result in results for warning in result.warnings))
    return {"images": [{"path": path, "cells": cells}], "loras": list(loras.values()), "warnings": warnings}


def _to_stdout(result: Result, number: int) -> None:
    from inweave.generate.record import png_text

    result.images[number].save(sys.stdout.buffer, format="PNG", pnginfo=png_text(result.records[number]))
    sys.stdout.buffer.flush()


def _place(out: str | None, prompt: str, seed: int, number: int, total: int) -> Path:
    """Where picture ``number`` goes; without a name of its own it never replaces a file."""
    from inweave.errors import ConfigError

    if out is not None:
        path = Path(out)
        if path.suffix.lower() != ".png":
            raise ConfigError(f"{out}: pictures are written as PNG; end the name in .png")
        if not path.parent.is_dir():
            raise ConfigError(f"{out}: there is no folder {path.parent}")
        return path if total == 1 else path.with_name(f"{path.stem}-{number + 1}{path.suffix}")
    stem = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:48] or "picture"
    path = Path(f"{stem}-{seed}.png")
    copy = 2
    while path.exists():
        path, copy = Path(f"{stem}-{seed}-{copy}.png"), copy + 1
    return path


def _parts(said: list[str] | None) -> dict[str, str]:
    from inweave.errors import ConfigError

    pairs = [text.partition("=") for text in said or []]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise ConfigError(f"--part {wrong[0]}: write PART=FILE, such as vae=ae.safetensors")
    return {name: path for name, _, path in pairs}


@contextmanager
def _bar(quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """A live bar on a terminal; in a pipe nothing."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("generating", total=None)

        def told(at: Any) -> None:
            done = at.picture * at.total + at.step
            name = f"picture {at.picture + 1} of {at.pictures}" if at.pictures > 1 else "generating"
            bar.update(task, description=name, completed=done, total=at.total * at.pictures)

        yield told
