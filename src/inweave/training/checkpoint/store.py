"""The state of a run on disk: written whole or not at all, and read back bit for bit.

    <output>/<name>-state/step-000120/state.safetensors   every tensor: parameters, optimizer, EMA, counters
                                     /state.json          step, configuration, what the data was, a sum of all tensors
                         /.step-000120.part               being written
                         /.lock                           held by the process that writes

A checkpoint is written into a hidden folder beside its place, every file and the folder flushed to the disk, and then
renamed: a process that dies at any moment leaves the one before it, complete. One that stands in the place already is
moved aside first and removed last. What is left behind is tidied by the next run: a hidden folder that is whole is put
into its place if that is empty, everything else goes. Old checkpoints are removed only after the new one is in place.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from inweave.errors import ConfigError, FormatError
from inweave.training.data.cache import tensor_checksum

VERSION = 1
_STEP = re.compile(r"step-(\d{6,})")
_LEFT = re.compile(r"\.(step-\d{6,})\.(part|old)")
_FILES = ("state.safetensors", "state.json")


@dataclass(frozen=True, slots=True)
class State:
    step: int
    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]


def save_state(folder: Path, state: State, keep: int) -> Path:
    """Write a checkpoint and remove those beyond the last ``keep``; 0 keeps all."""
    place = folder / f"step-{state.step:06d}"
    hidden, aside = folder / f".{place.name}.part", folder / f".{place.name}.old"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in (hidden, aside):
            shutil.rmtree(leftover, ignore_errors=True)
        hidden.mkdir()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
        save_file(tensors, hidden / _FILES[0])
        facts = {**state.facts, "version": VERSION, "step": state.step, "sum": tensor_checksum(tensors)}
        facts["facts_sum"] = _sum_of_facts(facts)
        (hidden / _FILES[1]).write_text(json.dumps(facts, indent=1, ensure_ascii=False), "utf-8")
        for path in (*(hidden / name for name in _FILES), hidden):
            _flush(path)
        if place.exists():  # the same step again, after a resume or because this one is damaged
            place.rename(aside)
        hidden.rename(place)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(hidden, ignore_errors=True)
        told = (error.strerror if isinstance(error, OSError) else None) or error
        raise FormatError(f"{place}: the checkpoint could not be written: {told}") from None
    shutil.rmtree(aside, ignore_errors=True)
    for path in checkpoints(folder)[keep:] if keep else ():
        if path != place:  # the one just written is good, whatever the others are
            shutil.rmtree(path, ignore_errors=True)
    return place


def checkpoints(folder: Path) -> list[Path]:
    """All that have the name of one, the newest first; whether they are whole, `load_state` finds out."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True) if path.is_dir()]


def load_state(place: Path) -> State:
    """A checkpoint, or what is wrong with it."""
    try:
        facts = json.loads((place / _FILES[1]).read_text("utf-8"))
        tensors = load_file(place / _FILES[0])
        step, version, total = int(facts["step"]), facts["version"], facts["sum"]
        known = facts.get("facts_sum")  # those of earlier versions have none
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise FormatError(f"{place}: not a complete checkpoint: {error}") from None
    if version != VERSION:
        raise FormatError(f"{place}: written in version {version} of the format, {VERSION} is read here")
    if total != tensor_checksum(tensors):
        raise FormatError(f"{place}: damaged: its tensors are not those that were written")
    if known is not None and known != _sum_of_facts(facts):
        raise FormatError(f"{place}: damaged: {_FILES[1]} is not what was written")
    return State(step, tensors, facts)


def newest(folder: Path) -> tuple[State | None, list[str]]:
    """(the newest checkpoint that can be read whole, what is wrong with those passed over for it)."""
    damaged: list[str] = []
    for place in checkpoints(folder):
        try:
            return load_state(place), damaged
        except FormatError as error:
            damaged.append(str(error))
    if damaged:
        raise FormatError("none of the checkpoints can be read:\n" + "\n".join(damaged))
    return None, []


def named(place: Path) -> tuple[State, list[str]]:
    """The checkpoint a path means: itself, or the newest in a folder of checkpoints."""
    if (place / _FILES[1]).exists() or _STEP.fullmatch(place.name):
        return load_state(place), []
    state, damaged = newest(place)
    if state is None:
        raise ConfigError(f"resume: {place} is no checkpoint and holds none; name a folder like lora-state/step-000100")
    return state, damaged


def tidy(folder: Path) -> None:
    """Finish or remove what a process left behind that died while writing."""
    for path in sorted(
        folder.glob(".step-*"), reverse=True
    ):  # .part before .old: the new one goes before the one aside
        match = _LEFT.fullmatch(path.name)
        place = folder / match[1] if match else path
        if match and not place.exists():
            with suppress(FormatError, OSError):
                load_state(path)
                path.rename(place)
                continue
        shutil.rmtree(path, ignore_errors=True)


def alone(folder: Path) -> TextIO:
    """A lock on the folder, until the file is closed or the process ends, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output: {folder} cannot be written to: {error.strerror}") from None
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass  # no such locks on this system
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            file.close()
            raise ConfigError(
                f"{folder}: another process is training this run; stop it, or take another name"
            ) from None
    return file  # a file system without locks has none


def _sum_of_facts(facts: Mapping[str, Any]) -> int:
    told = {name: value for name, value in facts.items() if name != "facts_sum"}
    return zlib.crc32(json.dumps(told, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def _flush(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # folders cannot be opened there
    number = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
