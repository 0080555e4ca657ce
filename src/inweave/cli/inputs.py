"""What bake, extract and resize read: checkpoints on disk, and adapters as FILE[:STRENGTH]."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inweave.cli.options import Dialect

if TYPE_CHECKING:
    from inweave.adapter import Adapter
    from inweave.targets.index import ModelIndex
    from inweave.weights.offline.bake import Layer
    from inweave.weights.stack import Strength


def parse_lora(text: str) -> tuple[Path, Strength]:
    """FILE, FILE:0.8 or FILE:unet=0.8,te=0.2.

    Only the last colon can separate, and only if a strength follows it: paths may contain colons, drive letters too.
    """
    from inweave.errors import ConfigError
    from inweave.weights.stack import Strength

    head, colon, tail = text.rpartition(":")
    if not colon or Path(text).exists():
        return Path(text), Strength()
    try:
        if "=" not in tail:
            return Path(head), Strength.of(float(tail))
        pairs = [part.split("=") for part in tail.split(",")]
        components = {name.strip(): float(value) for name, value in pairs}
    except ValueError:
        if head.endswith(".safetensors") or Path(head).exists():
            raise ConfigError(f"{text}: {tail!r} is not a strength; write a number, or unet=0.8,te=0.2") from None
        return Path(text), Strength()
    if len(components) < len(pairs):
        raise ConfigError(f"{text}: a component is named twice")
    return Path(head), Strength.of(components)


def open_checkpoint_index(path: Path) -> ModelIndex:
    """The index of a checkpoint on disk: a file, an index of shards or a model folder."""
    from inweave.errors import ConfigError
    from inweave.exchange.load import open_base

    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder; this command needs the weights, not only a base's name")
    return open_base(path)


def component_folders(path: Path) -> dict[str, str]:
    """folder -> component, for the folders of a diffusers model that hold weights."""
    from inweave.exchange.load import FOLDERS

    folders: dict[str, str] = {}
    for name, component in FOLDERS.items():
        if component not in folders.values() and any((path / name).glob("*.safetensors*")):
            folders[name] = component
    return folders


def resolve_layer(path: Path, strength: Strength, index: ModelIndex, warnings: list[str]) -> Layer:
    """An adapter resolved completely on the base, or the reason it cannot be, as `inweave check` reports it."""
    from inweave.errors import TargetError
    from inweave.exchange.check import check
    from inweave.exchange.load import load
    from inweave.targets.resolve import resolve
    from inweave.weights.offline.bake import Layer

    adapter = load(path)
    verdict = check(adapter, index)
    if verdict.error and 2 * verdict.report.placed < verdict.report.tensors:  # else the list of tensors says more
        raise TargetError(f"{path}: {verdict.error}")
    try:
        plan = resolve(adapter, index)
    except TargetError as error:
        raise TargetError(f"{path}: {error}") from None
    if verdict.nonfinite:
        row, more = verdict.nonfinite[0], len(verdict.nonfinite) - 1
        also = f" (and {more} more tensors)" if more else ""
        raise TargetError(f"{path}: {row['key']}: {row['count']} of {row['of']} numbers are NaN or infinite{also}")
    warnings += [f"{path.name}: {warning}" for warning in verdict.report.warnings]
    return Layer(plan, strength, path.name, sha256_of(path))


def common_base(paths: Sequence[Path], adapters: Sequence[Adapter], base: str | None) -> ModelIndex:
    """The base model that all adapters were trained for."""
    from inweave.errors import TargetError
    from inweave.exchange.load import open_base
    from inweave.targets.bases import known_index
    from inweave.targets.detect import detect

    if base is not None:
        return open_base(base)
    detections = [detect(adapter) for adapter in adapters]
    for path, detection in zip(paths, detections, strict=True):
        if detection.base is None or detection.confidence < 0.5:
            guess = f" (best guess: {detection.base}, confidence {detection.confidence:.2f})" if detection.base else ""
            raise TargetError(f"{path}: the base model of this adapter is not clear{guess}; name it with --base")
    names = dict.fromkeys(detection.base for detection in detections if detection.base)
    common = next((name for name in names if all(detection.fits_as_well(name) for detection in detections)), None)
    if common is None:
        rows = zip(paths, detections, strict=True)
        bases = ", ".join(f"{path.name} is for {detection.base}" for path, detection in rows)
        raise TargetError(f"adapters of different base models cannot be combined: {bases}")
    return known_index(common)


def check_adapter_out(out: Path, dialect: Dialect, generic: bool) -> None:
    """Refuse before the work what `save` would refuse after it; ``generic``: not a diffusion model."""
    from inweave.errors import ConfigError
    from inweave.exchange.convert import GENERIC

    if (dialect is Dialect.peft) == (out.suffix == ".safetensors"):
        form = (
            "a directory; use a name without .safetensors" if dialect is Dialect.peft else "one file, NAME.safetensors"
        )
        raise ConfigError(f"{out}: {dialect.value} is written as {form}")
    if generic and dialect.value not in GENERIC:
        raise ConfigError(f"{dialect.value} is for diffusion models only; write this adapter as {' or '.join(GENERIC)}")


def sha256_of(path: Path) -> str:
    """The SHA-256 of an adapter's file, or of its shards one after the other."""
    import hashlib

    from inweave.formats.files import open_container

    digest = hashlib.sha256()
    for part in open_container(path).files:
        with part.open("rb") as file:
            while chunk := file.read(4 * 1024 * 1024):
                digest.update(chunk)
    return digest.hexdigest()
