"""The result of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

DONE, STOPPED = "all steps are done", "stopped on request"


@dataclass(slots=True)
class TrainResult:
    """The result of `inweave.train`.

    Args:
        path: The adapter: a file, or a folder in the "peft" dialect.
        step: The number of steps done, including those of the runs it resumed.
        losses: The loss of every step since the run started or resumed.
        reason: Why the run ended: "all steps are done", "stopped on request", or no better validation loss.
        seconds: How long the run took, without its preparation.
        skipped_steps: Steps whose loss or gradients were not finite.
        validation: (step, validation loss) of every validation.
    """

    path: Path
    step: int
    losses: list[float] = field(default_factory=list)
    reason: str = DONE
    seconds: float = 0.0
    skipped_steps: int = 0
    validation: list[tuple[int, float]] = field(default_factory=list)
