"""`inweave hash`: the hashes that model sites identify a file by."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inweave.cli.adapters import LoraDir, locate
from inweave.cli.console import OK, PROBLEMS, print_facts, print_json, reporting_errors
from inweave.cli.options import JSONList
from inweave.cli.progress import LATE, display


def hash_files(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files of any kind, or names of LoRAs.")],
    lora_dir: LoraDir = None,
    as_json: JSONList = False,
) -> None:
    """Print SHA-256, AutoV1, AutoV2, AutoV3 and BLAKE3 of files, and whether their metadata claims another hash.

    Example: inweave hash style.safetensors
    """
    from inweave.exchange.hashes import hash_file

    with reporting_errors(as_json), display(as_json, delay=LATE) as progress:
        located = [locate(file, lora_dir) for file in files]
        hashes = [hash_file(file, progress=progress.byte_counter(f"hashing {file.name}")) for file in located]
    rows = [each.as_dict() for each in hashes]
    if as_json:
        print_json(rows[0] if len(rows) == 1 else rows)
    else:
        for each, row in zip(hashes, rows, strict=True):
            print_facts(each.path, [(n, value) for n, value in row.items() if value and n not in ("path", "claimed")])
    raise typer.Exit(PROBLEMS if any(each.note for each in hashes) else OK)
