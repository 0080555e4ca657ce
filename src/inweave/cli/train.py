"""`inweave train`: train a LoRA on a folder of images, or a file of texts.

Exit codes, in addition to those of every command:

    1    the run started and could not continue: out of memory, non-finite numbers, an output file that fails its check
    2    bad input, and also a full disk
    4    this process stopped because another one of the run ended
    130  stopped by Ctrl-C (or SIGTERM): after one, the step was finished and saved; after two, or before the first
         step, the last checkpoint is intact
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inweave.cli.adapters import locate
from inweave.cli.console import (
    INTERRUPTED,
    OK,
    PROBLEMS,
    UNREADABLE,
    fail,
    print_facts,
    print_json,
    print_lines,
    print_styled,
    reporting_errors,
)
from inweave.cli.environment import use_expandable_segments
from inweave.cli.extras import require
from inweave.cli.launch import launch
from inweave.cli.options import JSON
from inweave.cli.progress import Display, display
from inweave.errors import amount
from inweave.files.paths import occupied, printable, printable_path

if TYPE_CHECKING:
    from inweave.training.config.schema import TrainConfig

HARDWARE, IMPORT, RUN = "Hardware", "Configurations of other trainers", "Checkpoints and checks"

#: events printed without a progress display: automatic decisions, and failures
_EVENTS = (
    "device", "memory", "dataset", "output", "started", "resumed", "sample", "sample failed", "stopped", "quantize",
    "speed", "compile", "compile failed", "graph", "graph failed",
)  # fmt: skip


def train(
    config: Annotated[Path | None, typer.Argument(help="A TOML file with settings; options override it.")] = None,
    model: Annotated[str | None, typer.Option(
        "--model", "-m", help="inweave/emoji (built in), a model folder, a checkpoint file, a known name (sdxl) or a "
        "Hugging Face Hub id.", show_default="from the file")] = None,
    dataset: Annotated[str | None, typer.Option(
        "--dataset", "-d", help="A folder of images with captions, a .txt or .jsonl of texts, or a dataset .toml.",
        show_default="from the file")] = None,
    output: Annotated[str | None, typer.Option(
        "--output", "-o", help="The folder to write to.", show_default="out")] = None,
    name: Annotated[str | None, typer.Option(
        "--name", help="The name of the LoRA file, without .safetensors.", show_default="lora")] = None,
    trigger: Annotated[str | None, typer.Option(
        "--trigger", help="A trigger word, put before every caption that lacks it.", show_default="none")] = None,
    rank: Annotated[int | None, typer.Option("--rank", help="Rank of the LoRA.", show_default="the preset's")] = None,
    alpha: Annotated[float | None, typer.Option(
        "--alpha", help="Alpha of the LoRA; its scale is alpha / rank.", show_default="rank")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Training steps.", show_default="the preset's")] = None,
    lr: Annotated[float | None, typer.Option(
        "--lr", "--learning-rate", help="Learning rate.", show_default="the preset's")] = None,
    batch_size: Annotated[str | None, typer.Option(
        "--batch-size", "-b", help="Examples per micro-batch, or auto: as many as fit.", show_default="the preset's"
    )] = None,
    save_every: Annotated[int | None, typer.Option(
        "--save-every", help="Write a checkpoint every N steps.", show_default="only at the end",
        rich_help_panel=RUN)] = None,
    seed: Annotated[int | None, typer.Option(
        "--seed", "-s", help="Random seed; the same seed gives the same result.", show_default="0")] = None,
    fp16: Annotated[bool, typer.Option(
        "--fp16", help="Train in fp16 with loss scaling.", rich_help_panel=HARDWARE)] = False,
    resume: Annotated[str | None, typer.Option(
        "--resume", metavar="[CHECKPOINT]", help="Resume from the last checkpoint, or from the one named.",
        show_default="start from scratch", rich_help_panel=RUN)] = None,
    settings: Annotated[list[str] | None, typer.Option(
        "--set", metavar="SETTING=VALUE", help="Any other setting. Repeat for more.")] = None,
    check: Annotated[bool, typer.Option(
        "--check", help="Check the settings and the dataset and estimate memory; do not train.",
        rich_help_panel=RUN)] = False,
    skip_unreadable: Annotated[bool, typer.Option(
        "--skip-unreadable", help="Leave out images that cannot be read.")] = False,
    gpus: Annotated[int, typer.Option(
        "--gpus", min=1, help="How many GPUs to train on, one process each.", rich_help_panel=HARDWARE)] = 1,
    cluster: Annotated[str | None, typer.Option(
        "--cluster", metavar="[ADDRESS]", help="Train on a Ray cluster, --gpus processes: HOST:PORT of its head; "
        "without a value, the cluster that this machine belongs to; local starts one here.", show_default="none",
        rich_help_panel=HARDWARE)] = None,
    restarts: Annotated[int | None, typer.Option(
        "--restarts", min=0, help="With --cluster: how often to continue from the last checkpoint if a process or a "
        "machine is lost.", show_default="3", rich_help_panel=HARDWARE)] = None,
    vram: Annotated[str | None, typer.Option(
        "--vram", help="Memory limit, such as 12GiB; settings are chosen to fit.", show_default="no limit",
        rich_help_panel=HARDWARE)] = None,
    ram: Annotated[str | None, typer.Option(
        "--ram", help="Limit for host memory, such as 24GiB, where --vram moves weights there.",
        show_default="no limit", rich_help_panel=HARDWARE)] = None,
    allow_download: Annotated[bool, typer.Option(
        "--allow-download", help="Allow a Hub model to be downloaded.")] = False,
    init: Annotated[Path | None, typer.Option(
        "--init", help="Write a starter configuration with every setting to this file; do not train.",
        show_default="none", rich_help_panel=RUN)] = None,
    import_: Annotated[Path | None, typer.Option(
        "--import", help="Convert another trainer's configuration file, or command line, and print it; - reads "
        "standard input. Other options override it.", show_default="none", rich_help_panel=IMPORT)] = None,
    without: Annotated[list[str] | None, typer.Option(
        "--without", metavar="NAME,...",
        help="With --import: leave out settings of the file that inweave does not support.",
        rich_help_panel=IMPORT)] = None,
    verbose: Annotated[bool, typer.Option(
        "--verbose", help="With --import: list defaults, notes and settings that are off too.",
        rich_help_panel=IMPORT)] = False,
    as_json: JSON = False,
) -> None:  # fmt: skip
    """Train a LoRA on images with captions, or on texts. A resumed run continues where it stopped.

    Example: inweave train --model inweave/emoji --dataset inweave/pixel --output out --steps 300
    """
    options: dict[str, Any] = {
        "model": model, "dataset": dataset, "output": output, "name": name, "trigger": trigger, "rank": rank,
        "alpha": alpha, "steps": steps, "learning_rate": lr, "batch_size": batch_size, "save_every": save_every,
        "seed": seed, "resume": resume, "vram": vram, "ram": ram, "precision": "fp16" if fp16 else None,
        "skip_unreadable": skip_unreadable or None, "allow_download": allow_download or None,
    }  # fmt: skip
    overrides = {setting: value for setting, value in options.items() if value is not None}
    if import_ is not None:
        if config or check or gpus > 1 or cluster is not None:
            fail("--import only prints a configuration; save it to a file, then train with that file", as_json)
        _import(import_, overrides, settings or [], without or [], as_json, verbose)
    if init is not None:
        if config or check or gpus > 1 or cluster is not None:
            fail("--init only writes a configuration; train with it in a second command", as_json)
        _init(init, overrides, settings or [], as_json)
    if restarts is not None and cluster is None:
        fail("--restarts works only with --cluster; torchrun has --max-restarts", as_json)
    if without:
        fail("--without works only with --import", as_json)
    require("train", as_json)
    from inweave.errors import ConfigError, FormatError, InweaveError, LostPeerError, RequestError
    from inweave.training.config.schema import TrainConfig
    from inweave.training.distributed.env import LOST, launched

    with reporting_errors(as_json):
        for text in settings or []:
            _add_setting(overrides, text)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            complete = TrainConfig.of(**overrides) if config is None else TrainConfig.load(config, **overrides)
        if complete.start_from is not None:  # a file, or the name or hash of a LoRA
            adapter = str(locate(Path(complete.start_from), None))
            complete = complete.model_copy(update={"start_from": adapter})
        notes = [f"note: {warning.message}" for warning in caught]
        for note in notes if not as_json else ():
            typer.echo(printable(note), err=True)
        if check:
            _check(complete, gpus, as_json, notes)
        if cluster is not None and launched()[0] <= 1:
            require("cluster", as_json)
            from inweave.cli.launch_cluster import launch_cluster

            raise typer.Exit(launch_cluster(cluster, gpus, complete, as_json, 3 if restarts is None else restarts))
        if gpus > 1 and launched()[0] <= 1:
            raise typer.Exit(launch(gpus, complete.to_toml(), as_json))
        try:
            _train(complete, as_json, notes)
        except KeyboardInterrupt:
            fail(
                "stopped at once; continue with --resume, from the last checkpoint or from the start if there is none",
                as_json,
                INTERRUPTED,
            )
        except (ConfigError, FormatError, RequestError):
            raise
        except InweaveError as error:
            if isinstance(error, LostPeerError) and os.environ.get("LOCAL_RANK", "0") != "0":
                raise typer.Exit(LOST) from None  # the first process of this machine prints it
            fail(str(error), as_json, LOST if isinstance(error, LostPeerError) else PROBLEMS)


def _train(config: TrainConfig, as_json: bool, notes: list[str]) -> None:
    use_expandable_segments()
    from inweave.training.distributed.env import launched

    first = launched()[1] == 0
    with display(quiet=as_json or not first, plain=True) as progress:
        progress.start("starting")
        from inweave.training.output.log import finite
        from inweave.training.output.result import STOPPED
        from inweave.training.session import train as run

        def on_record(record: Mapping[str, Any]) -> None:
            if progress.live:
                if record.get("event") != "finished":  # the last line of the command reports it
                    show_record(progress, record)
            elif record.get("event") in _EVENTS and "text" in record:
                notes.append(f"{record['event']}: {record['text']}")
                if not as_json:
                    progress.line(notes[-1])
            elif "loss" in record and not as_json:  # a line per log_every in a file or a pipe
                progress.line(record_figures(record))

        done = run(config, on_record=on_record, on_progress=progress.update)
    if not first:
        raise typer.Exit(OK)
    stopped = done.reason == STOPPED
    if as_json:
        print_json({
            "ok": not stopped, "path": str(done.path), "step": done.step, "reason": done.reason,
            "seconds": round(done.seconds, 2), "skipped_steps": done.skipped_steps,
            "losses": [finite(loss) for loss in done.losses],
            "validation": [[step, finite(loss)] for step, loss in done.validation], "notes": notes,
        })  # fmt: skip
    else:
        hint = "; continue with --resume" if stopped else ""
        typer.echo(printable(f"{done.path}: {done.reason}{hint} (step {done.step}, {done.seconds:.0f} s)"))
        if done.skipped_steps:
            print_lines([f"skipped for a non-finite loss or gradient: {amount(done.skipped_steps, 'step')}"], "yellow")
    raise typer.Exit(INTERRUPTED if stopped else OK)


def show_record(progress: Display, record: Mapping[str, Any]) -> None:
    """Show a record of the training log on the terminal: numbers next to the bar, events as lines above it."""
    if "loss" not in record:
        validation = f"loss {record['validation']:.4f}" if record.get("validation") is not None else ""
        text = " ".join(str(record[name]) for name in ("path", "text") if record.get(name)) or validation
        progress.line(f"{record.get('event', '')}: {text}")
        return
    progress.update("training", record["step"], record["total"], record_figures(record))


def record_figures(record: Mapping[str, Any]) -> str:
    """Format the numbers of a step on one line."""
    average = record.get("loss_average")
    figures = (
        f"{record['step']}/{record['total']}",
        f"loss {record['loss']:.4f}" if record["loss"] is not None else "loss not finite",
        f"average {average:.4f}" if average is not None else "",
        f"lr {record['lr']:.2e}" if record.get("lr") is not None else "",
        f"{record['steps_per_second']:.2f} it/s" if record.get("steps_per_second") else "",
        f"{record['memory'] / 2**30:.1f} GiB" if record.get("memory") else "",
        f"{record['skipped_steps']} skipped" if record.get("skipped_steps") else "",
    )
    return "  ".join(figure for figure in figures if figure)


def _check(config: TrainConfig, gpus: int, as_json: bool, notes: Sequence[str]) -> None:
    with display(as_json, plain=True) as progress:
        progress.start("checking the dataset")
        from inweave.training.session import check

        complete, report, estimate = check(config, gpus, progress.update, table=True)
    problems = estimate.pop("problems")
    if as_json:
        print_json({
            "ok": not problems, "config": complete.model_dump(mode="json"), "dataset": report.as_dict(),
            "estimate": estimate, "problems": problems, "notes": list(notes),
        })  # fmt: skip
    else:
        gib = 2**30
        typer.echo("\n".join(printable(line) for line in report.lines()))
        print_facts("memory, estimated", [
            ("weights", f"{estimate['weights_bytes'] / gib:.2f} GiB"),
            ("adapter", f"{estimate['trained_bytes'] / gib:.3f} GiB for {estimate['trained_parameters']:,} parameters"),
            ("activations", f"{estimate['activation_bytes'] / gib:.2f} GiB"),
            ("CUDA", f"{estimate['reserved_bytes'] / gib:.2f} GiB for its context and libraries, on a GPU"),
            ("total", f"{estimate['total_bytes'] / gib:.2f} GiB"),
            ("host", f"{estimate['host_bytes'] / gib:.2f} GiB of host memory"),
        ])  # fmt: skip
        if len(plans := estimate["plans"]) > 1:
            print_facts("ways to do this run, from the smallest to the fastest", [
                (row["changes"], f"{row['total_bytes'] / gib:.1f} GiB, {row['host_bytes'] / gib:.1f} GiB of host memory"
                 f", {row['seconds']:.2f} s a step") for row in plans
            ])  # fmt: skip
        print_lines(estimate.get("choices", []))
        if (seconds := estimate.get("seconds")) is not None:
            steps = f"{amount(estimate['steps'], 'step')}, after images and captions are encoded"
            typer.echo(f"time, estimated: {_duration(seconds)} for {steps}")
        for problem in problems:
            print_styled(f"this run would be refused: {problem}", "red", err=True)
    raise typer.Exit(UNREADABLE if problems else OK)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds" if seconds >= 10 else f"{seconds:.1f} seconds"
    return f"{seconds / 3600:.1f} hours" if seconds > 5400 else f"{seconds / 60:.1f} minutes"


def _import(
    path: Path, overrides: dict[str, Any], settings: list[str], without: list[str], as_json: bool, verbose: bool
) -> None:
    from inweave.training.importers.detect import import_config, import_text

    names = [name.strip() for text in without for name in text.split(",") if name.strip()]
    with reporting_errors(as_json):
        for text in settings:
            _add_setting(overrides, text)
        if str(path) == "-":
            result = import_text(sys.stdin.read(), "standard input", without=names, **overrides)
        else:
            result = import_config(path, without=names, **overrides)
    if as_json:
        print_json({
            "ok": True, "kind": result.kind, "config": result.config.model_dump(mode="json", exclude_unset=True),
            "mapping": dict(result.mapping), "defaults": dict(result.defaults),
            "no_equivalent": list(result.no_equivalent), "notes": list(result.notes),
        })  # fmt: skip
    else:
        typer.echo(result.config.to_toml())
        for line in result.report(verbose):
            print_styled(f"# {line}", "yellow" if line.startswith(("no equivalent", "differs")) else None, err=True)
    raise typer.Exit(OK)


def _init(path: Path, overrides: dict[str, Any], settings: list[str], as_json: bool) -> None:
    from inweave.errors import ConfigError
    from inweave.files.writing import write_text
    from inweave.training.config.schema import TrainConfig
    from inweave.training.config.starter import starter_toml

    with reporting_errors(as_json):
        for text in settings:
            _add_setting(overrides, text)
        text = starter_toml(TrainConfig.of(**{"dataset": "photos/", **overrides}))
        if occupied(path):
            raise ConfigError(f"{printable_path(path)}: already exists; choose another name")
        write_text(path, text)
    if as_json:
        print_json({"ok": True, "path": str(path)})
    else:
        typer.echo(printable(f"{path}: edit it, then: inweave train {path} --check"))
    raise typer.Exit(OK)


def _add_setting(overrides: dict[str, Any], text: str) -> None:
    """Add SETTING=VALUE; the value is parsed as TOML, or else taken as plain text."""
    from inweave.errors import ConfigError
    from inweave.training.config.toml import parse_toml

    name, equals, value = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or not name:
        raise ConfigError(f"--set {text}: write SETTING=VALUE")
    if name in overrides:
        raise ConfigError(f"--set {text}: {name} is already set to {overrides[name]!r}; set it once")
    try:
        table = parse_toml(f"value = {value}", f"--set {name}")
    except ConfigError:
        table = {}
    overrides[name] = table["value"] if table.keys() == {"value"} else value
