"""`inweave train`: a folder of pictures, or a file of texts, becomes a LoRA.

Exit codes, beside those of every verb:

    0    also after one Ctrl-C (or SIGTERM): the step was finished and saved
    1    the run began and could not go on: out of memory, no finite numbers, a file that does not prove
    2    bad input, and also a disk that takes no more
    4    another process of the run ended, and so did this one
    130  after two: stopped at once, the last checkpoint is whole
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from inweave.cli.launch import LOST, launch
from inweave.cli.merge import need_torch
from inweave.cli.output import OK, PROBLEMS, UNREADABLE, fail, print_facts, print_json, printable, reporting_errors


def train(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; options given here go before what it says.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="inweave/emoji, a folder, a checkpoint.")] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", "-d", help="A folder of pictures, or a dataset .toml.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="The folder to write to.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="The file's name, without its ending.")] = None,
    trigger: Annotated[str | None, typer.Option("--trigger", help="A word put before every caption that lacks it.")] = None,
    rank: Annotated[int | None, typer.Option("--rank")] = None,
    alpha: Annotated[float | None, typer.Option("--alpha")] = None,
    steps: Annotated[int | None, typer.Option("--steps")] = None,
    lr: Annotated[float | None, typer.Option("--lr", "--learning-rate")] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", "-b")] = None,
    save_every: Annotated[int | None, typer.Option("--save-every")] = None,
    seed: Annotated[int | None, typer.Option("--seed", "-s")] = None,
    fp16: Annotated[bool, typer.Option("--fp16", help="Work in fp16, with loss scaling.")] = False,
    resume: Annotated[str | None, typer.Option("--resume", help="auto: go on from the last checkpoint; or a checkpoint.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Any other setting; again for more.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Read everything, report, train nothing.")] = False,
    skip_unreadable: Annotated[bool, typer.Option("--skip-unreadable", help="Leave unreadable pictures out.")] = False,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="Processes, one a GPU.")] = 1,
    vram: Annotated[str | None, typer.Option("--vram", help="Stay within this memory: 12GiB.")] = None,
    import_: Annotated[Path | None, typer.Option("--import", help="Turn another trainer's configuration into ours.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> None:  # fmt: skip
    """Train a LoRA from pictures with captions, or from texts; exactly resumable."""
    if import_ is not None:
        given_too = [config, model, dataset, output, name, trigger, rank, alpha, steps, lr, batch_size, save_every, seed,
                     resume, set_, vram]  # fmt: skip
        if check or fp16 or skip_unreadable or gpus > 1 or any(value is not None for value in given_too):
            fail(
                "--import prints a configuration and does nothing else: save it, then train with it",
                as_json,
                UNREADABLE,
            )
        _imported(import_, as_json)
    need_torch(as_json)
    from inweave.errors import ConfigError, FormatError, InweaveError, LostPeerError
    from inweave.training.config.schema import TrainConfig

    given: dict[str, Any] = {
        "model": model, "dataset": dataset, "output": output, "name": name, "trigger": trigger, "rank": rank, "alpha": alpha, "steps": steps,
        "learning_rate": lr, "batch_size": batch_size, "save_every": save_every, "seed": seed, "resume": resume, "vram": vram,
        "precision": "fp16" if fp16 else None, "skip_unreadable": True if skip_unreadable else None,
    }  # fmt: skip
    with reporting_errors(as_json):
        for text in set_ or []:
            field, equals, value = text.partition("=")
            field = field.strip().replace("-", "_")
            if not equals or not field:
                raise ConfigError(f"--set {text}: write FIELD=VALUE")
            if given.get(field) is not None:
                raise ConfigError(f"--set {text}: {field} is given already, as {given[field]!r}; say it once")
            given[field] = _value(value)
        said = {field: value for field, value in given.items() if value is not None}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            settled = TrainConfig.of(**said) if config is None else TrainConfig.load(config, **said)
        notes = [f"note: {warning.message}" for warning in caught]
        for note in notes if not as_json else ():
            typer.echo(printable(note), err=True)
        if check:
            _checked(settled, gpus, as_json, notes)
        from inweave.training.distributed.env import launched

        if gpus > 1 and launched()[0] <= 1:
            raise typer.Exit(launch(gpus, settled.to_toml(), as_json))
        try:
            _trained(settled, as_json, notes)
        except KeyboardInterrupt:
            fail("stopped at once; what was saved is whole, go on with --resume auto", as_json, 130)
        except (ConfigError, FormatError):
            raise
        except InweaveError as error:
            fail(str(error), as_json, LOST if isinstance(error, LostPeerError) else PROBLEMS)


def _trained(config: Any, as_json: bool, said: Sequence[str] = ()) -> None:
    # pictures of many sizes leave holes that only segments which can grow fill again; torch reads it when CUDA starts
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    from inweave.training.distributed.env import launched
    from inweave.training.loop import STOPPED
    from inweave.training.output.log import finite, live
    from inweave.training.session import train as run

    first = launched()[1] == 0
    shown = first and sys.stderr.isatty() and not as_json
    notes: list[str] = list(said)

    def told(record: Mapping[str, Any]) -> None:
        """Without a display, what was decided for the user and what went wrong."""
        if (
            record.get("event") in ("memory", "dataset", "begins", "resumed", "sample", "sample failed", "stopped")
            and "text" in record
        ):
            notes.append(f"{record['event']}: {record['text']}")
            if not as_json:
                typer.echo(printable(notes[-1]), err=True)

    done = run(config, tell=live() if shown else told, tick=_tick if shown else None)
    if not first:
        raise typer.Exit(OK)
    again = "" if done.reason != STOPPED else "; go on with --resume auto"
    if as_json:
        print_json({
            "ok": True, "path": str(done.path), "step": done.step, "reason": done.reason, "seconds": round(done.seconds, 2),
            "skipped_steps": done.bad, "losses": [finite(loss) for loss in done.losses],
            "validation": [[step, finite(loss)] for step, loss in done.validation], "notes": notes,
        })  # fmt: skip
    else:
        if shown:
            sys.stderr.write("\n")
        typer.echo(printable(f"{done.path}: {done.reason}{again} (step {done.step}, {done.seconds:.0f} s)"))
        if done.bad:
            typer.secho(f"  {done.bad} steps had no finite numbers and were skipped", fg="yellow")
    raise typer.Exit(OK)


def _checked(config: Any, gpus: int, as_json: bool, notes: Sequence[str] = ()) -> None:
    from inweave.training.session import check

    settled, report, needs = check(config, gpus)
    problems = needs.pop("problems")
    if as_json:
        told = {"config": settled.model_dump(mode="json"), "dataset": report.as_dict(), "estimate": needs}
        print_json({"ok": not problems, **told, "problems": problems, "notes": list(notes)})
    else:
        gib = 2**30
        typer.echo("\n".join(printable(line) for line in report.lines()))
        print_facts("memory, estimated", [
            ("weights", f"{needs['weights_bytes'] / gib:.2f} GiB"),
            ("adapter", f"{needs['trained_bytes'] / gib:.3f} GiB for {needs['trained_parameters']:,} parameters"),
            ("a step", f"{needs['kept_bytes'] / gib:.2f} GiB"),
            ("in all", f"{needs['total_bytes'] / gib:.2f} GiB"),
        ])  # fmt: skip
        for reason in needs.get("choices", []):
            typer.echo(printable(f"  {reason}"))
        if (seconds := needs.get("seconds")) is not None:
            shown = f"{seconds / 3600:.1f} hours" if seconds > 5400 else f"{seconds / 60:.1f} minutes"
            typer.echo(f"time, estimated: {shown} for {needs['steps']} steps, once pictures and captions are encoded")
        for problem in problems:
            typer.secho(printable(f"this run would be refused: {problem}"), err=True, fg="red")
    raise typer.Exit(UNREADABLE if problems else OK)


def _imported(path: Path, as_json: bool) -> None:
    from inweave.training.config.importers.detect import import_config

    with reporting_errors(as_json):
        found = import_config(path)
    if as_json:
        print_json({"ok": True, "config": found.config.model_dump(mode="json", exclude_unset=True), "taken": dict(found.taken),
                    "no_equivalent": list(found.no_equivalent), "notes": list(found.notes)})  # fmt: skip
    else:
        typer.echo(found.config.to_toml())
        for line in found.no_equivalent:
            typer.secho(printable(f"# no equivalent: {line}"), err=True, fg="yellow")
        for line in found.notes:
            typer.secho(printable(f"# note: {line}"), err=True)
    raise typer.Exit(OK)


def _value(text: str) -> Any:
    """As TOML reads it, or the text itself."""
    import tomllib

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _tick(what: str, at: int, of: int) -> None:
    sys.stderr.write(f"\r\x1b[K{what} {at}/{of}" + ("\n" if at == of else ""))
    sys.stderr.flush()
