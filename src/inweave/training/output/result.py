"""The end of a run: why it ended, and what it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

DONE, STOPPED = "all steps are done", "stopped on request"


@dataclass(slots=True)
class TrainResult:
    """The end of a run. ``path``: the adapter; ``reason``: why it ended; ``losses``: of the steps since it started or resumed."""

    path: Path
    step: int
    losses: list[float] = field(default_factory=list)
    reason: str = DONE
    seconds: float = 0.0
    skipped_steps: int = 0
    validation: list[tuple[int, float]] = field(default_factory=list)
