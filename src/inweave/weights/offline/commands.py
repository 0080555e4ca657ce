"""Bake, extract and resize as functions of paths: called by the commands of the same names and by `inweave.*`.

    bake(base, loras, out)       a checkpoint with adapters merged in
    extract(tuned, base, out)    the difference of a fine-tuned checkpoint, as a LoRA
    resize(loras, out)           an adapter at another rank, or several as one

An adapter is a path, "FILE[:STRENGTH]" (`inweave.adapter.strength_spec`), an `Adapter`, or a pair of one of these and
a strength. Arguments are checked before the work starts, and a failure leaves no file behind.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from inweave.adapter import Adapter
from inweave.arguments import expect, expect_callable
from inweave.errors import ConfigError, TargetError
from inweave.exchange.check import check
from inweave.exchange.convert import default_dialect, naming_for, refuse_output, save
from inweave.exchange.load import alphas_for, component_folders, load, open_base, open_weights
from inweave.exchange.ties import tied_changes
from inweave.files.paths import as_path, is_file
from inweave.files.reading import open_regular
from inweave.formats.alphas import Alphas
from inweave.formats.dialects import written_dialects
from inweave.formats.files import maps_of, open_container, refuse_truncated
from inweave.formats.gguf import is_gguf
from inweave.formats.read import read_container
from inweave.ops.tensors.device import choose_device, named_dtype
from inweave.targets.bases import known_index
from inweave.targets.detect import detect
from inweave.targets.index import ModelIndex
from inweave.targets.plan import Plan
from inweave.targets.resolve import resolve
from inweave.weights.offline import bake as baking
from inweave.weights.offline import extract as extraction
from inweave.weights.offline import resize as resizing
from inweave.weights.offline.bake import Baked, BakeItem
from inweave.weights.offline.bake_gguf import write_merged_gguf
from inweave.weights.offline.extract import Extracted
from inweave.weights.offline.resize import Resized
from inweave.weights.stack import AdapterLike, StackEntry, Strength, read_stack

Progress = Callable[[int, int], None]  #: done, total
FilePath = str | os.PathLike[str]
#: dialects that are read, but written under another name
_WRITTEN_AS = {"lycoris": "kohya", "diffusers-peft": "diffusers"}


def _no_progress(done: int, total: int) -> None:
    pass


def bake(
    base: FilePath,
    loras: Iterable[StackEntry],
    out: FilePath,
    *,
    dtype: torch.dtype | str | None = None,
    alpha: Alphas | None = None,
    replace: bool = False,
    progress: Progress = _no_progress,
) -> Baked:
    """Write the checkpoint ``base`` with ``loras`` merged in to ``out``: same names, same layout.

    Args:
        base: A file, an index of shards or a model folder.
        loras: Adapters with their strengths, as `Weaver.apply` takes them.
        out: A .safetensors file, a .gguf file for a base of that form, or a new folder for shards and folders.
        dtype: Of the result, a torch dtype or "fp32", "fp16", "bf16"; None keeps each tensor's own.
        alpha: For files among ``loras`` that do not store an alpha, as in `load`.
        replace: Whether an existing model folder may be replaced.
        progress: Called with (bytes done, bytes in total).

    Returns:
        The files that were written, and the adapters as recorded in the metadata.

    Raises:
        TargetError: An adapter does not fit the base.
        ConfigError: ``out`` cannot be written there, or an argument is invalid.
        FormatError: A file cannot be read.
    """
    expect_callable("progress", progress)
    index = open_weights(base)
    target = as_path(out)
    warnings: list[str] = []
    entries = read_stack(loras)
    paths = [adapter for adapter, _ in entries if isinstance(adapter, str | os.PathLike)]
    alphas = alphas_for(paths, alpha) if alpha is not None else []
    scaled = {path: load(path, alpha=each) for path, each in zip(paths, alphas, strict=False)}
    stack = []
    for adapter, strength in entries:
        if isinstance(adapter, str | os.PathLike) and Path(adapter).resolve() == target.resolve():
            raise ConfigError(f"{target}: this is one of the adapters; choose another output")
        stack.append(_bake_item(adapter, strength, index, warnings, scaled))
    if is_file(as_path(base)) and is_gguf(as_path(base)):
        done = write_merged_gguf(base, stack, target, index=index, dtype=_dtype(dtype), progress=progress)
    else:
        done = baking.write_merged(
            base, stack, target, index=index, folders=component_folders(Path(base)), dtype=_dtype(dtype),
            progress=progress, replace=replace,
        )  # fmt: skip
    done.base = index.base
    done.loras = [baking.record(item.name, item.sha256, item.strength) for item in stack]
    done.warnings = warnings
    return done


def extract(
    tuned: FilePath,
    base: FilePath,
    out: FilePath,
    *,
    rank: int = 32,
    energy: float | None = None,
    dialect: str | None = None,
    dtype: torch.dtype | str = "fp16",
    device: torch.device | str = "auto",
    full_norms: bool = False,
    progress: Progress = _no_progress,
) -> Extracted:
    """Write the difference of two checkpoints of one model, in any naming, as a LoRA.

    Args:
        tuned: The fine-tuned checkpoint.
        base: The checkpoint it was trained from.
        out: The adapter file to write.
        rank: The highest rank of a module.
        energy: Use the lowest rank that keeps this share of a module's squared norm.
        dialect: The dialect to write; None: kohya, or diffusers if kohya's names of this model are not known.
        dtype: Of the factors.
        device: Where to compute; "auto" uses a GPU if there is one.
        full_norms: Keep changed norms and biases too, as full differences.
        progress: Called with (tensors done, tensors in total).

    Returns:
        What was written, with the share of the difference that is kept.

    Raises:
        TargetError: The checkpoints are of different models, or do not differ.
        ConfigError: An argument is invalid.
    """
    expect_callable("progress", progress)
    expect("full_norms", full_norms, bool)
    index = open_weights(base)
    dialect = dialect or default_dialect(index)
    refuse_output(as_path(out), dialect, index)
    tuned_path, base_path = Path(tuned), Path(base)
    with ExitStack() as opened:
        result = extraction.extract_difference(
            extraction.open_checkpoint(tuned_path, open_weights(tuned), component_folders(tuned_path), opened),
            extraction.open_checkpoint(base_path, index, component_folders(base_path), opened),
            lambda component: naming_for(dialect, component, index),
            rank=rank, energy=energy, full_norms=full_norms, dtype=_dtype(dtype) or torch.float16,
            device=choose_device(device), progress=progress,
        )  # fmt: skip
    about = {"tuned": tuned_path.name, "base": base_path.name, "rank": rank, "energy": round(result.energy, 6)}
    result.adapter = replace(result.adapter, metadata={"inweave.extracted": json.dumps(about)})
    result.base = index.base
    result.saved = save(result.adapter, out, dialect=dialect, base=base)
    return result


def resize(
    loras: StackEntry | Sequence[StackEntry],
    out: FilePath,
    *,
    rank: int | None = None,
    energy: float | None = None,
    dialect: str | None = None,
    base: FilePath | ModelIndex | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
) -> Resized:
    """Write one adapter at another rank, or several combined into one.

    Args:
        loras: One adapter, or several with their strengths.
        out: The adapter file to write.
        rank: The highest rank of a module.
        energy: Use the lowest rank that keeps this share of a module's squared norm. With neither, several adapters
            are combined exactly.
        dialect: The dialect to write; None: that of the first adapter, or diffusers if it is not known of this model.
        base: The model they are for, if it cannot be detected.
        dtype: Of the new factors; None keeps that of the old ones.
        device: Where to compute.

    Returns:
        What was written, each module with its rank and the share that is kept.

    Raises:
        ConfigError: Neither a rank nor an energy is given for one adapter, or modules cannot be combined.
        TargetError: The adapters are for different base models.
    """
    stack = read_stack([loras] if isinstance(loras, tuple) else loras)
    if not stack:
        raise ConfigError("no adapter to resize")
    if len(stack) == 1 and rank is None and energy is None:
        raise ConfigError("choose a size: a rank or an energy (--rank or --energy)")
    adapters = [_loaded(adapter) for adapter, _ in stack]
    names = [_name(adapter) for adapter, _ in stack]
    index = _common_index(names, adapters, base)
    dialect = dialect or default_dialect(index, _dialect(adapters[0]))
    refuse_output(as_path(out), dialect, index)
    result = resizing.resize_stack(
        [(adapter, strength) for adapter, (_, strength) in zip(adapters, stack, strict=True)],
        index,
        lambda component: naming_for(dialect, component, index),
        rank=rank, energy=energy, dtype=_dtype(dtype), device=choose_device(device),
    )  # fmt: skip
    if len(stack) > 1:
        sources = [
            baking.record(name, _sha256(adapter), strength)
            for name, (adapter, strength) in zip(names, stack, strict=True)
        ]
        metadata = {**result.adapter.metadata, "inweave.combined": json.dumps(sources)}
        result.adapter = replace(result.adapter, metadata=metadata)
    result.base = index.base
    result.saved = save(result.adapter, out, dialect=dialect, base=base if base is not None else index.base)
    return result


def _bake_item(
    adapter: AdapterLike,
    strength: Strength,
    index: ModelIndex,
    warnings: list[str],
    scaled: Mapping[FilePath, Adapter],
) -> BakeItem:
    """Return an adapter resolved completely on the base; raise with the reason that `check` reports otherwise.

    ``scaled``: adapters by path that were read with the caller's alpha.
    """
    if isinstance(adapter, Plan):
        _loaded(adapter)
        return BakeItem(adapter, strength)
    name, prefix = _name(adapter), "" if isinstance(adapter, Adapter) else f"{os.fspath(adapter)}: "
    source = scaled[adapter] if not isinstance(adapter, Adapter) and adapter in scaled else _loaded(adapter)
    verdict = check(source, index)
    if (
        verdict.error and 2 * verdict.report.placed < verdict.report.tensors
    ):  # otherwise the list of tensors is more specific
        raise TargetError(f"{prefix}{verdict.error}")
    try:
        plan = resolve(source, index)
    except TargetError as error:
        raise TargetError(f"{prefix}{error}") from None
    if tied := tied_changes(plan, index):
        raise TargetError(f"{prefix}{tied[0]}; untie the checkpoint first, or use the adapter unmerged")
    if verdict.nonfinite:
        row, more = verdict.nonfinite[0], len(verdict.nonfinite) - 1
        also = f" (and {more} more tensors)" if more else ""
        raise TargetError(f"{prefix}{row['key']}: {row['count']} of {row['of']} numbers are NaN or infinite{also}")
    warnings += [f"{name}: {warning}" if name else warning for warning in verdict.report.warnings]
    return BakeItem(plan, strength, name, _sha256(adapter))


def _loaded(adapter: AdapterLike) -> Adapter:
    """Return the adapter with its numbers in memory, or in a map of the whole file."""
    if not isinstance(adapter, Plan | Adapter):
        return read_container(open_container(adapter, mapped=False))
    source = adapter.adapter if isinstance(adapter, Plan) else adapter
    refuse_truncated(maps_of(source.tensors.values()), "the adapter's file")
    return source


def _name(adapter: AdapterLike) -> str:
    """Return the name of an adapter in metadata; None for one that is not a file."""
    return Path(adapter).name if isinstance(adapter, str | os.PathLike) else ""


def _sha256(adapter: AdapterLike) -> str:
    """Return the hash of an adapter's file, or of its shards one after the other."""
    if not isinstance(adapter, str | os.PathLike):
        return ""
    digest = hashlib.sha256()
    for part in open_container(adapter).files:
        with open_regular(part) as file:
            while chunk := file.read(4 * 1024 * 1024):
                digest.update(chunk)
    return digest.hexdigest()


