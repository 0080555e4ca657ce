"""Checkpoints on disk: written completely or not at all, and read back bit for bit.

    <output>/<name>-state/step-000120/state.safetensors   every tensor: parameters, optimizer, EMA, counters
                                     /state.json          step, configuration, a digest of the data, a checksum
                         /.step-000120.RANDOM.part        being written
                         /.lock                           locked by the process that trains

A checkpoint is written into a hidden folder, every file and the folder are flushed to the disk, and the folder is then
renamed: a process that dies at any moment leaves the previous checkpoint complete. A checkpoint of the same step is
moved aside first and removed last. The next run recovers leftovers: a complete hidden folder gets its name if that is
free, everything else is removed. Old checkpoints are removed only after the new one has its name; milestones are kept.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from inweave.checked import for_message
from inweave.errors import ConfigError, FormatError
from inweave.files.documents import read_json
from inweave.files.paths import exists, is_folder
from inweave.files.reading import ensure_regular
from inweave.files.writing import make_folder, new_folder, open_append, write_text
from inweave.training.data.cache import tensor_checksum

VERSION = 2  # 1: random numbers were drawn by micro-batch, so a run could not resume with the same numbers
_STEP = re.compile(r"step-(\d{6,})")
_LEFTOVER = re.compile(r"\.(step-\d{6,})\.(?:[0-9a-f]{16}\.)?(part|old)")
_FILES = ("state.safetensors", "state.json")


@dataclass(frozen=True, slots=True)
class State:
    """``facts``: the identity of the run: configuration, digests of data and base, start time, validation losses."""

    step: int
    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]


def save_state(folder: Path, state: State, keep: int, *, keep_every: int = 0) -> Path:
    """Write a checkpoint and remove all but the last ``keep`` (0 keeps all) and the `milestones`."""
    target = folder / f"step-{state.step:06d}"
    aside = folder / f".{target.name}.{secrets.token_hex(8)}.old"

    def unwritable(reason: object) -> FormatError:
        return FormatError(f"{target}: the checkpoint could not be written: {reason}")

    make_folder(folder, error=unwritable)
    with new_folder(target, error=unwritable) as hidden:
        _write_and_rename(hidden, target, aside, state, unwritable)
    shutil.rmtree(aside, ignore_errors=True)
    existing = checkpoints(folder)
    # the one just written is complete, even if others are damaged
    retained_paths = {target, *existing[:keep], *milestones(existing, keep_every)} if keep else set(existing)
    for path in existing:
        if path not in retained_paths:
            shutil.rmtree(path, ignore_errors=True)
    return target


def milestones(existing: list[Path], every: int) -> list[Path]:
    """Return the first checkpoint at or after each multiple of ``every`` steps, and before the next; 0: none.

    It still exists when the second one of its range is written, since the newest is never removed, and is then kept.
    """
    first: dict[int, Path] = {}
    for path in existing if every else ():  # newest first, so that the last one to be set is the earliest
        first[_step_of(path) // every] = path
    return [path for number, path in first.items() if number > 0]


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _write_and_rename(
    hidden: Path, target: Path, aside: Path, state: State, unwritable: Callable[[object], FormatError]
) -> None:
    try:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
        save_file(tensors, hidden / _FILES[0])
        facts = {**state.facts, "version": VERSION, "step": state.step, "sum": tensor_checksum(tensors)}
        facts["facts_sum"] = _sum_of_facts(facts)
        write_text(hidden / _FILES[1], json.dumps(facts, indent=1, ensure_ascii=False), error=unwritable)
        for path in (*(hidden / name for name in _FILES), hidden):
            _flush(path)
        if exists(target):  # the same step again, after a resume or because this one is damaged
            target.rename(aside)
        hidden.rename(target)
        _flush(target.parent)
    except (OSError, SafetensorError) as error:
        raise unwritable((error.strerror if isinstance(error, OSError) else None) or error) from None


def checkpoints(folder: Path) -> list[Path]:
    """Return all folders named like a checkpoint, newest first; `load_state` checks whether they are complete."""
    if not is_folder(folder):
        return []
    numbered = [(int(match[1]), path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(numbered, reverse=True) if is_folder(path)]


def load_state(place: Path) -> State:
    """Read a checkpoint; raises FormatError if it is incomplete or damaged."""
    try:
        facts: Any = read_json(place / _FILES[1], finite=False)  # a loss may be NaN
        ensure_regular(place / _FILES[0])
        tensors = load_file(place / _FILES[0])
        step, version, total = int(facts["step"]), facts["version"], facts["sum"]
        facts_sum = facts.get("facts_sum")
    except (FormatError, OSError, ValueError, KeyError, TypeError, OverflowError, SafetensorError) as error:
        raise FormatError(f"{place}: not a complete checkpoint: {error}") from None
    if version != VERSION:
        raise FormatError(
            f"{place}: format version {for_message(version)}, expected {VERSION}; resume it with the release that "
            "wrote it, or continue from its adapter under another name (start_from)"
        )
    if total != tensor_checksum(tensors):
        raise FormatError(f"{place}: damaged: the checksum of its tensors does not match")
    if facts_sum is not None and facts_sum != _sum_of_facts(facts):
        raise FormatError(f"{place}: damaged: the checksum of {_FILES[1]} does not match")
    return State(step, tensors, facts)


def load_newest(folder: Path) -> tuple[State | None, list[str]]:
    """Return (the newest complete checkpoint, the problems of newer ones)."""
    damaged: list[str] = []
    for place in checkpoints(folder):
        try:
            return load_state(place), damaged
        except FormatError as error:
            damaged.append(str(error))
    if damaged:
        raise FormatError("\n  ".join(["no checkpoint can be read:", *damaged]))
    return None, []


def load_named(place: Path) -> tuple[State, list[str]]:
    """Read the checkpoint at a path: itself, or the newest in a folder of checkpoints."""
    if exists(place / _FILES[1]) or _STEP.fullmatch(place.name):
        return load_state(place), []
    state, damaged = load_newest(place)
    if state is None:
        raise ConfigError(
            f"resume: {place} is not a checkpoint and contains none; give a folder like lora-state/step-000100"
        )
    return state, damaged


def recover(folder: Path) -> None:
    """Finish or remove the leftovers of a process that died while writing."""
    leftovers = sorted(folder.glob(".step-*"), key=lambda path: (path.suffix == ".old", path.name))
    for path in leftovers:  # a new one before the old one
        match = _LEFTOVER.fullmatch(path.name)
        place = folder / match[1] if match else path
        if match and not exists(place):
            with suppress(FormatError, OSError):
                load_state(path)
                path.rename(place)
                continue
        shutil.rmtree(path, ignore_errors=True)


def lock(folder: Path) -> TextIO:
    """Lock the folder until the file is closed or the process ends in any way."""

    def unwritable(reason: str) -> ConfigError:
        return ConfigError(f"output: {folder} cannot be written to: {reason}")

    make_folder(folder, error=unwritable)
    file = open_append(folder / ".lock", error=unwritable)
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass  # this system does not have these locks
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            file.close()
            raise ConfigError(
                f"{folder}: another process is training this run; stop it, or use another name (--name)"
            ) from None
    return file  # also on a file system without locks


def _sum_of_facts(facts: Mapping[str, Any]) -> int:
    content = {name: value for name, value in facts.items() if name != "facts_sum"}
    return zlib.crc32(json.dumps(content, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def _flush(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open folders
    number = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
