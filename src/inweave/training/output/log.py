"""What a run says while it works: a line of JSON a record, always; TensorBoard where it is asked for; a live display.

    <output>/<name>.jsonl      {"step": 10, "loss": 0.1, "lr": 1e-4, "norm": 0.5, "rate": 3.2, "eta": 90, "bad": 0, ...}
                               {"step": 10, "event": "sample", "path": "..."}
    <output>/<name>-tensorboard/    the numbers of every record: tensorboard --logdir <output>

Steps never go back: a run that goes on from step n drops what was said after n, because it will be said again; event
files cannot be cut, so there a note tells TensorBoard to drop it. A number that is not finite is null. Rates leave the
first steps out, which are slower than all others.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from inweave.errors import FormatError
from inweave.formats.files import write_atomic
from inweave.training.output.board import Board

Tell = Callable[[Mapping[str, Any]], None]
#: numbers of a record that say nothing over time
_NO_CURVE = {"step", "total", "time"}


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sample on disk, and what its viewer should know."""

    path: Path
    warnings: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        told = {"text": "; ".join(self.warnings)} if self.warnings else {}
        return {"event": "sample", "path": str(self.path), **told}


class Journal:
    """The log file of a run, and whoever else wants to know; ``since``: the step the run goes on from."""

    def __init__(self, path: Path, *, since: int = 0, tensorboard: bool = False, tell: Tell | None = None) -> None:
        self._path, self._tell = path, tell
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, [_until(path, since)])
            self._board = Board(path.with_name(f"{path.stem}-tensorboard"), since) if tensorboard else None
            self._file: TextIO = path.open("a", encoding="utf-8")
        except OSError as error:
            raise _unwritable(path, error) from None

    def write(self, record: Mapping[str, Any]) -> None:
        clean = {name: finite(value) for name, value in record.items()}
        try:
            self._file.write(json.dumps(clean, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
            if self._board is not None and "step" in record:
                said = {name: value for name, value in record.items() if name not in _NO_CURVE}
                self._board.add(record["step"], {name: v for name, v in said.items() if isinstance(v, int | float)})
        except OSError as error:
            raise _unwritable(self._path, error) from None
        if self._tell is not None:
            self._tell(clean)

    def close(self) -> None:
        """What could not be written was told when it was."""
        with suppress(OSError):
            self._file.close()
        if self._board is not None:
            with suppress(OSError):
                self._board.close()


def _unwritable(path: Path, error: OSError) -> FormatError:
    return FormatError(
        f"{path}: the log cannot be written: {error.strerror}; make room or name another `output`, and go on with --resume "
        "auto from the last checkpoint"
    )


def finite(value: Any) -> Any:
    """The value as JSON can say it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _until(path: Path, since: int) -> bytes:
    """What an earlier log says of the steps up to ``since``; a line that a crash cut short is dropped."""
    kept = []
    for line in path.read_bytes().splitlines() if since and path.is_file() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] <= since:
            kept.append(line + b"\n")
    return b"".join(kept)


class Pace:
    """Steps a second and what is left, from the steps after the first few."""

    def __init__(self, total: int, begun: int = 0, skip: int = 2) -> None:
        self._total, self._skip = total, begun + skip
        self._since: tuple[int, float] | None = None

    def at(self, step: int) -> tuple[float | None, float | None]:
        """(steps a second, seconds left) after ``step`` steps."""
        now = time.perf_counter()
        if step >= self._skip and self._since is None:
            self._since = step, now
            return None, None
        if self._since is None or step == self._since[0]:
            return None, None
        rate = (step - self._since[0]) / max(now - self._since[1], 1e-9)
        return rate, (self._total - step) / rate


def live(stream: TextIO = sys.stderr) -> Tell:
    """A display that stays on one line of the terminal."""

    def told(record: Mapping[str, Any]) -> None:
        if "loss" not in record:
            value = f"loss {record['validation']:.4f}" if record.get("validation") is not None else ""
            words = " ".join(str(record[name]) for name in ("path", "text") if record.get(name)) or value
            shown = "".join(c if c.isprintable() else " " for c in words)
            stream.write(f"\r\x1b[K{record.get('event', '')}: {shown}\n")
        else:
            left = record.get("eta")
            words_ = [
                f"{record['step']}/{record['total']}",
                f"loss {record['loss']:.4f}" if record["loss"] is not None else "loss not finite",
                f"lr {record['lr']:.2e}" if record.get("lr") is not None else "",
                f"{record['rate']:.2f} it/s" if record.get("rate") else "...",
                f"{int(left) // 60}:{int(left) % 60:02d} left" if left is not None else "",
                f"{record['memory'] / 2**30:.1f} GiB" if record.get("memory") else "",
                f"{record['bad']} skipped" if record.get("bad") else "",
            ]
            stream.write("\r\x1b[K" + "  ".join(word for word in words_ if word))
        stream.flush()

    return told
