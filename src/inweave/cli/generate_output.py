"""What `inweave generate` does besides its options: names of files, progress, images and sheets as they are made."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from inweave.cli.console import INTERRUPTED, print_json
from inweave.cli.output_files import ImageNames, ensure_new, interrupts_wait
from inweave.cli.progress import Display, size
from inweave.errors import amount
from inweave.files.paths import is_folder, printable

if TYPE_CHECKING:
    from inweave.generate.axes import Axis
    from inweave.generate.config import GenerateConfig
    from inweave.generate.denoise import Progress
    from inweave.generate.pipeline import Pipeline
    from inweave.generate.source import ImageSettings
    from inweave.generate.sweep import OpenModel


def memory_line(memory: dict[str, Any] | None) -> str:
    """Return where the weights of an offloaded model were; "" for any other."""
    if memory is None:
        return ""
    host, device = (size(memory[name]) for name in ("host_bytes", "device_bytes"))
    return f"weights: {host} in host memory, at most {device} on the device at a time"


def check_ending(out: str) -> None:
    """Raise ConfigError unless the name has the suffix of an image format, before anything is imported."""
    from inweave.files.image_names import format_of

    if not out.endswith(("/", os.sep)) and not is_folder(out):
        format_of(out)


def report_interrupt(saved: list[dict[str, Any]], count: int, as_json: bool) -> NoReturn:
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
        self,
        out: str | None,
        config: GenerateConfig,
        sheet: bool,
        force: bool,
        saved: list[dict[str, Any]],
        files: list[Path] | None = None,
    ) -> None:
        assert config.seed is not None
        self.stdout = out == "-"
        self.saved = saved
        count = 1 if sheet else config.count
        if files is not None:
            self._names = ImageNames("", "", force)
            self._paths = _paths_beside(files, out, count, force)
            return
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


def _paths_beside(files: list[Path], out: str | None, count: int, force: bool) -> list[Path]:
    """Return the names of the results of a folder: those of its images, in another folder."""
    from inweave.errors import ConfigError
    from inweave.files.paths import expand_home

    if out is None or out == "-" or not (out.endswith(("/", os.sep)) or is_folder(out)):
        raise ConfigError("--init names a folder, so --out must name one too: -o results/")
    folder = expand_home(out)
    paths = [
        folder / (f"{file.stem}.png" if count == 1 else f"{file.stem}-{number + 1}.png")
        for file in files
        for number in range(count)
    ]
    if len(set(paths)) < len(paths):
        same = next(path for path in paths if paths.count(path) > 1)
        raise ConfigError(f"{printable(str(same))}: two images of --init would be written to this name; rename one")
    for path in paths:
        ensure_new(path, force)
    return paths


def sides_of(text: str | None) -> dict[str, int] | None:
    """Parse --outpaint."""
    from inweave.errors import ConfigError

    if text is None:
        return None
    sides: dict[str, int] = {}
    for pair in text.split(","):
        name, equals, pixels = (part.strip() for part in pair.partition("="))
        if not equals or not pixels.isdecimal():
            raise ConfigError(f"--outpaint {text}: write sides and pixels, such as left=64,right=64")
        sides[name] = int(pixels)
    return sides


def upscale_of(recorded: dict[str, Any] | None, **options: Any) -> dict[str, Any] | None:
    """Return the settings of --upscale and its relatives, over those of the image of --from."""
    changes = {name: value for name, value in options.items() if value is not None}
    if not changes:
        return None
    settings = {name: value for name, value in (recorded or {}).items() if value is not None}
    if "scale" in changes:
        settings = {name: value for name, value in settings.items() if name not in ("width", "height")}
    return settings | changes


def init_files(config: GenerateConfig, sheet: bool) -> list[Path] | None:
    """Return the images of a folder that --init names; None if it names an image, or there is none."""
    from inweave.errors import ConfigError
    from inweave.files.images import DATASET_FORMATS
    from inweave.files.paths import expand_home, printable_path

    if config.init is None or not is_folder(config.init):
        return None
    if sheet or config.mask is not None:
        raise ConfigError("--init names a folder, which works without --grid, --compare and --mask")
    folder = expand_home(config.init)
    suffixes = {f".{name.lower()}" for name in (*DATASET_FORMATS, "jpg", "tif", "heic")}
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in suffixes and path.is_file())
    if not files:
        raise ConfigError(f"{printable_path(folder)}: there is no image in this folder")
    return files


def write_folder(
    pipe: Pipeline, config: GenerateConfig, files: list[Path], output: ImageOutput, progress: Display
) -> dict[str, Any]:
    """Write the results of image to image for every image of a folder; one that cannot be read is a warning."""
    from inweave.errors import ConfigError
    from inweave.generate.denoise import Callbacks

    done: dict[str, Any] = {"images": output.saved, "loras": [], "warnings": [], "batches": []}
    for place, file in enumerate(files):
        progress.start(f"image {place + 1} of {len(files)}")

        def write(number: int, image: Any, record: dict[str, Any], place: int = place, file: Path = file) -> None:
            seed = record["config"]["seed"]
            output.write(
                place * config.count + number, image, record, seed=seed, settings=record["config"], source=str(file)
            )

        try:
            request = pipe.prepare(config.model_copy(update={"init": str(file)}, check=False))
        except ConfigError as error:
            if not any("init" in str(problem) for problem in error.problems):
                raise
            done["warnings"].append(f"{file.name} is left out: {error}")
            continue
        result = pipe.run(request, Callbacks(on_step(progress)), write)
        done["loras"] = [each.as_dict() for each in result.loras]
        done["warnings"] += [warning for warning in result.warnings if warning not in done["warnings"]]
        done["batches"] += result.batches
    if not output.saved:
        raise ConfigError(done["warnings"] or ["there is no image that can be read"])
    return done


def source_of(image: Path | None) -> ImageSettings:
    """Return the settings of --from, or none."""
    from inweave.generate.record import read_settings
    from inweave.generate.source import ImageSettings

    return ImageSettings({}) if image is None else read_settings(image)


def write_images(
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


def axes_of(grid: list[str], comparing: bool) -> list[Axis]:
    """Parse the axes of --grid, before anything is loaded."""
    from inweave.errors import ConfigError
    from inweave.generate.axes import Axis

    if grid and comparing:
        raise ConfigError("--grid and --compare each make a grid of their own; choose one")
    return [Axis.parse(text) for text in grid]


def check_inputs(config: GenerateConfig) -> None:
    """Raise ConfigError if an input image is missing, before anything is loaded."""
    from inweave.errors import ConfigError
    from inweave.files.paths import exists, printable_path

    files = [("init", config.init), ("mask", config.mask), *(("reference", path) for path in config.references)]
    inputs = [(option, path) for option, path in files if path is not None]
    if wrong := [
        f"{option} {printable_path(path)}: no such file or directory" for option, path in inputs if not exists(path)
    ]:
        raise ConfigError(wrong)


def write_grid(
    pipe: Pipeline,
    config: GenerateConfig,
    axes: list[Axis],
    output: ImageOutput,
    progress: Callable[[Progress], None],
    open_model: OpenModel,
) -> dict[str, Any]:
    """Write the sheet of a sweep over ``axes``, or of a comparison without axes."""
    from inweave.generate.sweep import compare, sweep

    output.check_settings(lambda: pipe.record(config))
    if axes:
        made = sweep(pipe, config, axes, open_model=open_model, progress=progress)
    else:
        made = compare(pipe, config, progress=progress)
    results = [result for line in made.results for result in line]
    output.write(0, made.sheet.render(), made.record, cells=[result.records[0]["config"] for result in results])
    loras = {each.name: each.as_dict() for result in results for each in result.loras}
    warnings = list(dict.fromkeys(warning for result in results for warning in result.warnings))
    return {
        "images": output.saved, "loras": list(loras.values()), "warnings": warnings,
        "batches": [count for result in results for count in result.batches],
        "merge_reasons": list(dict.fromkeys(result.merge_reason for result in results if result.merge_reason)),
    }  # fmt: skip


def parts_of(options: list[str] | None) -> dict[str, str]:
    from inweave.errors import ConfigError

    pairs = [text.partition("=") for text in options or []]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise ConfigError(f"--part {wrong[0]}: write PART=FILE, such as vae=ae.safetensors")
    return {name: path for name, _, path in pairs}


def on_part(progress: Display, model: str) -> Callable[[str, int, int], None]:
    """Return the loader's progress callback: the part of the model, and the bytes of all parts."""

    def show(part: str, done: int, total: int) -> None:
        progress.update(f"loading {model}", done, total, f"{size(done)} of {size(total)}, {part}")

    return show


def on_step(progress: Display) -> Callable[[Progress], None]:
    """Return the pipeline's progress callback: the steps of all images together."""

    def show(at: Progress) -> None:
        activity = f"image {at.image + 1} of {at.images}" if at.images > 1 else "generating"
        if at.batch > 1:
            activity = f"images {at.finished + 1} to {at.finished + at.batch} of {at.images}"
        progress.update(activity, at.done, at.work)

    return show
