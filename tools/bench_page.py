"""Renews docs/benchmarks.md and its charts from docs/bench: `python tools/bench_page.py`, or `make bench-docs`."""

from __future__ import annotations

from pathlib import Path

from inweave.bench.page import write_page

if __name__ == "__main__":
    for path in write_page(Path(__file__).parents[1] / "docs" / "bench"):
        print(path)
