"""LoRAs and checkpoints as arguments: a path, or a name or a hash that is looked up in the LoRA folders.

`inweave/emoji` means the folder of the built-in model wherever a model's path is expected.
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


def lora_folders(folders: Sequence[Path] | None) -> list[Path]:
    """Return the folders of --lora-dir, or ./loras if it exists."""
    return list(folders) if folders else [folder for folder in (Path("loras"),) if folder.is_dir()]


def present(paths: Sequence[Path] | Path | None, name: str) -> list[Path]:
    """Return the folders or the file of an option, or the one of that name in the working directory, if it exists."""
    if paths:
        return [paths] if isinstance(paths, Path) else list(paths)
    return [path for path in (Path(name),) if path.exists()]


def lookup(folders: Sequence[Path] | None) -> AdapterLookup:
    """Return the adapters in these folders, or in ./loras, and the bundled ones."""
    from inweave.exchange.lookup import AdapterLookup

    return AdapterLookup(lora_folders(folders))


def weights_path(base: Path) -> Path:
    """Return the path of a checkpoint; `inweave/emoji` is the folder of the built-in model."""
    if base.as_posix() != "inweave/emoji" or base.exists():
        return base
    from inweave.exchange.lookup import packaged_model

    return packaged_model()


def locate(path: Path, folders: Sequence[Path] | None) -> Path:
    """Return the file or folder of an adapter argument."""
    packaged = weights_path(path)
    return packaged if packaged != path else lookup(folders).locate(path)


def located_stack(
    texts: Sequence[str], folders: Sequence[Path] | None
) -> list[tuple[str | Path, float | dict[str, float]]]:
    """Parse FILE[:STRENGTH] or NAME[:STRENGTH] into pairs of a path and a strength."""
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
