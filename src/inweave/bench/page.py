"""docs/benchmarks.md, generated from reports and prose.

    docs/bench/*.json     reports, written by `inweave bench ... --json FILE`
    docs/bench/page.md    the prose; the line `<!-- figures -->` is replaced by all reports
    docs/bench/*.svg      a chart per report with peers

A chart has a group of bars per row, below the row's name: inweave's, every peer's, and a dashed line at the limit,
scaled to the longest bar of the group.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from inweave.bench.report import BenchReport, BenchRow, figure, table
from inweave.errors import FormatError
from inweave.files.writing import write_text

TITLES = {
    "kernels": "Kernels", "step": "A training step", "train": "The training command", "memory": "Activation memory",
    "generate": "Images",
    "swap": "Swapping LoRAs", "unmerged": "A forward pass with unmerged LoRAs", "cluster": "Many runners, simulated",
}  # fmt: skip
_HINT = "<!-- made by `make bench-docs` of docs/bench; edit docs/bench/page.md -->"
_COLORS = ("#2f6f4f", "#c9a227", "#b5651d", "#7a5c8e", "#5b7a99")
_WIDTH, _LEFT, _BAR, _GAP, _LINE = 860, 8, 14, 10, 16
_LETTER = 6.6  # pixels, of a wide sans-serif font at this size


def make_page(folder: Path) -> dict[str, str]:
    """Return the page and its charts by their paths relative to ``folder``, which holds reports and prose."""
    prose = (folder / "page.md").read_text("utf-8")
    if prose.count("<!-- figures -->\n") != 1:
        raise FormatError(f"{folder / 'page.md'}: one line must be <!-- figures -->: the reports go there")
    reports = {path.stem: BenchReport.read(path) for path in sorted(folder.glob("*.json"))}
    sections: list[str] = []
    for bench in dict.fromkeys([*TITLES, *(report.bench for report in reports.values())]):
        chosen = {name: report for name, report in reports.items() if report.bench == bench}
        if chosen:
            sections += [f"## {TITLES.get(bench, bench)}", *(_section(name, each) for name, each in chosen.items())]
    page = prose.replace("<!-- figures -->\n", "\n\n".join(sections) + "\n" if sections else "")
    page = re.sub(r"\n{3,}", "\n\n", f"{_HINT}\n{page}")
    charts = {f"{name}.svg": chart(report.rows) for name, report in reports.items() if _charted(report)}
    return {"../benchmarks.md": page, **charts}


def write_page(folder: Path) -> list[Path]:
    """Write the page and its charts, and remove charts without a report."""
    files = make_page(folder)
    for path in folder.glob("*.svg"):
        if path.name not in files:
            path.unlink()
    return [write_text(folder / name, text) for name, text in files.items()]


def _charted(report: BenchReport) -> bool:
    return any(row.peers for row in report.rows)


def _section(name: str, report: BenchReport) -> str:
    lines = table(report.rows)
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    rows.insert(1, "|" + "---|" * len(lines[0]))
    versions = ", ".join(f"{library} {version}" for library, version in report.versions.items())
    where = f"`{report.command}` on {report.machine['device']}, {report.date} ({versions}):"
    image = [f"![{name}: inweave, peers and limits](bench/{name}.svg)"] if _charted(report) else []
    notes = ["\n".join(f"- {note}" for note in report.notes)] if report.notes else []
    return "\n\n".join([where, "\n".join(rows), *notes, *image])


def chart(rows: Sequence[BenchRow]) -> str:
    """Return the bars of every row with a peer, as SVG."""
    compared = [row for row in rows if row.peers]
    names = ["inweave", *dict.fromkeys(name for row in compared for name in row.peers)]
    parts, top = _legend(names, limited=any(row.limit is not None for row in compared))
    scale = _WIDTH - _LEFT - 90
    for row in compared:
        values = {"inweave": row.ours, **row.peers}
        longest = max(*values.values(), row.limit or 0.0) or 1.0
        parts.append(_text(_LEFT, top + _BAR - 3, row.name))
        top += _LINE
        first = top
        for name in (name for name in names if name in values):
            length = values[name] / longest * scale
            parts.append(_rectangle(_LEFT, top, length, _color(names.index(name))))
            parts.append(_text(_LEFT + length + 4, top + _BAR - 4, f"{figure(values[name])} {row.unit}"))
            top += _BAR
        if row.limit is not None:
            parts.append(_limit(_LEFT + row.limit / longest * scale, first - 1, top - 2))
        top += _GAP
    size = f'width="{_WIDTH}" height="{top}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, f'<rect {size} fill="#fff"/>', *parts, "</svg>", ""])


def _legend(names: Sequence[str], *, limited: bool) -> tuple[list[str], int]:
    """Return the elements of the legend, of one or more lines, and the y coordinate of the first row."""
    parts: list[str] = []
    x, y = _LEFT, 8
    for number, name in enumerate([*names, *(["limit"] if limited else [])]):
        width = round(_LETTER * len(name)) + 35
        if x + width > _WIDTH and x > _LEFT:
            x, y = _LEFT, y + _LINE
        parts.append(_rectangle(x, y, 10, _color(number)) if number < len(names) else _limit(x + 5, y - 1, y + 11))
        parts.append(_text(x + 15, y + 9, name))
        x += width
    return parts, y + _LINE + _GAP


def _limit(x: float, top: float, bottom: float) -> str:
    line = f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"'
    return f'{line} stroke="#000" stroke-width="1.5" stroke-dasharray="3 2"/>'


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]


def _rectangle(x: float, y: float, width: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{_BAR - 3}" fill="{color}"/>'


def _text(x: float, y: float, text: str) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="#000">{escaped}</text>'
