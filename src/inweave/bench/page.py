"""docs/benchmarks.md, made of reports and of prose.

    docs/bench/*.json     reports, as `inweave bench ... --json FILE` writes them
    docs/bench/page.md    the prose; a line `<!-- figures -->` stands for all reports, and what is between the lines
                          `<!-- without NAME -->` and `<!-- end -->` is left out where there is a report of that bench from a GPU
    docs/bench/*.svg      a chart per report with peers

A chart has a group of bars per row: inweave's, every peer's, and a line at the limit, in parts of the longest bar of the group.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from inweave.bench.report import Report, Row, figure, table
from inweave.errors import FormatError
from inweave.files.writing import write_text

TITLES = {
    "kernels": "Kernels", "step": "A training step", "train": "The training command", "memory": "Activation memory",
    "swap": "Swapping LoRAs", "unmerged": "A forward pass with unmerged LoRAs",
}  # fmt: skip
_HINT = "<!-- made by `make bench-docs` of docs/bench; edit docs/bench/page.md -->"
_WITHOUT = re.compile(r"<!-- without (\w+) -->\n(.*?)<!-- end -->\n", re.DOTALL)
_COLORS = ("#2f6f4f", "#c9a227", "#b5651d", "#7a5c8e", "#5b7a99")
_WIDTH, _LABEL, _BAR, _GAP = 860, 390, 14, 10


def make_page(folder: Path) -> dict[str, str]:
    """The page and its charts by their paths relative to ``folder``, which holds reports and prose."""
    prose = (folder / "page.md").read_text("utf-8")
    if prose.count("<!-- figures -->\n") != 1:
        raise FormatError(f"{folder / 'page.md'}: one line must be <!-- figures -->: the reports go there")
    reports = {path.stem: Report.read(path) for path in sorted(folder.glob("*.json"))}
    measured = {report.bench for report in reports.values() if "cuda" in report.machine}

    def older_prose(match: re.Match[str]) -> str:
        return "" if match[1] in measured else match[2]

    sections: list[str] = []
    for bench in dict.fromkeys([*TITLES, *(report.bench for report in reports.values())]):
        chosen = {name: report for name, report in reports.items() if report.bench == bench}
        if chosen:
            sections += [f"## {TITLES.get(bench, bench)}", *(_section(name, each) for name, each in chosen.items())]
    page = _WITHOUT.sub(older_prose, prose).replace(
        "<!-- figures -->\n", "\n\n".join(sections) + "\n" if sections else ""
    )
    page = re.sub(r"\n{3,}", "\n\n", f"{_HINT}\n{page}")
    charts = {f"{name}.svg": chart(report.rows) for name, report in reports.items() if _charted(report)}
    return {"../benchmarks.md": page, **charts}


def write_page(folder: Path) -> list[Path]:
    """Write them all, and remove charts that no report has any more."""
    files = make_page(folder)
    for path in folder.glob("*.svg"):
        if path.name not in files:
            path.unlink()
    return [write_text(folder / name, text) for name, text in files.items()]


def _charted(report: Report) -> bool:
    return any(row.peers for row in report.rows)


def _section(name: str, report: Report) -> str:
    lines = table(report.rows)
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    rows.insert(1, "|" + "---|" * len(lines[0]))
    versions = ", ".join(f"{library} {version}" for library, version in report.versions.items())
    where = f"`{report.command}` on {report.machine['device']}, {report.date} ({versions}):"
    picture = [f"![{name}: inweave, peers and limits](bench/{name}.svg)"] if _charted(report) else []
    notes = ["\n".join(f"- {note}" for note in report.notes)] if report.notes else []
    return "\n\n".join([where, "\n".join(rows), *notes, *picture])


def chart(rows: Sequence[Row]) -> str:
    """Bars of every row that has a peer, as SVG."""
    compared = [row for row in rows if row.peers]
    peers = list(dict.fromkeys(name for row in compared for name in row.peers))
    names = ["inweave", *peers]
    parts: list[str] = []
    top = 30
    for number, name in enumerate(names):
        parts.append(_rectangle(_LABEL + 150 * number, 8, 10, _color(number)))
        parts.append(_text(_LABEL + 150 * number + 15, 17, name))
    scale = _WIDTH - _LABEL - 90
    for row in compared:
        values = {"inweave": row.ours, **row.peers}
        longest = max(*values.values(), row.limit or 0.0)
        bars = [name for name in names if name in values]
        parts.append(_text(8, top + _BAR - 3, row.name))
        for place, name in enumerate(bars):
            length = values[name] / longest * scale
            parts.append(_rectangle(_LABEL, top + place * _BAR, length, _color(names.index(name))))
            parts.append(_text(_LABEL + length + 4, top + (place + 1) * _BAR - 3, f"{figure(values[name])} {row.unit}"))
        bottom = top + len(bars) * _BAR
        if row.limit is not None:
            x = _LABEL + row.limit / longest * scale
            parts.append(
                f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="#000" stroke-dasharray="3 2"/>'
            )
        top = bottom + _GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" font-family="sans-serif" font-size="11">'
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{top}" fill="#fff"/>', *parts, "</svg>", ""])


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]


def _rectangle(x: float, y: float, width: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{_BAR - 3}" fill="{color}"/>'


def _text(x: float, y: float, text: str) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="#000">{escaped}</text>'
