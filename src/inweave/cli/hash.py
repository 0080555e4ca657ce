"""`inweave hash`: the hashes model sites know a file by."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inweave.cli.output import OK, PROBLEMS, print_facts, print_json, reporting_errors


def hash_files(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Safetensors files.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: one object for one file, a list for several.")
    ] = False,
) -> None:
    """SHA-256, AutoV1, AutoV2, AutoV3 and BLAKE3 of files, and whether their metadata claims another hash."""
    from inweave.exchange.hashes import hash_file

    with reporting_errors(as_json):
        found = [hash_file(file) for file in files]
    if as_json:
        rows = [hashes.as_dict() for hashes in found]
        print_json(rows[0] if len(rows) == 1 else rows)
    else:
        for hashes in found:
            rows_shown = [
                (name, value) for name, value in hashes.as_dict().items() if value and name not in ("path", "claimed")
            ]
            print_facts(hashes.path, rows_shown)
    raise typer.Exit(PROBLEMS if any(hashes.note for hashes in found) else OK)
