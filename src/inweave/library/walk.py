"""The LoRA files below a folder, with just enough to see whether one has changed: no file is opened.

Adapter files end in .safetensors; a folder with `adapter_config.json` and `adapter_model.safetensors` is one PEFT
adapter. Links that lead out of the folder are passed over, as are devices, pipes, hidden folders and names that are not Unicode.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SIDECAR_ENDINGS = (".json", ".civitai.info", ".png", ".jpg", ".jpeg", ".webp")
MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Sighting:
    """A file as the folder shows it; ``stamp`` changes whenever the file or one of its sidecars does."""

    path: str  # below the root
    size: int
    modified_ns: int
    inode: int
    stamp: str
    siblings: frozenset[str]


def walk(root: Path, passed_over: list[str]) -> Iterator[Sighting]:
    """Every adapter below ``root``; what was passed over, and why, is added to the list."""
    stack: list[tuple[Path, str, int]] = [(root, "", 0)]
    boundary = root.resolve()
    while stack:
        folder, prefix, depth = stack.pop()
        files, folders = _read(folder, prefix, boundary, passed_over)
        if PEFT_CONFIG in files and PEFT_WEIGHTS in files and prefix:
            weights = files[PEFT_WEIGHTS]
            stamp = f"{weights.st_mtime_ns}/{files[PEFT_CONFIG].st_mtime_ns}"
            yield Sighting(prefix.rstrip("/"), weights.st_size, weights.st_mtime_ns, weights.st_ino, stamp, frozenset())
            continue
        names = frozenset(files)
        stamps = {name: status.st_mtime_ns for name, status in files.items() if name.endswith(SIDECAR_ENDINGS)}
        for name, status in sorted(files.items()):
            if not name.endswith(".safetensors"):
                continue
            stem = name.removesuffix(".safetensors")
            sidecar_stamps = [
                stamps.get(f"{stem}{middle}{ending}", 0) for middle in ("", ".preview") for ending in SIDECAR_ENDINGS
            ]
            stamp = "/".join(str(each) for each in (status.st_mtime_ns, *sidecar_stamps) if each)
            yield Sighting(prefix + name, status.st_size, status.st_mtime_ns, status.st_ino, stamp, names)
        if depth < MAX_DEPTH:
            stack += [(folder / name, f"{prefix}{name}/", depth + 1) for name in folders]
        elif folders:
            passed_over.append(f"{prefix}: deeper than {MAX_DEPTH} folders")


def _read(
    folder: Path, prefix: str, boundary: Path, passed_over: list[str]
) -> tuple[dict[str, os.stat_result], list[str]]:
    """(regular files, folders) of one folder."""
    files: dict[str, os.stat_result] = {}
    folders: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not is_unicode(entry.name):
                    if entry.name.endswith(".safetensors") or entry.is_dir():
                        passed_over.append(f"{prefix}{ascii(entry.name)[1:-1]}: its name is not Unicode; rename it")
                elif entry.is_symlink() and not _inside(Path(entry.path), boundary):
                    if entry.name.endswith(".safetensors") or entry.is_dir():
                        passed_over.append(f"{prefix}{entry.name}: a link that leads out of the library")
                elif entry.is_dir(follow_symlinks=False):
                    if not entry.name.startswith("."):
                        folders.append(entry.name)
                elif entry.is_file():
                    files[entry.name] = entry.stat()
                elif entry.name.endswith(".safetensors"):
                    passed_over.append(f"{prefix}{entry.name}: not a regular file")
    except OSError as error:
        passed_over.append(f"{prefix or '.'}: {error.strerror}")
    return files, sorted(folders, reverse=True)


def is_unicode(name: str) -> bool:
    """Bytes that are no UTF-8 come as halves of surrogate pairs, which no index, prompt or answer can hold."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _inside(link: Path, boundary: Path) -> bool:
    try:
        return link.resolve(strict=True).is_relative_to(boundary)
    except (OSError, RuntimeError):
        return False
