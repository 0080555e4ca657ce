"""The output of `inweave bench kernels`, `step`, `swap` and `memory`.

terminal          the command, the machine, the versions, a table (or, if it is too wide, a list per row), notes
--json FILE       the same figures, from which docs/benchmarks.md is made; checked before anything is measured
--json -          the same as JSON instead of the table
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from inweave.cli.console import OK, fail, print_facts, print_json, print_lines, print_styled, reporting_errors
from inweave.cli.environment import use_expandable_segments
from inweave.cli.extras import require
from inweave.cli.progress import display
from inweave.cli.tables import terminal_width
from inweave.errors import ConfigError, FormatError
from inweave.files.documents import read_json
from inweave.files.paths import expand_home, is_folder, occupied, printable_path
from inweave.files.writing import make_folder, try_to_write

if TYPE_CHECKING:
    from inweave.bench.bench import Bench

STDOUT = "-"


@contextmanager
def measuring(name: str, context: typer.Context, device: str | None, file: str | None) -> Iterator[Bench]:
    """Set up a benchmark; after the block, print its report and write it to the file."""
    as_json = file == STDOUT
    require("train", as_json)
    use_expandable_segments()  # as training does
    with reporting_errors(as_json):
        target = report_file(file)
        with display(plain=True) as screen:
            screen.start("loading torch")
            from inweave.bench.bench import Bench
            from inweave.ops.tensors.oom import oom_hint

            bench = Bench(device, screen.start)
            with oom_hint("measure this", "lower --batch, --size or --rank, or choose a smaller --model"):
                yield bench
        made = bench.report(name, command_line(context))
        if as_json:
            print_json(made.document())
            raise typer.Exit(OK)
        from inweave.bench.report import table

        versions = ", ".join(f"{library} {version}" for library, version in made.versions.items())
        print_facts(made.command, [("machine", made.machine["device"]), ("date", made.date), ("versions", versions)])
        print_table(table(bench.rows), terminal_width())
        print_lines(made.notes)
        if target is not None:  # last, so that figures that took minutes are printed even if the disk is full
            make_folder(target.parent)
            made.write(target)
    raise typer.Exit(OK)


def report_file(file: str | None) -> Path | None:
    """Return the file to write, if any; an earlier report is replaced, other files never."""
    if file is None or file == STDOUT:
        return None
    path = expand_home(file)
    if is_folder(path):
        raise ConfigError(f"--json {printable_path(path)}: is a folder; name a file in it")
    try_to_write(path, error=ConfigError)
    if occupied(path):
        try:
            earlier = "bench" in read_json(path)
        except FormatError:
            earlier = False
        if not earlier:
            raise ConfigError(
                f"--json {printable_path(path)}: already exists and is not a benchmark report; choose another name"
            )
    return path


def refuse_unused(context: typer.Context, case: str, *names: str) -> None:
    """Exit if an option was passed that has no effect in this case, such as "with --train"."""
    for parameter in context.command.params:
        if parameter.name in names and _is_given(context, parameter.name):
            fail(f"{parameter.opts[0]} has no effect {case}; leave it out", False)


def print_table(lines: Sequence[Sequence[str]], width: int | None = None) -> None:
    """Print aligned columns, names left and figures right; a list per row if they are wider than ``width``."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    if width is not None and sum(widths) + 2 * len(widths) > width:
        titles = lines[0][2:]
        indent = max(map(len, titles))
        for name, unit, *figures in lines[1:]:
            print_styled(f"  {name} ({unit})", bold=True)
            for title, value in zip(titles, figures, strict=True):
                if value:
                    print_styled(f"    {title:<{indent}}  {value}")
        return
    for number, line in enumerate(lines):
        cells = [
            f"{line[0]:<{widths[0]}}",
            *(f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        print_styled("  " + "  ".join(cells), bold=number == 0)


def command_line(context: typer.Context) -> str:
    """Return the command with the options that were passed, without --json."""
    path = context.command_path.split()
    words = ["inweave", *path[path.index("bench") :]]
    for parameter in context.command.params:
        if parameter.name is None or not _is_given(context, parameter.name):
            continue
        value: Any = context.params[parameter.name]
        if parameter.param_type_name == "argument":
            words += [str(each) for each in value]
        elif parameter.opts[0] != "--json":
            flag: Any = parameter
            switched = flag.secondary_opts[0] if flag.is_flag and value is False else flag.opts[0]
            words += [switched] if flag.is_flag else [switched, str(getattr(value, "value", value))]
    return " ".join(words)


def _is_given(context: typer.Context, name: str) -> bool:
    return str(context.get_parameter_source(name)) == "ParameterSource.COMMANDLINE"
