"""The trained adapter's file: written, read back and verified before it gets its name.

The file is written under a temporary name, opened again, every tensor is resolved on the base model, and every value is
checked. Only then is it renamed: a run whose file does not pass is not finished, and an earlier good file is not lost.

Trained weights are never lost: a file that does not pass, or that cannot be expressed in the dialect after all, is
written as `<name>.unverified.safetensors`, and the error names it.
"""

from __future__ import annotations

import hashlib
import math
import re
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as serialize

from inweave.adapter import Adapter, Entry, Factors, Tensor
from inweave.errors import FormatError, TargetError
from inweave.exchange.convert import save
from inweave.exchange.load import load
from inweave.files.paths import is_file, is_folder
from inweave.files.writing import flush_folder, make_folder, new_folder, remove_folder
from inweave.formats.files import open_container, write_file
from inweave.formats.finite import scan
from inweave.ops.tensors.decode import decode, encode
from inweave.ops.tensors.device import DTYPES
from inweave.targets.index import ModelIndex
from inweave.targets.plan import Placement, Plan
from inweave.targets.resolve import resolve
from inweave.training.config.schema import TrainConfig

_ADVICE = "free some space or set another `output`, then resume from the last checkpoint with --resume"


def save_adapter(
    adapter: Adapter, path: Path, config: TrainConfig, index: ModelIndex, metadata: Mapping[str, str]
) -> Path:
    """Write the adapter in the configured dialect and precision, verify it, and only then give it its name."""
    make_folder(path.parent)
    typed = replace(cast(adapter, DTYPES[config.save_dtype]), metadata=dict(metadata))
    folder = config.dialect == "peft"
    target = path.with_suffix("") if folder else path
    try:
        with new_folder(target) as hidden:
            temporary = hidden / target.name
            try:
                save(typed, temporary, dialect=config.dialect, base=index)
                if not folder:
                    _add_hashes(temporary)
                verify(temporary, index, typed)
            except (TargetError, ValueError, LookupError, TypeError) as error:  # nothing that was trained is lost
                reason = str(error).replace(str(temporary), str(target))
                raise TargetError(f"{reason}; what was trained is in {_keep(temporary, target, typed)}") from error
            if folder and is_folder(target):  # other files in it stay
                for part in sorted(temporary.iterdir()):
                    part.replace(target / part.name)
            else:
                temporary.replace(target)
    except OSError as error:
        raise FormatError(f"{target}: cannot be written: {error.strerror}; {_ADVICE}") from None
    except FormatError as error:
        raise FormatError(f"{target}: cannot be written; {_ADVICE} ({error})") from None
    for changed in (target, target.parent) if folder else (target.parent,):
        flush_folder(changed)
    return target


def _keep(written: Path, target: Path, adapter: Adapter) -> Path:
    """Rename the written file to show that it was not verified; if there is none, write the tensors unchanged."""
    unverified = target.with_name(f"{target.name.removesuffix('.safetensors')}.unverified{target.suffix}")
    if is_file(written):
        written.replace(unverified)
    elif is_file(written / "adapter_model.safetensors"):
        shutil.rmtree(unverified, ignore_errors=True)
        written.replace(unverified)
    else:
        unverified = unverified.with_name(f"{unverified.name.removesuffix('.safetensors')}.safetensors")
        write_file(unverified, adapter.tensors, dict(adapter.metadata))
    return unverified


def adapter_exists(path: Path) -> bool:
    """Return whether there is an adapter of this name, as a file or as a PEFT folder."""
    return is_file(path) or is_file(path.with_suffix("") / "adapter_model.safetensors")


def prune_adapters(output: Path, name: str, suffixes: Collection[str], *, folders: bool) -> None:
    """Remove the files with these suffixes (-000120), or the PEFT folders."""
    for path in (output / f"{name}{suffix}" for suffix in suffixes):
        with suppress(OSError):
            if not folders:
                path.with_name(f"{path.name}.safetensors").unlink()
            elif is_file(path / "adapter_model.safetensors"):
                remove_folder(path)


