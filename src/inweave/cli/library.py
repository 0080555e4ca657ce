"""`inweave library`: the index of your LoRA files."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inweave.cli.adapters import lora_folders
from inweave.cli.console import OK, PROBLEMS, print_facts, print_json, print_lines, reporting_errors, span
from inweave.cli.options import JSON
from inweave.cli.progress import LATE, display
from inweave.cli.tables import fact_lines, table, terminal_width, wrap_text
from inweave.files.paths import printable

if TYPE_CHECKING:
    from inweave.library import Library, LibraryEntry

library_app = typer.Typer(help="Index folders of LoRA files: list, find, check their health.", no_args_is_help=True)
Folders = Annotated[
    list[Path] | None, typer.Option("--folder", "-f", help="A folder of LoRAs.", show_default="./loras")
]
Database = Annotated[
    Path | None, typer.Option("--database", help="The file of the index.", show_default="next to the worker's data")
]


@contextmanager
def _library(folders: list[Path] | None, database: Path | None, as_json: bool) -> Iterator[Library]:
    """Open the library and show that its folders are being read, until the end of the block."""
    with reporting_errors(as_json), display(as_json, delay=LATE) as progress:
        progress.start("reading the folders")
        from inweave.library import Library
        from inweave.models import embedded
        from inweave.serve.settings import default_data_folder

        own = lora_folders(folders)
        packaged = embedded.folder() / "loras"
        listed = own if packaged.resolve() in [folder.resolve() for folder in own] else [*own, packaged]
        yield Library(database or default_data_folder().parent / "library.sqlite3", listed)


@library_app.command("scan")
def scan(
    folder: Folders = None,
    database: Database = None,
    examine: Annotated[bool, typer.Option("--examine", help="Also read whole files, for hashes and health.")] = False,
    as_json: JSON = False,
) -> None:
    """Bring the index up to date with the folders.

    Example: inweave library scan --folder ~/loras --examine
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the file being read is not marked as crashing
    with _library(folder, database, as_json) as library:
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
    base: Annotated[str | None, typer.Option("--base", help="Only LoRAs for this base.", show_default="all")] = None,
    folder: Folders = None,
    database: Database = None,
    as_json: JSON = False,
) -> None:
    """List LoRAs by name.

    Example: inweave library list pixel --base sdxl
    """
    with _library(folder, database, as_json) as library:
        library.scan()
        entries = library.entries(text, base=base)
    if as_json:
        print_json({"ok": True, "loras": [entry.as_dict(details=False) for entry in entries]})
        return
    if not entries:
        condition = f" that matches {text!r}" if text else ""
        typer.echo(printable(f"no LoRA{condition} in {', '.join(str(folder) for folder in library.folders)}"), err=True)
    width = terminal_width()
    for entry, line in zip(entries, table([_columns(entry) for entry in entries], width), strict=True):
        color = "red" if entry.health else None
        if width is None:
            print_lines(["  ".join([line, *entry.health[:1]])], color)
        else:
            print_lines([line, *(f"  {each}" for each in wrap_text(" ".join(entry.health[:1]), width - 4))], color)


def _columns(entry: LibraryEntry) -> list[str]:
    """Return the columns of a list: name, base, algorithm, rank, trigger word, path."""
    facts = entry.facts
    words = [word for source in facts.triggers if source["source"] != "ss_tag_frequency" for word in source["words"]]
    rank = f"rank {span(facts.ranks)}" if facts.ranks else "-"
    algorithms = "+".join(facts.algorithms) or "-"
    return [entry.name, facts.base or "unknown base", algorithms, rank, words[0] if words else "-", entry.path]


@library_app.command("show")
def show(
    reference: Annotated[str, typer.Argument(help="A name, a path, an id or a hash.")],
    folder: Folders = None,
    database: Database = None,
    as_json: JSON = False,
) -> None:
    """Show everything known about one LoRA.

    Example: inweave library show pixel
    """
    with _library(folder, database, as_json) as library:
        library.scan()
        library.examine()
        entry = library.find(reference)
        document = {**entry.as_dict(), "duplicates": library.twins(entry)}
    if as_json:
        print_json({"ok": True, **document})
        return
    print_facts(str(document["name"]), fact_lines(_rows(document), terminal_width()))


