"""Adapters as arguments: a path, or a name or a hash that is looked up in the LoRA folders, in every command alike.

`inweave/emoji` is the folder of the model inside the package wherever a model's path is expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inweave.files.paths import exists

if TYPE_CHECKING:
    from inweave.exchange.lookup import AdapterLookup

LoraDir = Annotated[
    list[Path] | None,
    typer.Option("--lora-dir", help="A folder where names and hashes of LoRAs are looked up.", show_default="./loras"),
]


def lookup(folders: Sequence[Path] | None) -> AdapterLookup:
    """The adapters in these folders, or in ./loras, and those of the package."""
    from inweave.exchange.lookup import AdapterLookup

    return AdapterLookup(folders or [folder for folder in (Path("loras"),) if folder.is_dir()])


def locate(path: Path, folders: Sequence[Path] | None) -> Path:
    """The file or folder of one argument."""
    if path.as_posix() == "inweave/emoji" and not path.exists():
        from inweave.exchange.lookup import packaged_model

        return packaged_model()
    return lookup(folders).locate(path)


def located_stack(
    texts: Sequence[str], folders: Sequence[Path] | None
) -> list[tuple[str | Path, float | dict[str, float]]]:
    """FILE[:STRENGTH] or NAME[:STRENGTH] as pairs of a path and a strength."""
    from inweave.adapter.strength_spec import parse_strength_spec
    from inweave.exchange.lookup import ensure_strength

    stack: list[tuple[str | Path, float | dict[str, float]]] = []
    known = lookup(folders)
    for text in texts:
        spec = parse_strength_spec(text, exists=exists)
        if not exists(spec.name) and known.match_name(spec.name) is None:
            ensure_strength(spec.name)
        stack.append((spec.name if exists(spec.name) else known.locate(spec.name), spec.strength))
    return stack
