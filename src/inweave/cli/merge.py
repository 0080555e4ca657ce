"""`inweave merge`: a checkpoint with adapters merged into it. Also what the verbs that weave share: FILE:STRENGTH, bars."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inweave.cli.output import OK, PROBLEMS, fail, print_facts, print_json, printable, reporting_errors

if TYPE_CHECKING:
    from inweave.targets.index import ModelIndex
    from inweave.weights.offline.bake import Layer
    from inweave.weights.stack import Strength


class Dtype(StrEnum):
    keep = "keep"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def merge(
    base: Annotated[
        Path, typer.Option("--base", "-b", help="A checkpoint file, an index of shards, or a model folder.")
    ],
    lora: Annotated[
        list[str],
        typer.Option(
            "--lora", "-l", metavar="FILE[:STRENGTH]", help="An adapter; again for more. a:0.8, or a:unet=0.8,te=0.2"
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="A .safetensors file; a new folder for shards and folders.")],
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of the result; keep: every tensor its own.")] = Dtype.keep,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> None:
    """Merge adapters into a checkpoint on disk: same names, same layout, one tensor in memory at a time."""
    need_torch(as_json)
    from inweave.errors import ConfigError, TargetError
    from inweave.weights.offline.bake import bake, record
    from inweave.weights.offline.resize import DTYPES

    with reporting_errors(as_json):
        try:
            index = open_weights(base)
            layers: list[Layer] = []
            warnings: list[str] = []
            for text in lora:
                path, strength = weighted(text)
                if path.resolve() == out.resolve():
                    raise ConfigError(f"{out}: that is one of the adapters; write the result elsewhere")
                layers.append(_layer(path, strength, index, warnings))
            with progress_bar("merging", as_json) as progress:
                done = bake(base, layers, out, index=index, folders=folders_of(base), dtype=DTYPES.get(dtype.value),
                            progress=progress)  # fmt: skip
        except TargetError as error:
            fail(str(error), as_json, PROBLEMS)  # everything was read, but it does not fit
    records = [record(layer.name, layer.sha256, layer.strength) for layer in layers]
    if as_json:
        print_json({
            "ok": True, "path": done.path, "base": index.base, "tensors": done.tensors, "merged": done.merged,
            "bytes": done.bytes, "created": done.created, "left_out": done.left_out, "loras": records,
            "warnings": warnings,
        })  # fmt: skip
    else:
        rows = [("base", index.base or index.source)]
        rows += [
            ("adapter", f"{layer.name} at {record['strength']}") for layer, record in zip(layers, records, strict=True)
        ]
        rows += [("merged", f"{done.merged} of {done.tensors} tensors, {done.bytes:,} bytes")]
        print_facts(done.path, rows)
        for name in done.left_out:
            typer.secho(printable(f"  left out: {name}: weights that were not merged"), fg="yellow")
        for warning in warnings[:10]:
            typer.secho(printable(f"  warning: {warning}"), fg="yellow")
    raise typer.Exit(OK)


def _layer(path: Path, strength: Strength, index: ModelIndex, warnings: list[str]) -> Layer:
    """An adapter resolved on the base without rest, or the reason it cannot be, as `inweave check` gives it."""
    from inweave.errors import TargetError
    from inweave.exchange.check import check
    from inweave.exchange.load import load
    from inweave.targets.resolve import resolve
    from inweave.weights.offline.bake import Layer

    adapter = load(path)
    verdict = check(adapter, index)
    if verdict.error and 2 * verdict.report.placed < verdict.report.tensors:  # else the list says more
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


def need_torch(as_json: bool) -> None:
    """Reading needs no torch, weaving does."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        fail("this verb computes, and for that it needs torch: pip install 'inweave[torch]'", as_json)


def sha256_of(path: Path) -> str:
    """Of an adapter's file; of its shards one after the other."""
    import hashlib

    from inweave.formats.files import open_container

    digest = hashlib.sha256()
    for part in open_container(path).files:
        with part.open("rb") as file:
            while chunk := file.read(4 * 1024 * 1024):
                digest.update(chunk)
    return digest.hexdigest()


def weighted(text: str) -> tuple[Path, Strength]:
    """FILE, FILE:0.8 or FILE:unet=0.8,te=0.2.

    Only the last colon can divide, and only where a strength follows it: paths may hold colons, a drive's too.
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
        parts = {name.strip(): float(value) for name, value in pairs}
    except ValueError:
        if head.endswith(".safetensors") or Path(head).exists():
            raise ConfigError(f"{text}: {tail!r} is no strength; a number is, and so is unet=0.8,te=0.2") from None
        return Path(text), Strength()
    if len(parts) < len(pairs):
        raise ConfigError(f"{text}: a component is named twice")
    return Path(head), Strength.of(parts)


def open_weights(path: Path) -> ModelIndex:
    """The index of a model whose weights are at hand."""
    from inweave.errors import ConfigError
    from inweave.exchange.load import open_base

    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder; here the weights are needed, a base's name is not enough")
    return open_base(path)


def folders_of(path: Path) -> dict[str, str]:
    """The sub-folders of a diffusers model that hold weights, and which component each one is."""
    from inweave.exchange.load import FOLDERS

    found: dict[str, str] = {}
    for name, component in FOLDERS.items():
        if component not in found.values() and any((path / name).glob("*.safetensors*")):
            found[name] = component
    return found


@contextmanager
def progress_bar(text: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on the terminal; where nobody looks at one, nothing."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
