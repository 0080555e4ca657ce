"""`inweave generate`: images from a prompt, with any number of LoRAs."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from inweave.cli.adapters import lora_folders
from inweave.cli.console import INTERRUPTED, OK, print_json, print_lines, print_styled, reporting_errors
from inweave.cli.extras import require
from inweave.cli.options import JSON, Alpha, RankAlpha, Seed, supplied_alphas
from inweave.cli.output_files import Force, ImageNames, interrupts_wait
from inweave.cli.progress import Display, display, size
from inweave.errors import amount
from inweave.files.paths import is_folder, printable

if TYPE_CHECKING:
    from inweave.generate.config import GenerateConfig
    from inweave.generate.denoise import Progress
    from inweave.generate.pipeline import Pipeline
    from inweave.generate.source import ImageSettings
    from inweave.generate.sweep import Axis

MODEL = "inweave/emoji"
MODELS, EDIT, GRIDS = "Model and device", "Image to image and inpainting", "Grids"


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from standard input.")] = None,
    lora: Annotated[list[str] | None, typer.Option(
        "--lora", "-l", metavar="NAME[:STRENGTH]",
        help="A LoRA by file, name or hash: a:0.8, or a:TE:UNET. Repeat for more.")] = None,
    alpha: Alpha = None,
    rank_alpha: RankAlpha = None,
    out: Annotated[str | None, typer.Option(
        "--out", "-o",
        help="The image to write: .png, .jpg or .webp; name-{seed}.png; a folder/; - for standard output.",
        show_default="PROMPT-SEED.png")] = None,
    force: Force = False,
    negative: Annotated[str | None, typer.Option(
        "--negative", "-n", help="The negative prompt.", show_default="none")] = None,
    seed: Seed = None,
    steps: Annotated[int | None, typer.Option(
        "--steps", help="Sampling steps, 1 to 150.", show_default="the model's")] = None,
    guidance: Annotated[float | None, typer.Option(
        "--guidance", "-g", help="Guidance scale, 0 to 30.", show_default="the model's")] = None,
    width: Annotated[int | None, typer.Option(
        "--width", "-W", help="64 to 4096 pixels, a multiple of 8.", show_default="the model's")] = None,
    height: Annotated[int | None, typer.Option(
        "--height", "-H", help="64 to 4096 pixels, a multiple of 8.", show_default="the model's")] = None,
    sampler: Annotated[str | None, typer.Option(
        "--sampler", help="euler, euler_ancestral, dpm_solver_multistep (DPM++ 2M), uni_pc, ddim, lcm, ...; the names "
        "of A1111 and ComfyUI work too.", show_default="the model's")] = None,
    schedule: Annotated[str | None, typer.Option(
        "--schedule", help="Noise schedule: simple, karras, exponential, sgm_uniform, ddim_uniform, beta.",
        show_default="simple")] = None,
    clip_skip: Annotated[int | None, typer.Option(
        "--clip-skip", help="2 uses CLIP's second-to-last layer.", show_default="the model's")] = None,
    count: Annotated[int | None, typer.Option(
        "--count", "-c", help="How many images; the seed goes up by one for each.", show_default="1")] = None,
    batch: Annotated[str, typer.Option(
        "--batch", help="How many images are made together, at most: a number, or auto.")] = "auto",
    init: Annotated[str | None, typer.Option(
        "--init", help="An image to start from (image to image).", show_default="none", rich_help_panel=EDIT)] = None,
    strength: Annotated[float | None, typer.Option(
        "--strength", help="How much to change it: 0 keeps the image, 1 ignores it.", show_default="0.75",
        rich_help_panel=EDIT)] = None,
    mask: Annotated[str | None, typer.Option(
        "--mask", help="A mask image for inpainting: white is repainted.", show_default="none",
        rich_help_panel=EDIT)] = None,
    feather: Annotated[int | None, typer.Option(
        "--feather", help="Pixels over which the repainted area fades into the rest.", show_default="8",
        rich_help_panel=EDIT)] = None,
    grid: Annotated[list[str] | None, typer.Option(
        "--grid", help="A grid over strength=0,0.5,1 or seed=1,2,3; twice for rows and columns.",
        rich_help_panel=GRIDS)] = None,
    compare: Annotated[bool, typer.Option(
        "--compare", help="A grid: without LoRAs, with each one, with all.", rich_help_panel=GRIDS)] = False,
    repeat: Annotated[Path | None, typer.Option(
        "--from", help="Take the settings from an image of inweave, AUTOMATIC1111, Forge, ComfyUI or InvokeAI.",
        show_default="none")] = None,
    model: Annotated[str | None, typer.Option(
        "--model", "-m",
        help="inweave/emoji (built in), a diffusers folder, a checkpoint file, or a Hugging Face Hub id.",
        show_default="inweave/emoji", rich_help_panel=MODELS)] = None,
    lora_dir: Annotated[list[Path] | None, typer.Option(
        "--lora-dir", help="A folder where LoRA names are looked up.", show_default="./loras",
        rich_help_panel=MODELS)] = None,
    part: Annotated[list[str] | None, typer.Option(
        "--part", metavar="PART=FILE", help="A component that the checkpoint lacks: vae=ae.safetensors.",
        rich_help_panel=MODELS)] = None,
    variant: Annotated[str | None, typer.Option(
        "--variant", help="Which model a checkpoint is, if it cannot be detected: sd2.1-base, sdxl-turbo, ...",
        show_default="detected", rich_help_panel=MODELS)] = None,
    device: Annotated[str | None, typer.Option(
        "--device", help="auto, cpu, cuda, cuda:1, ...", show_default="auto", rich_help_panel=MODELS)] = None,
    dtype: Annotated[str | None, typer.Option(
        "--dtype", help="fp32, fp16 or bf16.", show_default="fp32 on a CPU, bf16 or fp16 on a GPU",
        rich_help_panel=MODELS)] = None,
    quantize: Annotated[str, typer.Option(
        "--quantize", help="Memory: int8, nf4, nf4-hadamard, int8-hadamard or fp8 quantizes the denoiser; keep: a "
        "checkpoint stored quantized (fp8, int8, bitsandbytes, GGUF) stays so; off: unpack it.",
        rich_help_panel=MODELS)] = "off",
    offload: Annotated[str, typer.Option(
        "--offload", help="Memory: blocks keeps the weights in host memory and copies them to the GPU block by block; "
        "auto: only if the model would not fit; off.", rich_help_panel=MODELS)] = "off",
    quantized_cache_gb: Annotated[float, typer.Option(
        "--quantized-cache-gb", help="Disk space for quantized denoisers, so that the next start maps a file; 0: none.",
        rich_help_panel=MODELS)] = 32.0,
    graph: Annotated[str, typer.Option(
        "--graph", help="Steps recorded in CUDA graphs, on an NVIDIA GPU: auto or off.",
        rich_help_panel=MODELS)] = "off",
    allow_download: Annotated[bool, typer.Option(
        "--allow-download", help="Allow a Hub model to be downloaded.", rich_help_panel=MODELS)] = False,
    as_json: JSON = False,
) -> None:  # fmt: skip
    """Generate images from a prompt, or from a prompt and an image, with any number of LoRAs.

    Example: inweave generate "a red apple" --lora pixel:0.8 --seed 7 -o apple.png
    """
    require("generate", as_json)
    saved: list[dict[str, Any]] = []
    options = {
        "prompt": prompt, "negative_prompt": negative, "seed": seed, "steps": steps, "guidance": guidance,
        "width": width, "height": height, "sampler": sampler, "schedule": schedule, "clip_skip": clip_skip,
        "count": count, "init": init, "strength": strength, "mask": mask, "feather": feather, "loras": lora or None,
    }  # fmt: skip
    # with -o - standard output is the image, and progress is shown only on a terminal
    with (
        reporting_errors(as_json),
        display(as_json or (out == "-" and not sys.stderr.isatty()), plain=True) as progress,
    ):
        from inweave.errors import ConfigError

        if out == "-" and as_json:
            raise ConfigError("--json and -o - both write to standard output; choose one")
        if model is not None and not model.strip():
            raise ConfigError("--model is empty; name a model, or leave it out for inweave/emoji")
        if out is not None and out != "-":
            _check_ending(out)
        progress.start("starting")
        from inweave.generate.batches import check_batch
        from inweave.generate.find import RequestFinder, check_request, with_alpha
        from inweave.generate.pipeline import pipeline
        from inweave.generate.repeat import (
            input_warnings,
            lora_warnings,
            model_of,
            model_warnings,
            with_possible_sampler,
        )
        from inweave.models.samplers import ensure_schedule

        check_batch(batch)
        source = _source(repeat)
        settings, model = source.config, model or model_of(source) or MODEL
        if prompt == "-":
            options["prompt"] = sys.stdin.read().strip()
        user_options = {name: value for name, value in options.items() if value is not None}
        repeats_schedule = "schedule" in settings and "schedule" not in user_options
        settings = settings | user_options
        if "prompt" not in settings:
            raise ConfigError('a prompt is needed: inweave generate "a red apple" -o apple.png')
        folders = lora_folders(lora_dir)
        finder = RequestFinder(folders, source.hashes)
        config = check_request(settings, finder)
        if config.seed in (None, -1):  # chosen now, since files are named after it, and the cells of a grid share it
            config = config.model_copy(update={"seed": secrets.randbits(32)}, check=False)
        output = ImageOutput(out, config, bool(grid or compare), force, saved)
        if config.sampler is not None and "sampler" in user_options and not repeats_schedule:
            ensure_schedule(config.sampler, config.schedule)
        axes = _axes(grid or [], compare)
        _check_inputs(config)
        warnings = [*source.warnings, *input_warnings(source, settings), *lora_warnings(config, finder)]
        if (alphas := supplied_alphas(alpha, rank_alpha)) is not None:
            config = config.model_copy(update={"loras": tuple(with_alpha(config.loras, finder, alphas))}, check=False)
        progress.start(f"loading {model}")
        pipe = pipeline(
            model, finder=finder, device=device, dtype=dtype, variant=variant, parts=_parts(part),
            allow_download=allow_download, quantize=quantize, offload=offload,  # type: ignore[arg-type]
            quantized_cache_gb=quantized_cache_gb, batch=batch, graph=graph,  # type: ignore[arg-type]
            progress=_on_part(progress, model),
        )  # fmt: skip
        config, unfit = with_possible_sampler(config, source, user_options, pipe.model)
        warnings += [*model_warnings(source, pipe.model.blueprint), *unfit]
        started = time.perf_counter()
        try:
            if grid or compare:
                done = _grid(pipe, config, axes, output, _on_step(progress))
            else:
                done = _images(pipe, config, output, _on_step(progress))
        except KeyboardInterrupt:
            progress.stop()
            _report_interrupt(saved, 1 if grid or compare else config.count, as_json)
    if pipe.model.quantization:
        done["quantization"] = pipe.model.quantization
    if (offloader := pipe.model.offloader) is not None:
        done["memory"] = {"offload": "blocks", **offloader.report()}
    done["warnings"] = list(dict.fromkeys((*warnings, *done["warnings"])))
    done["seconds"] = round(time.perf_counter() - started, 3)
    if as_json:
        print_json({"ok": True, **done})
    elif out != "-":
        for image in done["images"]:
            typer.echo(printable(f"{image['path']}  (seed {image['seed']})" if "seed" in image else image["path"]))
        print_lines((f"{row['name']}: {row['modules']} modules changed" for row in done["loras"]), "bright_black")
        print_lines(filter(None, [done.get("quantization"), _memory_line(done.get("memory"))]), "bright_black")
    if not as_json:
        for warning in done["warnings"]:
            print_styled(f"warning: {warning}", "yellow", err=True)
    raise typer.Exit(OK)


def _memory_line(memory: dict[str, Any] | None) -> str:
    """Return where the weights of an offloaded model were; "" for any other."""
    if memory is None:
        return ""
    host, device = (size(memory[name]) for name in ("host_bytes", "device_bytes"))
    return f"weights: {host} in host memory, at most {device} on the device at a time"


def _check_ending(out: str) -> None:
    """Raise ConfigError unless the name has the suffix of an image format, before anything is imported."""
    from inweave.files.image_names import format_of

    if not out.endswith(("/", os.sep)) and not is_folder(out):
        format_of(out)


def _report_interrupt(saved: list[dict[str, Any]], count: int, as_json: bool) -> NoReturn:
    """Report which images were saved before Ctrl-C, and exit."""
    message = f"stopped; {len(saved)} of {amount(count, 'image')} saved"
    if as_json:
        print_json({"ok": False, "error": message, "images": saved})
    else:
        for image in saved:
            typer.echo(printable(image["path"]))
        typer.echo(message, err=True)
    raise typer.Exit(INTERRUPTED)


class ImageOutput:
    """The output of a request: names are checked before work starts, each image is written when it is done."""

    def __init__(
        self, out: str | None, config: GenerateConfig, sheet: bool, force: bool, saved: list[dict[str, Any]]
    ) -> None:
        assert config.seed is not None
        self.stdout = out == "-"
        self.saved = saved
        count = 1 if sheet else config.count
        self._names = ImageNames.parse(None if self.stdout else out, config.prompts[0].text, count, force)
        self._paths = [] if self.stdout else self._names.paths(config.seed, count)

    def check_settings(self, record: Callable[[], dict[str, Any]]) -> None:
        """Raise ConfigError if the format cannot hold the settings."""
        from inweave.files.image_names import format_of
        from inweave.generate.saving import ensure_fits

        if self._paths and format_of(self._paths[0]) == "JPEG":
            ensure_fits(record(), "JPEG")

    def write(self, number: int, image: Any, record: dict[str, Any], **facts: Any) -> None:
        from inweave.generate.saving import encode_image, save_image

        if self.stdout:
            sys.stdout.buffer.write(encode_image(image, record))
            sys.stdout.buffer.flush()
            return
        path = self._names.free(self._paths[number])
        with interrupts_wait():  # a written file is also amount
            save_image(path, image, record)
            self.saved.append({"path": str(path), **facts})


def _source(image: Path | None) -> ImageSettings:
    """Return the settings of --from, or none."""
    from inweave.generate.record import read_settings
    from inweave.generate.source import ImageSettings

    return ImageSettings({}) if image is None else read_settings(image)


def _images(
    pipe: Pipeline, config: GenerateConfig, output: ImageOutput, progress: Callable[[Progress], None]
) -> dict[str, Any]:
    from inweave.generate.denoise import Callbacks

    def write(number: int, image: Any, record: dict[str, Any]) -> None:
        output.write(number, image, record, seed=record["config"]["seed"], settings=record["config"])

    request = pipe.prepare(config)
    output.check_settings(lambda: pipe.record(request))
    result = pipe.run(request, Callbacks(progress), write)
    return {
        "images": output.saved, "loras": [each.as_dict() for each in result.loras], "warnings": result.warnings,
        "batches": result.batches,
    }  # fmt: skip


def _axes(grid: list[str], comparing: bool) -> list[Axis]:
    """Parse the axes of --grid, before anything is loaded."""
    from inweave.errors import ConfigError
    from inweave.generate.sweep import Axis

    if grid and comparing:
        raise ConfigError("--grid and --compare each make a grid of their own; choose one")
    return [Axis.parse(text) for text in grid]


def _check_inputs(config: GenerateConfig) -> None:
    """Raise ConfigError if an input image is missing, before anything is loaded."""
    from inweave.errors import ConfigError
    from inweave.files.paths import exists, printable_path

    inputs = [(option, path) for option, path in (("init", config.init), ("mask", config.mask)) if path is not None]
    if wrong := [
        f"{option} {printable_path(path)}: no such file or directory" for option, path in inputs if not exists(path)
    ]:
        raise ConfigError(wrong)


def _grid(
    pipe: Pipeline,
    config: GenerateConfig,
    axes: list[Axis],
    output: ImageOutput,
    progress: Callable[[Progress], None],
) -> dict[str, Any]:
    """Write the sheet of a sweep over ``axes``, or of a comparison without axes."""
    from inweave.generate.sweep import compare, sweep

    output.check_settings(lambda: pipe.record(config))
    made = sweep(pipe, config, axes, progress=progress) if axes else compare(pipe, config, progress=progress)
    results = [result for line in made.results for result in line]
    output.write(0, made.sheet.render(), made.record, cells=[result.records[0]["config"] for result in results])
    loras = {each.name: each.as_dict() for result in results for each in result.loras}
    warnings = list(dict.fromkeys(warning for result in results for warning in result.warnings))
    return {
        "images": output.saved, "loras": list(loras.values()), "warnings": warnings,
        "batches": [count for result in results for count in result.batches],
        "merge_reasons": list(dict.fromkeys(result.merge_reason for result in results if result.merge_reason)),
    }  # fmt: skip


def _parts(options: list[str] | None) -> dict[str, str]:
    from inweave.errors import ConfigError

    pairs = [text.partition("=") for text in options or []]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise ConfigError(f"--part {wrong[0]}: write PART=FILE, such as vae=ae.safetensors")
    return {name: path for name, _, path in pairs}


def _on_part(progress: Display, model: str) -> Callable[[str, int, int], None]:
    """Return the loader's progress callback: the part of the model, and the bytes of all parts."""

    def show(part: str, done: int, total: int) -> None:
        progress.update(f"loading {model}", done, total, f"{size(done)} of {size(total)}, {part}")

    return show


def _on_step(progress: Display) -> Callable[[Progress], None]:
    """Return the pipeline's progress callback: the steps of all images together."""

    def show(at: Progress) -> None:
        activity = f"image {at.image + 1} of {at.images}" if at.images > 1 else "generating"
        if at.batch > 1:
            activity = f"images {at.finished + 1} to {at.finished + at.batch} of {at.images}"
        progress.update(activity, at.done, at.work)

    return show
