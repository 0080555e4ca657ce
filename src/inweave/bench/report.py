"""What a benchmark found: rows of one quantity each, with everything needed to repeat it.

    ours      the figure of this package, in the row's unit; less is better
    peers     the same figure of other libraries, measured in the same run
    limit     what the hardware would take if nothing but arithmetic or memory traffic counted, from rates measured in the
              same run
    ratio     the best peer over ours: 2 means half of the peer's

A file has the command, the machine, the versions and the date beside the rows. `docs/benchmarks.md` is made of such files.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from inweave.errors import FormatError
from inweave.files.documents import format_json, read_json
from inweave.files.writing import write_text
from inweave.version import __version__

SCHEMA = 1
_LIBRARIES = ("torch", "triton", "diffusers", "peft", "transformers")


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity; ``details`` are further figures of the same work, by the title of their column."""

    name: str
    unit: str
    ours: float
    peers: Mapping[str, float] = field(default_factory=dict)
    limit: float | None = None
    details: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """The best peer over ours."""
        return min(self.peers.values()) / self.ours if self.peers and self.ours > 0 else None


@dataclass(frozen=True, slots=True)
class Report:
    """All rows of one run; ``notes`` say what is behind them, such as a peer that failed."""

    bench: str
    command: str
    date: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """As a file holds it."""
        rows = [{**asdict(row), "ratio": row.ratio} for row in self.rows]
        return {"schema": SCHEMA, **{name: getattr(self, name) for name in self.__slots__}, "rows": rows}

    def write(self, path: str | os.PathLike[str]) -> Path:
        return write_text(path, format_json(self.document(), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Report:
        document: Any = read_json(path)
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise FormatError(
                f"{path}: no benchmark report of schema {SCHEMA}; make one with `inweave bench ... --json FILE`"
            )
        fields: dict[str, Any] = {name: document.get(name) for name in cls.__slots__}
        fields["rows"], fields["notes"] = document.get("rows"), document.get("notes", [])
        _ensure(path, "", fields, _REPORT_FIELDS)
        rows = []
        for number, row in enumerate(fields.pop("rows")):
            values: dict[str, Any] = {name: row.get(name) if isinstance(row, dict) else None for name in Row.__slots__}
            _ensure(path, f"row {number + 1}: ", values, _ROW_FIELDS)
            rows.append(Row(**values))
        return cls(rows=tuple(rows), notes=tuple(fields.pop("notes")), **fields)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_null(value: object) -> bool:
    """How a number that is not finite is written, such as the error of a kernel that fails."""
    return value is None


def _is_table(value: object, *tests: Callable[[object], bool]) -> bool:
    return isinstance(value, dict) and all(any(test(each) for test in tests) for each in value.values())


#: name of a field -> (what it has to be, whether a value is that)
_Fields = Mapping[str, tuple[str, Callable[[object], bool]]]
_TEXT = ("a text", _is_text)
_REPORT_FIELDS: _Fields = {
    "bench": _TEXT, "command": _TEXT, "date": _TEXT,
    "machine": ("a table with the name of the device", lambda value: isinstance(value, dict) and _is_text(value.get("device"))),
    "versions": ("a table of texts", lambda value: _is_table(value, _is_text)),
    "rows": ("a list", lambda value: isinstance(value, list)),
    "notes": ("a list of texts", lambda value: isinstance(value, list) and all(map(_is_text, value))),
}  # fmt: skip
_ROW_FIELDS: _Fields = {
    "name": _TEXT, "unit": _TEXT, "ours": ("a number", _is_number),
    "peers": ("a table of numbers", lambda value: _is_table(value, _is_number)),
    "limit": ("a number or null", lambda value: value is None or _is_number(value)),
    "details": ("a table of numbers and texts", lambda value: _is_table(value, _is_number, _is_text, _is_null)),
}  # fmt: skip


def _ensure(path: Path, where: str, values: Mapping[str, object], fields: _Fields) -> None:
    for name, (expected, fits) in fields.items():
        if not fits(values[name]):
            raise FormatError(
                f"{path}: a benchmark report whose {where}{name} is not {expected}; measure again, or remove the file"
            )


def make_report(
    bench: str, command: str, device: torch.device, rows: Iterable[Row], notes: Sequence[str] = ()
) -> Report:
    """Rows with the machine, the versions and today's date."""
    today = datetime.now(UTC).date().isoformat()
    return Report(bench, command, today, describe_machine(device), library_versions(), tuple(rows), tuple(notes))


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The device that was measured and the host that drives it."""
    host = {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type != "cuda":
        return {"device": host["processor"], **host}
    return {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, **host}


def library_versions() -> dict[str, str]:
    """Of this package, of Python and of every library that took part."""
    versions = {"inweave": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _processor() -> str:
    """The processor's name, where the system has one for it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Titles, then a line per row: what, ours, every peer, the limit, the ratio, the details."""
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    details = list(dict.fromkeys(name for row in rows for name in row.details))
    limited = any(row.limit is not None for row in rows)
    titles = [
        "",
        "unit",
        "inweave",
        *peers,
        *(["limit"] if limited else []),
        *(["peer / inweave"] if peers else []),
        *details,
    ]
    lines = [titles]
    for row in rows:
        cells = [row.name, row.unit, figure(row.ours), *(figure(row.peers.get(name)) for name in peers)]
        cells += [figure(row.limit)] if limited else []
        cells += [figure(row.ratio)] if peers else []
        lines.append([*cells, *(figure(row.details.get(name)) for name in details)])
    return lines


def figure(value: float | str | None) -> str:
    """A number with three significant digits, and with those before the point whatever their count."""
    if value is None or isinstance(value, str):
        return value or ""
    if value == 0 or not abs(value) < float("inf"):
        return f"{value:g}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
