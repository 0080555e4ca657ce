"""Renew docs/benchmarks.md and its charts from docs/bench: `python tools/bench_page.py`, or `make bench-docs`."""

from __future__ import annotations

import sys
from pathlib import Path

from inweave.bench.page import write_page
from inweave.errors import InweaveError

if __name__ == "__main__":
    try:
        for path in write_page(Path(__file__).resolve().parents[1] / "docs" / "bench"):
            print(path.resolve())
    except InweaveError as error:
        sys.exit(f"error: {error}")
