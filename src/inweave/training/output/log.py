"""The log of a run: one JSON record per line, and TensorBoard event files if enabled.

    <output>/<name>.jsonl      {"step": 10, "loss": 0.1, "lr": 1e-4, "grad_norm": 0.5, "steps_per_second": 3.2, "skipped_steps": 0, ...}
                               {"step": 10, "event": "sample", "path": "..."}
    <output>/<name>-tensorboard/    the numbers of every record: tensorboard --logdir <output>

Steps never go back: a run resumed from step n drops the records after n, because those steps are trained again; event
files cannot be cut, so TensorBoard is told to purge those steps. A number that is not finite is null. Speeds leave out
the first steps, which are slower than all others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, FormatError
from inweave.files.documents import format_json, parse_json
from inweave.files.paths import is_file
from inweave.files.reading import read_bytes
from inweave.files.writing import make_folder, open_append, write_atomic

OnRecord = Callable[[Mapping[str, Any]], None]
MAX_LOG = 2**30  # bytes of an earlier log
#: numbers of a record that make no useful curve
_NO_CURVE = {"step", "total", "time"}


def require_tensorboard() -> None:
    """Refuse a run that would write event files without the library that writes them."""
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "tensorboard: the tensorboard package is not installed; pip install 'inweave[tensorboard]', or set "
            "tensorboard = false"
        )


class TrainLog:
    """The log file of a run and its listeners; ``since``: the step the run resumes from."""

    def __init__(
        self, path: Path, *, since: int = 0, tensorboard: bool = False, on_record: OnRecord | None = None
    ) -> None:
        self._path, self._on_record = path, on_record

        def unwritable(reason: str) -> FormatError:
            return _unwritable(path, reason)

        make_folder(path.parent, error=unwritable)
        write_atomic(path, [_records_until(path, since)], error=unwritable)
        try:
            self._events = _event_writer(path.with_name(f"{path.stem}-tensorboard"), since) if tensorboard else None
        except OSError as error:
            raise _unwritable(path, error.strerror) from None
        self._file = open_append(path, error=unwritable)

    def write(self, record: Mapping[str, Any]) -> None:
        clean = {name: finite(value) for name, value in record.items()}
        try:
            self._file.write(format_json(clean) + "\n")
            self._file.flush()
            if self._events is not None and "step" in record:
                for name, value in record.items():
                    if name not in _NO_CURVE and isinstance(value, int | float):
                        self._events.add_scalar(name, value, record["step"])
                self._events.flush()
        except OSError as error:
            raise _unwritable(self._path, error.strerror) from None
        if self._on_record is not None:
            self._on_record(clean)

    def close(self) -> None:
        """Close the files; whatever could not be written was reported by `write`."""
        with suppress(OSError):
            self._file.close()
        if self._events is not None:
            with suppress(OSError):
                self._events.close()


def _event_writer(folder: Path, since: int) -> Any:
    """Return TensorBoard's writer; it hides what earlier files say of the steps after ``since``."""
    require_tensorboard()
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter
    return writer(str(folder), purge_step=since + 1)


def _unwritable(path: Path, reason: str | None) -> FormatError:
    return FormatError(
        f"{path}: the log cannot be written: {reason}; free some space or set another `output`, then resume "
        "from the last checkpoint with --resume"
    )


def finite(value: Any) -> Any:
    """Return the value as JSON can express it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _records_until(path: Path, since: int) -> bytes:
    """Return the records of an earlier log up to step ``since``; a line that a crash cut short is dropped."""
    lines = []
    for line in read_bytes(path, MAX_LOG).splitlines() if since and is_file(path) else ():
        try:
            record = parse_json(line, "")
        except FormatError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] <= since:
            lines.append(line + b"\n")
    return b"".join(lines)


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
