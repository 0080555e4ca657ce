"""Tensors that are views of mapped files: on the CPU, weights that have the dtype of their file."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from inweave.errors import FormatError
from inweave.files.stamps import stamp_of
from inweave.weights.source import WeightSource, stamps_of


def viewed_in(source: WeightSource) -> Collection[Path]:
    """Return the files of which tensors of a source are views; more of them as more tensors are read."""
    return getattr(source, "viewed", ())


def refuse_rewritten(source: WeightSource) -> None:
    """Raise FormatError if tensors are views of a file that was written to or cut since it was opened.

    They would hold other numbers, or end the process where the file has none. One that was deleted, or replaced by
    another under its name, still exists for those who have mapped it.
    """
    for file in viewed_in(source):
        try:
            now = stamp_of(file.stat())
        except OSError:
            continue
        was = stamps_of(source)[file]
        if now[:2] == was[:2] and now[2:4] != was[2:4]:
            raise FormatError(
                f"{file}: was written to while its weights are used ({was[2]:,} bytes before, {now[2]:,} now); load "
                "the model again, and replace such files by renaming new ones"
            )
