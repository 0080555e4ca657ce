"""What a runner gets and gives: a request in, events out. Whatever hosts a runner speaks these words alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from inweave.serve.jobs.job import Event

Emit = Callable[[Event], object]
Cancelled = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """Where and with how much memory a runner works."""

    device: str | None = None
    dtype: str | None = None
    memory_bytes: int | None = None
    parts: dict[str, dict[str, str]] = field(default_factory=dict)  # model -> components from other files


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A job as a runner gets it: everything was looked up, so ``loras`` maps each reference to its file.

    ``model`` is what `inweave.pipeline` opens. ``inputs``: pictures as PNG by name (init, mask).
    """

    kind: str
    model: str
    config: dict[str, Any]
    loras: dict[str, str] = field(default_factory=dict)
    preview_every: int = 0
    on_mismatch: Literal["error", "warn"] = "error"  # warn: of a LoRA that fits in part, use that part
    inputs: dict[str, bytes] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)  # of a train job: dataset and output
    preview_first: bool = False  # previews from the first step on, and of the last one
    name: str = ""  # what clients call the model