#: fields that `show` prints elsewhere, or not at all
_HIDDEN = ("metadata", "checked", "name", "display_name", "error", "health")


def _rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the facts of one LoRA for people, problems first."""
    rows: list[tuple[str, str]] = [("health", line) for line in document["health"]]
    for name, value in document.items():
        if value in (None, [], (), {}, "") or name in _HIDDEN:
            continue
        if name == "base":
            rows.append((name, f"{value} (confidence {document['confidence']:.0%})"))
        elif name == "size":
            rows.append((name, f"{value / 2**20:.1f} MiB" if value >= 2**20 else f"{value / 2**10:.1f} KiB"))
        elif name == "modified":
            rows.append((name, time.strftime("%Y-%m-%d %H:%M", time.localtime(value))))
        elif name == "triggers":
            rows += [("triggers", f"{', '.join(each['words'])}  ({each['source']})") for each in value]
        elif name == "hashes":
            rows += [(kind, digits) for kind, digits in value.items() if digits]
        elif name in ("evidence", "warnings", "problems"):
            rows += [(name, line) for line in value]
        elif name == "duplicates":
            rows.append((name, f"same tensors: {', '.join(value)}; keep one of them"))
        elif isinstance(value, list | tuple):
            rows.append((name, ", ".join(map(str, value))))
        elif name in ("description", "notes", "negative_text"):
            rows.append((name, " ".join(value.split())))
        elif name != "confidence":
            rows.append((name, str(value)))
    if not document["checked"] and not document["error"]:
        rows.append(("health", "not fully read yet"))
    return rows


@library_app.command("find")
def find(
    reference: Annotated[
        str, typer.Argument(help="A name, a path, an id or a hash (SHA-256, AutoV1, AutoV2, AutoV3).")
    ],
    folder: Folders = None,
    database: Database = None,
    as_json: JSON = False,
) -> None:
    """Print the file of a name or a hash.

    Example: inweave library find ddd48cd74131
    """
    with _library(folder, database, as_json) as library:
        library.scan()
        if reference.lower().removeprefix("0x").strip("0123456789abcdef") == "" or ":" in reference:
            library.examine()  # only hashes need whole files
        entry = library.find(reference)
    if as_json:
        print_json({"ok": True, "file": str(entry.file), **entry.as_dict(details=False)})
    else:
        typer.echo(printable(str(entry.file)))


@library_app.command("doctor")
def doctor(folder: Folders = None, database: Database = None, as_json: JSON = False) -> None:
    """Check every file: unreadable, NaN, orphaned or empty factors, duplicates. Exit code 1 if something is wrong.

    Example: inweave library doctor --folder ~/loras
    """
    with _library(folder, database, as_json) as library:
        report = library.scan()
        library.examine()
        sick = [entry for entry in library.entries() if entry.health]
        duplicates = library.duplicates()
    if as_json:
        print_json({
            "ok": not sick, "files": report.files, "passed_over": report.passed_over,
            "unhealthy": [{"id": entry.id, "path": entry.path, "health": entry.health} for entry in sick],
            "duplicates": [[entry.path for entry in group] for group in duplicates],
        })  # fmt: skip
    else:
        counts = {"files": report.files, "unhealthy": len(sick), "duplicates": len(duplicates)}
        print_facts("library", [(name, str(count)) for name, count in counts.items()])
        width = terminal_width()
        for entry in sick:
            print_lines(
                (line for each in entry.health for line in wrap_text(f"{entry.path}: {each}", width, "  ")), "red"
            )
        for group in duplicates:
            several = len({entry.path for entry in group}) < len(group)  # of one name, in different folders
            names = ", ".join(str(entry.file) if several else entry.path for entry in group)
            print_lines(wrap_text(f"same tensors: {names}; keep one of them", width, "  "), "yellow")
        print_lines((line for each in report.passed_over for line in wrap_text(each, width, "  ")), "yellow")
    raise typer.Exit(PROBLEMS if sick else OK)