def remove_leftovers(output: Path, name: str) -> None:
    """Remove the temporary files of a process that died while writing."""
    leftover = re.compile(
        rf"\.+{re.escape(name)}(-\d{{6,}}|-best)?\.((new|jsonl)\b.*|(safetensors\.)?[0-9a-f]{{16}}\.part)"
    )
    for path in output.iterdir() if output.is_dir() else ():
        if leftover.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def verify(path: Path, index: ModelIndex, expected: Adapter) -> None:
    """Raise unless the file holds all of ``expected``, every tensor resolves on the base, and all values are finite."""
    actual = load(path)
    try:
        trained, saved = (_changed_rows(resolve(each, index)) for each in (expected, actual))
    except TargetError as error:
        raise TargetError(f"{path}: the written file cannot be used: {error}") from None
    if bad := [key for key, tensor in actual.tensors.items() if scan(tensor).nonfinite]:
        half = "F16" in {tensor.dtype for tensor in actual.tensors.values()}
        hint = '; save_dtype = "bf16" or "fp32" holds larger numbers' if half else ""
        raise TargetError(f"{path}: {len(bad)} tensors contain NaN or infinity, the first is {bad[0]}{hint}")
    if missing := sorted(trained.keys() - saved.keys()):
        first = ".".join(str(part) for part in missing[0][:2])
        raise TargetError(f"{path}: {len(missing)} of {len(trained)} trained rows are missing, the first of {first}")
    for row, placement in trained.items():
        if placement is not None and (other := saved[row]) is not None and not _same_change(placement, other):
            raise TargetError(f"{path}: {row[1]} was not written as it was trained")


def _changed_rows(plan: Plan) -> dict[tuple[str, str, int], Placement | None]:
    """Map (component, tensor, row) of every changed row to None, and the first row of a module to its placement."""
    rows_of: dict[tuple[str, str, int], Placement | None] = {}
    for each in plan.placements:
        rows = each.rows()
        rows_of |= {(each.component, each.tensor, row): None for row in rows[1:]}
        rows_of[each.component, each.tensor, rows[0]] = each if each.source is None else None
    return rows_of


def _same_change(one: Placement, other: Placement) -> bool:
    """Return whether both make the same change: a dialect may order the halves of a module's rows differently."""
    if one.swap == other.swap:
        return _equal(one.factors, other.factors)
    turned = one.factors.swapped()
    return turned is not None and _equal(turned, other.factors)


def _equal(one: Factors, other: Factors) -> bool:
    """Return whether both hold the same numbers; factors that a dialect fuses have another kind or shape, and pass."""
    if type(one) is not type(other) or one.shape() != other.shape():
        return True
    ours, theirs = one.tensors(), other.tensors()
    if ours.keys() != theirs.keys() or any(ours[role].numel != theirs[role].numel for role in ours):
        return True
    same_scale = math.isclose(one.scale, other.scale, rel_tol=2**-10)  # an alpha may be stored in half precision
    return same_scale and all(bytes(ours[role].data) == bytes(theirs[role].data) for role in ours)


def _add_hashes(path: Path) -> None:
    """Add kohya's two hashes: of the data, and of a window of the file with the ss_* metadata alone."""
    container, raw = open_container(path), path.read_bytes()
    kohya = {name: value for name, value in container.metadata.items() if name.startswith("ss_")}
    as_kohya = serialize({name: decode(tensor) for name, tensor in container.tensors.items()}, kohya)
    hashes = {
        "sshs_model_hash": hashlib.sha256(raw[8 + int.from_bytes(raw[:8], "little") :]).hexdigest(),
        "sshs_legacy_hash": hashlib.sha256(as_kohya[0x100000:0x110000]).hexdigest()[:8],
    }
    write_file(path, container.tensors, {**container.metadata, **hashes})


def cast(adapter: Adapter, dtype: torch.dtype) -> Adapter:
    """Return the adapter in another precision; alphas and other scalars do not change."""
    converted: dict[int, Tensor] = {}

    def convert(tensor: Tensor) -> Tensor:
        if tensor.dtype not in ("F32", "F64", "BF16", "F16") or len(tensor.shape) == 0:
            return tensor
        if id(tensor) not in converted:
            converted[id(tensor)] = encode(decode(tensor).to(dtype))
        return converted[id(tensor)]

    def rebuilt(value: Any) -> Any:
        if isinstance(value, Tensor):
            return convert(value)
        if hasattr(value, "__dataclass_fields__"):
            return replace(value, **{f.name: rebuilt(getattr(value, f.name)) for f in fields(value) if f.init})
        return value

    entries: tuple[Entry, ...] = tuple(replace(entry, factors=rebuilt(entry.factors)) for entry in adapter.entries)
    return replace(
        adapter, entries=entries, tensors={name: convert(tensor) for name, tensor in adapter.tensors.items()}
    )