def _dialect(adapter: Adapter) -> str:
    """Return the dialect an adapter was read in, if it can be written."""
    read_as = next(iter(adapter.dialects), "")
    return _WRITTEN_AS.get(read_as, read_as if read_as in written_dialects() else "kohya")


def _common_index(names: Sequence[str], adapters: Sequence[Adapter], base: FilePath | ModelIndex | None) -> ModelIndex:
    """Return the base model that all adapters were trained for."""
    if base is not None:
        return base if isinstance(base, ModelIndex) else open_base(base)
    detections = [detect(adapter) for adapter in adapters]
    for name, detection in zip(names, detections, strict=True):
        if detection.base is None or detection.confidence < 0.5:
            guess = f" (best guess: {detection.base}, confidence {detection.confidence:.2f})" if detection.base else ""
            raise TargetError(f"{name}: the base model of this adapter is not clear{guess}; name it with base (--base)")
    bases = dict.fromkeys(detection.base for detection in detections if detection.base)
    common = next((each for each in bases if all(detection.fits_as_well(each) for detection in detections)), None)
    if common is None:
        rows = ", ".join(f"{name} is for {detection.base}" for name, detection in zip(names, detections, strict=True))
        raise TargetError(f"adapters of different base models cannot be combined: {rows}")
    return known_index(common)


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    return None if dtype is None else named_dtype(dtype)
