"""Measure the speed of generating on a GPU against its bars, in one command: `python tools/generate_bars.py FOLDER`.

Runs `inweave bench generate` for the models of the table, with a limit of time for all of them (``--minutes``, 10 by
default), and writes a report for each and `bars.json`: the figure, the bar, whether it is met. Cases are in the order
of their worth, so that what there is no time for is the least. ``--tiny``: the embedded model, to try the command.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

#: name, options, and {a part of a row's name: (bar, "ours" or a detail of the row, whether more is better)}
CASES: list[tuple[str, list[str], dict[str, tuple[float, str, bool]]]] = [
    ("sdxl-1024", ["--model", "sdxl", "--size", "1024", "--steps", "30", "--graph", "auto", "--clients", "32"], {
        "first image": (4.5, "ours", False), ": an image": (0.95, "ours", False), "4 images": (3.0, "ours", False),
        "a LoRA each, ranks": (1.15, "times without", False), "clients": (2.5, "times faster", True),
    }),
    ("sdxl-512", ["--model", "sdxl", "--size", "512", "--steps", "30", "--graph", "auto", "--loras", "0"],
     {": an image": (0.40, "ours", False)}),
    ("flux", ["--model", "flux1-dev", "--size", "1024", "--steps", "28", "--graph", "auto", "--loras", "0"],
     {": an image": (2.9, "ours", False)}),
    ("flux-fp8", ["--model", "flux1-dev", "--size", "1024", "--steps", "28", "--quantize", "fp8", "--graph", "auto",
                  "--loras", "0"], {": an image": (2.1, "ours", False)}),
    ("sdxl-eager", ["--model", "sdxl", "--size", "1024", "--steps", "30", "--loras", "8", "--clients", "32"],
     {"clients": (2.5, "times faster", True)}),
]  # fmt: skip
TINY = [("embedded", ["--model", "inweave/emoji", "--steps", "4", "--loras", "2", "--clients", "4"],
         {"clients": (1.0, "times faster", True)})]  # fmt: skip


def main() -> int:
    """Run the cases; return 1 if a measured bar is missed, or a case failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peers", action="store_true", help="measure diffusers too, which takes most of the time")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    end, table = time.monotonic() + 60 * options.minutes, list[dict[str, Any]]()
    for name, arguments, bars in TINY if options.tiny else CASES:
        if (left := end - time.monotonic()) < 20:
            table.append({"case": name, "problem": "no time was left"})
            continue
        report = options.folder / f"{name}.json"
        command = [
            sys.executable, "-m", "inweave", "bench", "generate", *arguments, "--runs", str(options.runs),
            "--peers" if options.peers else "--no-peers", "--json", str(report),
        ]  # fmt: skip
        print(" ".join(command), flush=True)
        try:
            done = subprocess.run(command, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            table.append({"case": name, "problem": f"took longer than the {left:.0f} s that were left"})
            continue
        if done.returncode != 0 or not report.is_file():
            table.append({"case": name, "problem": f"exit code {done.returncode}"})
            continue
        table += figures(name, json.loads(report.read_text()), bars)
    (options.folder / "bars.json").write_text(json.dumps(table, indent=1) + "\n")
    for row in table:
        print(json.dumps(row))
    return int(any("problem" in row or not row["met"] for row in table))


def figures(name: str, report: dict[str, Any], bars: dict[str, tuple[float, str, bool]]) -> list[dict[str, Any]]:
    """Return a row for each bar of a case."""
    table: list[dict[str, Any]] = []
    for part, (bar, key, more) in bars.items():
        row = next((each for each in report["rows"] if part in each["name"]), None)
        if row is None:
            table.append({"case": name, "bar": part, "problem": "no such row in the report"})
            continue
        figure = row["ours"] if key == "ours" else row["details"][key]
        met = figure >= bar if more else figure <= bar
        table.append({"case": name, "row": row["name"], "what": key, "figure": figure, "bar": bar, "met": met})
    return table


if __name__ == "__main__":
    sys.exit(main())
