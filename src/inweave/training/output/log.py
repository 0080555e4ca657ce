"""The log of a run: one JSON record per line; TensorBoard and Weights & Biases if enabled (`trackers`).

    <output>/<name>.jsonl           {"step": 10, "loss": 0.1, "lr": 1e-4, "grad_norm": 0.5, "skipped_steps": 0, ...}
                                    {"step": 10, "event": "sample", "path": "..."}
    <output>/<name>-tensorboard/    the numbers and sample images of every record: tensorboard --logdir <output>

Steps never go back: a run resumed from step n drops the records after n, because those steps are trained again. A
number that is not finite is null. Speeds leave out the first steps, which are slower than all others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from inweave.errors import FormatError
from inweave.files.documents import format_json, parse_json
from inweave.files.paths import is_file
from inweave.files.reading import read_bytes
from inweave.files.writing import make_folder, open_append, write_atomic
from inweave.training.output import trackers
from inweave.training.output.trackers import WandbRun

OnRecord = Callable[[Mapping[str, Any]], None]
MAX_LOG = 2**30  # bytes of an earlier log


class TrainLog:
    """The log file of a run and its listeners; ``since``: the step the run resumes from."""

    def __init__(
        self,
        path: Path,
        *,
        since: int = 0,
        tensorboard: bool = False,
        wandb: WandbRun | None = None,
        on_record: OnRecord | None = None,
    ) -> None:
        self._path, self._on_record = path, on_record
        self._trackers: list[trackers.Tracker] = []

        def unwritable(reason: str) -> FormatError:
            return _unwritable(path, reason)

        make_folder(path.parent, error=unwritable)
        records = _records_until(path, since)
        write_atomic(path, [record for _, record in records], error=unwritable)
        self._file = open_append(path, error=unwritable)
        try:
            if tensorboard:
                self._trackers.append(trackers.TensorBoardTracker(path.with_name(f"{path.stem}-tensorboard"), since))
            if wandb is not None:
                earlier = [record["id"] for record, _ in records if record.get("event") == "wandb" and "id" in record]
                tracker = trackers.WandbTracker(replace(wandb, id=earlier[-1] if earlier else None), path.parent)
                self._trackers.append(tracker)
                if not earlier:
                    self.write({"event": "wandb", "step": since, "id": tracker.id, "text": f"run {tracker.id}"})
        except OSError as error:
            self.close()
            raise _unwritable(path, error.strerror) from None
        except BaseException:
            self.close()
            raise

    def write(self, record: Mapping[str, Any]) -> None:
        clean = {name: finite(value) for name, value in record.items()}
        try:
            self._file.write(format_json(clean) + "\n")
            self._file.flush()
            if self._trackers and "step" in record:
                numbers, images = trackers.curve_points(record), trackers.sample_images(record)
                for tracker in self._trackers if numbers or images else ():
                    tracker.write(record["step"], numbers, images)
        except OSError as error:
            raise _unwritable(self._path, error.strerror) from None
        if self._on_record is not None:
            self._on_record(clean)

    def close(self) -> None:
        """Close the files; `write` has already raised any error."""
        with suppress(OSError):
            self._file.close()
        for tracker in self._trackers:
            tracker.close()


def _unwritable(path: Path, reason: str | None) -> FormatError:
    return FormatError(
        f"{path}: the log cannot be written: {reason}; free some space or set another `output`, then resume "
        "from the last checkpoint with --resume"
    )


def finite(value: Any) -> Any:
    """Return the value, or None if it is a number that JSON cannot express."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _records_until(path: Path, since: int) -> list[tuple[dict[str, Any], bytes]]:
    """Return the records of an earlier log up to step ``since``, with their lines; truncated ones are dropped."""
    lines = []
    for line in read_bytes(path, MAX_LOG).splitlines() if since and is_file(path) else ():
        try:
            record = parse_json(line, "")
        except FormatError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] <= since:
            lines.append((record, line + b"\n"))
    return lines


class Throughput:
    """Steps per second and the time left, measured after the first few steps."""

    def __init__(self, total: int, start: int = 0, skip: int = 2) -> None:
        self._total, self._skip = total, start + skip
        self._since: tuple[int, float] | None = None

    def at(self, step: int) -> tuple[float | None, float | None]:
        """Return (steps per second, seconds left) after ``step`` steps."""
        now = time.perf_counter()
        if step >= self._skip and self._since is None:
            self._since = step, now
            return None, None
        if self._since is None or step == self._since[0]:
            return None, None
        rate = (step - self._since[0]) / max(now - self._since[1], 1e-9)
        return rate, (self._total - step) / rate
