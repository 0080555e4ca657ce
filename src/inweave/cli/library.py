"""`inweave library`: the index of your LoRA files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inweave.cli.options import JSON
from inweave.cli.output import OK, PROBLEMS, print_facts, print_json, print_lines, reporting_errors

if TYPE_CHECKING:
    from inweave.library import Library

library_app = typer.Typer(help="Index folders of LoRA files: list, find, check their health.", no_args_is_help=True)
Folders = Annotated[list[Path] | None, typer.Option("--folder", "-f", help="A folder of LoRAs (default: ./loras).")]
Database = Annotated[Path | None, typer.Option("--database", help="The file of the index.")]


def _open(folders: list[Path] | None, database: Path | None) -> Library:
    from inweave.library import Library
    from inweave.models import embedded
    from inweave.serve.settings import default_data_folder

    own = folders or [folder for folder in (Path("loras"),) if folder.is_dir()]
    packaged = embedded.folder() / "loras"
    listed = own if packaged.resolve() in [folder.resolve() for folder in own] else [*own, packaged]
    return Library(database or default_data_folder().parent / "library.sqlite3", listed)


@library_app.command("scan")
def scan(
    folder: Folders = None,
    database: Database = None,
    examine: Annotated[bool, typer.Option("--examine", help="Also read whole files, for hashes and health.")] = False,
    as_json: JSON = False,
) -> None:
    """Bring the index up to date with the folders."""
    with reporting_errors(as_json):
        library = _open(folder, database)
        report = library.scan().as_dict()
        if examine:
            report["examined"] = library.examine()
    if as_json:
        print_json({"ok": True, **report})
        return
    print_facts("library", [(name, str(value)) for name, value in report.items() if name != "passed_over"])
    print_lines(report["passed_over"], "yellow", limit=20)


@library_app.command("list")
def list_files(
    text: Annotated[str, typer.Argument(help="Part of a name, a path or a trigger word.")] = "",
    base: Annotated[str | None, typer.Option("--base", help="Only LoRAs for this base.")] = None,
    folder: Folders = None,
    database: Database = None,
    as_json: JSON = False,
) -> None:
    """List LoRAs by name."""
    with reporting_errors(as_json):
        library = _open(folder, database)
        library.scan()
        entries = library.entries(text, base=base)
    if as_json:
        print_json({"ok": True, "loras": [entry.as_dict(details=False) for entry in entries]})
        return
    width = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        base_name = entry.facts.base or "unknown base"
        algorithms = "+".join(entry.facts.algorithms)
        print_lines(
            [f"{entry.name:<{width}}  {base_name:<16} {algorithms:<12} {entry.path}"], "red" if entry.health else None
        )


@library_app.command("show")
def show(
    reference: Annotated[str, typer.Argument(help="A name, a path, an id or a hash.")],
    folder: Folders = None,
    database: Database = None,
    as_json: JSON = False,
) -> None:
    """Everything that is known of one LoRA."""
    with reporting_errors(as_json):
        library = _open(folder, database)
        library.scan()
        library.examine()
        document = library.find(reference).as_dict()
    if as_json:
        print_json({"ok": True, **document})
        return
    rows = [
        (name, str(value)) for name, value in document.items() if value not in (None, [], (), {}) and name != "metadata"
    ]
    print_facts(str(document["name"]), rows)


@library_app.command("find")
def find(
    reference: Annotated[
        str, typer.Argument(help="A name, a path, an id or a hash (SHA-256, AutoV1, AutoV2, AutoV3).")
    ],
    folder: Folders = None,
    database: Database = None,
    as_json: JSON = False,
) -> None:
    """Print the file that a name or a hash means."""
    with reporting_errors(as_json):
        library = _open(folder, database)
        library.scan()
        if reference.lower().removeprefix("0x").strip("0123456789abcdef") == "" or ":" in reference:
            library.examine()  # only hashes need whole files
        entry = library.find(reference)
    if as_json:
        print_json({"ok": True, "file": str(entry.file), **entry.as_dict(details=False)})
    else:
        print_lines([str(entry.file)])


@library_app.command("doctor")
def doctor(folder: Folders = None, database: Database = None, as_json: JSON = False) -> None:
    """Check every file: unreadable, NaN, orphaned or empty factors, duplicates. Exit code 1 if something is wrong."""
    with reporting_errors(as_json):
        library = _open(folder, database)
        report = library.scan()
        library.examine()
        sick = [entry for entry in library.entries() if entry.health]
        duplicates = library.duplicates()
    if as_json:
        print_json({
            "ok": not sick, "files": report.files, "passed_over": report.passed_over,
            "unhealthy": [{"path": entry.path, "health": entry.health} for entry in sick],
            "duplicates": [[entry.path for entry in group] for group in duplicates],
        })  # fmt: skip
    else:
        print_facts(
            "library",
            [("files", str(report.files)), ("unhealthy", str(len(sick))), ("duplicates", str(len(duplicates)))],
        )
        print_lines((f"{entry.path}: {reason}" for entry in sick for reason in entry.health), "red")
        print_lines(("same tensors: " + ", ".join(entry.path for entry in group) for group in duplicates), "yellow")
        print_lines(report.passed_over, "yellow")
    raise typer.Exit(PROBLEMS if sick else OK)
