"""`inweave generate`: images from a prompt, with any number of LoRAs."""

from __future__ import annotations

import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inweave.cli.adapters import lora_folders, present
from inweave.cli.console import OK, print_json, print_lines, print_styled, reporting_errors
from inweave.cli.extras import require
from inweave.cli.generate_output import (
    ImageOutput,
    axes_of,
    check_ending,
    check_inputs,
    init_files,
    memory_line,
    on_part,
    on_step,
    parts_of,
    report_interrupt,
    sides_of,
    source_of,
    upscale_of,
    write_folder,
    write_grid,
    write_images,
)
from inweave.cli.options import JSON, Alpha, RankAlpha, Seed, supplied_alphas
from inweave.cli.output_files import Force
from inweave.cli.progress import display
from inweave.errors import amount
from inweave.files.paths import printable

if TYPE_CHECKING:
    from inweave.generate.pipeline import Pipeline

MODEL = "inweave/emoji"
MODELS, EDIT, GRIDS = "Model and device", "Image to image and inpainting", "Grids"
UPSCALE, PROMPTS = "Upscale (hires fix)", "Styles and wildcards"


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
        "--init", help="An image to start from (image to image), or a folder of them.", show_default="none",
        rich_help_panel=EDIT)] = None,
    strength: Annotated[float | None, typer.Option(
        "--strength", help="How much to change it: 0 keeps the image, 1 ignores it.", show_default="0.75",
        rich_help_panel=EDIT)] = None,
    mask: Annotated[str | None, typer.Option(
        "--mask", help="A mask image for inpainting: white is repainted.", show_default="none",
        rich_help_panel=EDIT)] = None,
    feather: Annotated[int | None, typer.Option(
        "--feather", help="Pixels over which the repainted area fades into the rest.", show_default="8",
        rich_help_panel=EDIT)] = None,
    reference: Annotated[list[str] | None, typer.Option(
        "--reference", metavar="IMAGE...", help="Images that an edit model (FLUX.1 Kontext, FLUX.2) "
        "sees, in order.", show_default="none", rich_help_panel=EDIT)] = None,
    outpaint: Annotated[str | None, typer.Option(
        "--outpaint", metavar="SIDE=PIXELS,...", help="Extend the image: left=64,right=64; also top, bottom, blend.",
        show_default="none", rich_help_panel=EDIT)] = None,
    upscale: Annotated[float | None, typer.Option(
        "--upscale", help="Hires fix: enlarge the image, 1.5 or 2 times, and paint it again at that size.",
        show_default="none", rich_help_panel=UPSCALE)] = None,
    upscaler: Annotated[str | None, typer.Option(
        "--upscaler", help="lanczos, bicubic, nearest, latent, latent-bicubic, ..., or the file of an ESRGAN-type "
        "network.", show_default="lanczos", rich_help_panel=UPSCALE)] = None,
    upscale_strength: Annotated[float | None, typer.Option(
        "--upscale-strength", help="How much is painted again; 0 only enlarges.", show_default="0.4",
        rich_help_panel=UPSCALE)] = None,
    upscale_steps: Annotated[int | None, typer.Option(
        "--upscale-steps", help="Sampling steps at the new size, of which the strength is made.",
        show_default="those of --steps", rich_help_panel=UPSCALE)] = None,
    upscale_tile: Annotated[int | None, typer.Option(
        "--upscale-tile", help="Side of the tiles that are painted one by one, so that memory follows a tile; 0: none.",
        show_default="for large images", rich_help_panel=UPSCALE)] = None,
    upscalers: Annotated[list[Path] | None, typer.Option(
        "--upscalers", metavar="DIR", help="A folder of upscalers.", show_default="./upscalers",
        rich_help_panel=UPSCALE)] = None,
    style: Annotated[list[str] | None, typer.Option(
        "--style", help="A style of the file of styles; repeat for more.", show_default="none",
        rich_help_panel=PROMPTS)] = None,
    styles: Annotated[Path | None, typer.Option(
        "--styles", metavar="FILE", help="The file of styles, as A1111 keeps them.", show_default="./styles.csv",
        rich_help_panel=PROMPTS)] = None,
    wildcards: Annotated[list[Path] | None, typer.Option(
        "--wildcards", metavar="DIR", help="A folder of the text files that __name__ in prompts means.",
        show_default="./wildcards", rich_help_panel=PROMPTS)] = None,
    grid: Annotated[list[str] | None, typer.Option(
        "--grid", help="A grid over strength, seed, steps, guidance, denoise, sampler, schedule, prompt, style or "
        "model: strength=0,0.5,1; twice for rows and columns.", rich_help_panel=GRIDS)] = None,
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
    options: dict[str, Any] = {
        "prompt": prompt, "negative_prompt": negative, "seed": seed, "steps": steps, "guidance": guidance,
        "width": width, "height": height, "sampler": sampler, "schedule": schedule, "clip_skip": clip_skip,
        "count": count, "init": init, "strength": strength, "mask": mask, "feather": feather, "loras": lora or None,
        "references": reference or None,
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
            check_ending(out)
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
        from inweave.generate.templates import PromptSources
        from inweave.models.samplers import ensure_schedule

        check_batch(batch)
        source = source_of(repeat)
        settings, model = source.config, model or model_of(source) or MODEL
        if prompt == "-":
            options["prompt"] = sys.stdin.read().strip()
        options["styles"] = style or None
        options["outpaint"] = sides_of(outpaint)
        options["upscale"] = upscale_of(
            settings.get("upscale"), scale=upscale, upscaler=upscaler, strength=upscale_strength, steps=upscale_steps,
            tile=upscale_tile,
        )  # fmt: skip
        user_options = {name: value for name, value in options.items() if value is not None}
        if user_options.keys() & {"prompt", "negative_prompt", "styles"}:
            settings.pop("template", None)  # of the prompts of the image
        repeats_schedule = "schedule" in settings and "schedule" not in user_options
        settings = settings | user_options
        if "prompt" not in settings:
            raise ConfigError('a prompt is needed: inweave generate "a red apple" -o apple.png')
        folders = lora_folders(lora_dir)
        finder = RequestFinder(folders, source.hashes)
        prompts = PromptSources(present(wildcards, "wildcards"), next(iter(present(styles, "styles.csv")), None))
        config = check_request(settings, finder, prompts)
        if config.seed in (None, -1):  # chosen now, since files are named after it, and the cells of a grid share it
            config = config.model_copy(update={"seed": secrets.randbits(32)}, check=False)
        files = init_files(config, bool(grid or compare))
        output = ImageOutput(out, config, bool(grid or compare), force, saved, files)
        if config.sampler is not None and "sampler" in user_options and not repeats_schedule:
            ensure_schedule(config.sampler, config.schedule)
        axes = axes_of(grid or [], compare)
        check_inputs(config)
        warnings = [*source.warnings, *input_warnings(source, settings), *lora_warnings(config, finder)]
        if (alphas := supplied_alphas(alpha, rank_alpha)) is not None:
            config = config.model_copy(update={"loras": tuple(with_alpha(config.loras, finder, alphas))}, check=False)
        progress.start(f"loading {model}")

        def open_model(name: str) -> Pipeline:
            return pipeline(
                name, finder=finder, device=device, dtype=dtype, variant=variant, parts=parts_of(part),
                allow_download=allow_download, quantize=quantize, offload=offload,  # type: ignore[arg-type]
                quantized_cache_gb=quantized_cache_gb, batch=batch, graph=graph,  # type: ignore[arg-type]
                wildcards=prompts.wildcards.folders, styles=prompts.styles.path,
                upscalers=present(upscalers, "upscalers"), progress=on_part(progress, name),
            )  # fmt: skip

        pipe = open_model(model)
        config, unfit = with_possible_sampler(config, source, user_options, pipe.model)
        warnings += [*model_warnings(source, pipe.model.blueprint), *unfit]
        started = time.perf_counter()
        try:
            if grid or compare:
                done = write_grid(pipe, config, axes, output, on_step(progress), open_model)
            elif files is not None:
                done = write_folder(pipe, config, files, output, progress)
            else:
                done = write_images(pipe, config, output, on_step(progress))
        except KeyboardInterrupt:
            progress.stop()
            report_interrupt(saved, 1 if grid or compare else config.count * len(files or [1]), as_json)
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
        print_lines(
            (f"{row['name']}: {amount(row['modules'], 'module')} changed" for row in done["loras"]), "bright_black"
        )
        print_lines(filter(None, [done.get("quantization"), memory_line(done.get("memory"))]), "bright_black")
    if not as_json:
        for warning in done["warnings"]:
            print_styled(f"warning: {warning}", "yellow", err=True)
    raise typer.Exit(OK)
