"""docs/benchmarks.md is generated from the committed reports and prose; charts show every row that has a peer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch")

from inweave.bench.page import chart, make_page, write_page
from inweave.bench.report import BenchReport, BenchRow
from inweave.errors import FormatError

BENCH = Path(__file__).parents[3] / "docs" / "bench"
ROWS = (
    BenchRow("a < b", "ms", 2.0, {"peer": 5.0}, 1.0),
    BenchRow("c", "ms", 3.0),
    BenchRow("d", "ms", 1.0, {"peer": 0.5, "other": 4.0}),
)
PROSE = "# Page\n\n<!-- figures -->\n\nrest\n"


def report(bench: str) -> BenchReport:
    versions = {"torch": "2.11"}
    return BenchReport(bench, f"inweave bench {bench}", "2026-11-17", {"device": "H200"}, versions, ROWS, ("a note",))


def test_the_committed_page_is_what_its_reports_make() -> None:
    files = make_page(BENCH)
    for name, text in files.items():
        assert (BENCH / name).read_text("utf-8") == text, f"docs/bench/{name} is old: make bench-docs"
    assert {path.name for path in BENCH.glob("*.svg")} == {name for name in files if name.endswith(".svg")}


def test_reports_take_their_place_in_the_prose(tmp_path: Path) -> None:
    folder = tmp_path / "bench"
    folder.mkdir()
    (folder / "page.md").write_text(PROSE)
    assert "## " not in make_page(folder)["../benchmarks.md"]
    report("swap").write(folder / "swap-sdxl.json")
    report("step").write(folder / "step-cpu.json")
    (folder / "gone.svg").write_text("<svg/>")
    write_page(folder)
    page = (tmp_path / "benchmarks.md").read_text()
    assert page.index("## A training step") < page.index("## Swapping LoRAs") < page.index("rest")
    assert "`inweave bench swap` on H200, 2026-11-17 (torch 2.11):" in page and "- a note" in page
    assert "| a < b | ms | 2 | 5 |  | 1 | 2.5 |" in page
    assert sorted(path.name for path in folder.glob("*.svg")) == ["step-cpu.svg", "swap-sdxl.svg"]
    assert "![swap-sdxl: inweave, peers and limits](bench/swap-sdxl.svg)" in page


def test_a_chart_has_a_bar_per_figure_and_a_line_per_limit() -> None:
    root = ElementTree.fromstring(chart(ROWS))
    space = "{http://www.w3.org/2000/svg}"
    bars = root.findall(f"{space}rect")
    assert len(bars) == 1 + 3 + 5, "the ground, the legend, two rows with peers"
    widths = [float(bar.attrib["width"]) for bar in bars[4:]]
    assert widths[0] / widths[1] == pytest.approx(2 / 5, rel=0.01) and widths[4] == max(widths)
    assert len(root.findall(f"{space}line")) == 2, "of the first row, and of the legend"
    texts = [element.text for element in root.findall(f"{space}text")]
    assert "a < b" in texts and "5 ms" in texts and "c" not in texts


def test_the_texts_of_a_chart_neither_overlap_nor_leave_it() -> None:
    long = "sdxl, batch 1, 1024 pixels, rank 32 on attention, checkpointing selective, CUDA graph: peak memory"
    kinds = ("eager", "compiled", "captured", "compiled+captured")
    peers = {f"diffusers + PEFT, {kind}": 9.0 - number for number, kind in enumerate(kinds)}
    root = ElementTree.fromstring(
        chart((BenchRow(long, "GiB", 12345.0, peers, 3.0), BenchRow("none", "ms", 0.0, {"p": 0.0})))
    )
    lines: dict[float, list[tuple[float, float]]] = {}
    for element in root.findall("{http://www.w3.org/2000/svg}text"):
        start, end = float(element.attrib["x"]), float(element.attrib["x"]) + 6.6 * len(element.text or "")
        lines.setdefault(float(element.attrib["y"]), []).append((start, end))
        assert end <= float(root.attrib["width"]), element.text
    for spans in lines.values():
        assert all(left[1] <= right[0] for left, right in pairwise(sorted(spans)))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ours": None}, "rows.0.ours: Input should be a valid number"),
        ({"peers": {"p": "fast"}}, "rows.0.peers.p: Input should be a valid number"),
        ({"machine": {}}, "machine: Value error, the name of the device is missing"),
        ({"rows": {}}, "rows: Input should be a valid tuple"),
        ({"notes": [3]}, "notes.0: Input should be a valid string"),
        ({"schema": 0}, "not a benchmark report of schema 1"),
    ],
)
def test_a_broken_report_is_one_line_and_changes_nothing(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = tmp_path / "docs" / "bench"
    folder.mkdir(parents=True)
    (folder / "page.md").write_text(PROSE)
    document = json.loads(report("step").write(folder / "a.json").read_text())
    target = document["rows"][0] if change.keys() <= document["rows"][0].keys() else document
    target.update(change)
    (folder / "a.json").write_text(json.dumps(document))
    (tmp_path / "tools").mkdir()
    tool = shutil.copy(BENCH.parents[1] / "tools" / "bench_page.py", tmp_path / "tools")
    done = subprocess.run([sys.executable, tool], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "docs" / "benchmarks.md").exists()


def test_a_figure_that_is_not_finite_breaks_no_page(tmp_path: Path) -> None:
    row = BenchRow("a", "ms", 1.0, {"p": 2.0}, None, {"error": float("nan")})
    made = BenchReport("step", "inweave bench step", "2026-11-17", {"device": "H200"}, {}, (row,))
    made.write(tmp_path / "a.json")
    (tmp_path / "page.md").write_text(PROSE)
    assert "| a | ms | 1 | 2 | 2 |  |" in make_page(tmp_path)["../benchmarks.md"]


def test_prose_without_a_place_for_figures_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# Page\n")
    with pytest.raises(FormatError, match="one line must be <!-- figures -->"):
        make_page(tmp_path)
