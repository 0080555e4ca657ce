"""The report of a benchmark: rows of one quantity each, with everything needed to repeat it.

    ours      the figure of this package, in the row's unit; less is better
    peers     the same figure of other libraries, measured in the same run
    limit     the time of arithmetic or memory traffic alone, from rates measured in the same run
    ratio     the best peer over ours: 2 means half of the peer's

A file also has the command, the machine, the versions and the date. `docs/benchmarks.md` is made of such files.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, TypeAdapter, ValidationError

from inweave.errors import FormatError
from inweave.files.documents import format_json, read_json
from inweave.files.writing import write_text
from inweave.version import __version__

SCHEMA = 1
_LIBRARIES = ("torch", "triton", "diffusers", "peft", "transformers")


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One quantity; ``details`` are further figures of the same work by column title, None if not finite."""

    name: str
    unit: str
    ours: float
    peers: Mapping[str, float] = field(default_factory=dict)
    limit: float | None = None
    details: Mapping[str, float | str | None] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """The best peer over ours."""
        return min(self.peers.values()) / self.ours if self.peers and self.ours > 0 else None


def _ensure_device(machine: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(machine.get("device"), str):
        raise ValueError("the name of the device is missing")
    return machine


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All rows of one run; ``notes`` explain them, such as a peer that failed."""

    bench: str
    command: str
    date: str
    machine: Annotated[Mapping[str, Any], AfterValidator(_ensure_device)]
    versions: Mapping[str, str]
    rows: tuple[BenchRow, ...]
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the contents of the file."""
        rows = [{**asdict(row), "ratio": row.ratio} for row in self.rows]
        return {"schema": SCHEMA, **{name: getattr(self, name) for name in self.__slots__}, "rows": rows}

    def write(self, path: str | os.PathLike[str]) -> Path:
        return write_text(path, format_json(self.document(), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> BenchReport:
        document: Any = read_json(path)
        if document.get("schema") != SCHEMA:
            raise FormatError(
                f"{path}: not a benchmark report of schema {SCHEMA}; make one with `inweave bench ... --json FILE`"
            )
        try:
            return TypeAdapter(cls).validate_python(document)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise FormatError(
                f"{path}: not a valid benchmark report: {where}: {first['msg']}; measure again, or remove the file"
            ) from None


def make_report(
    bench: str, command: str, device: torch.device, rows: Iterable[BenchRow], notes: Sequence[str] = ()
) -> BenchReport:
    """Return a report of rows with the machine, the versions and today's date."""
    today = datetime.now(UTC).date().isoformat()
    return BenchReport(bench, command, today, describe_machine(device), library_versions(), tuple(rows), tuple(notes))


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the measured device and its host."""
    system = f"{platform.system()} {platform.machine()}"
    host = {"processor": _processor(), "threads": torch.get_num_threads(), "system": system}
    if device.type != "cuda":
        return {"device": host["processor"], **host}
    return {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, **host}


def library_versions() -> dict[str, str]:
    """Return the versions of this package, Python and the libraries involved."""
    versions = {"inweave": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _processor() -> str:
    """Return the processor's name, if the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(rows: Sequence[BenchRow]) -> list[list[str]]:
    """List titles, then a line per row: name, ours, every peer, the limit, the ratio, the details."""
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    details = list(dict.fromkeys(name for row in rows for name in row.details))
    limited = any(row.limit is not None for row in rows)
    extra = [*(["limit"] if limited else []), *(["peer / inweave"] if peers else [])]
    lines = [["", "unit", "inweave", *peers, *extra, *details]]
    for row in rows:
        cells = [row.name, row.unit, figure(row.ours), *(figure(row.peers.get(name)) for name in peers)]
        cells += [figure(row.limit)] if limited else []
        cells += [figure(row.ratio)] if peers else []
        lines.append([*cells, *(figure(row.details.get(name)) for name in details)])
    return lines


def figure(value: float | str | None) -> str:
    """Format a number with three significant digits, or all of those before the point."""
    if value is None or isinstance(value, str):
        return value or ""
    if value == 0 or not abs(value) < float("inf"):
        return f"{value:g}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
