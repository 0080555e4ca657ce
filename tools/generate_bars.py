"""Measure the speed of generating on a GPU against its bars, in one command: `python tools/generate_bars.py FOLDER`.

Runs `inweave bench generate` for the models of the table, with a limit of time for all of them (``--minutes``, 9 by
default), and writes a report for each and, after each, `bars.json`: the figure, the bar, whether it is met. A table is
printed last. Cases are in the order of their worth, so that what there is no time for is the least; one that takes more
than what is left is interrupted, so that it removes its files. ``--tiny``: the embedded model, to try the command.
"""

from __future__ import annotations

import argparse
import json
import signal
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
#: the same parts of names, at bars that say nothing
TINY = [
    ("embedded", ["--model", "inweave/emoji", "--size", "64", "--steps", "2", "--loras", "2", "--clients", "4",
                  "--graph", "auto"], {
        "first image": (60.0, "ours", False), ": an image": (60.0, "ours", False), "4 images": (60.0, "ours", False),
        "a LoRA each, ranks": (60.0, "times without", False), "clients": (0.01, "times faster", True),
    }),
    ("embedded-int8", ["--model", "inweave/emoji", "--size", "64", "--steps", "1", "--quantize", "int8", "--loras",
                       "0"], {": an image": (60.0, "ours", False)}),
]  # fmt: skip
ENDING = 20.0  # seconds for an interrupted case to remove its files


def main() -> int:
    """Run the cases; return 1 if a measured bar is missed, or a case failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peers", action="store_true", help="measure diffusers too, which takes most of the time")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    end, table = time.monotonic() + 60 * options.minutes, list[dict[str, Any]]()
    for name, arguments, bars in TINY if options.tiny else CASES:
        table += measure(name, arguments, bars, end - time.monotonic(), options)
        (options.folder / "bars.json").write_text(json.dumps(table, indent=1) + "\n")
    for row in table:
        verdict = row.get("problem") or f"{row['figure']:.3g}, bar {row['bar']:g}: {'met' if row['met'] else 'missed'}"
        print(f"{row.get('row') or row['case']} ({row.get('what', '')}): {verdict}")
    return int(any("problem" in row or not row["met"] for row in table))


def measure(
    name: str, arguments: list[str], bars: dict[str, tuple[float, str, bool]], left: float, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Run one case within the seconds that are left; return its rows, or why there are none."""
    if left < 2 * ENDING:
        return [{"case": name, "problem": "no time was left"}]
    report = options.folder / f"{name}.json"
    report.unlink(missing_ok=True)  # that of an earlier run
    command = [
        sys.executable, "-m", "inweave", "bench", "generate", *arguments, "--runs", str(options.runs),
        "--peers" if options.peers else "--no-peers", "--json", str(report),
    ]  # fmt: skip
    print(" ".join(command), flush=True)
    process = subprocess.Popen(command)
    try:
        code = process.wait(left - ENDING)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return [{"case": name, "problem": f"took longer than the {left:.0f} s that were left"}]
    if code != 0 or not report.is_file():
        return [{"case": name, "problem": f"exit code {code}"}]
    return figures(name, json.loads(report.read_text()), bars)


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
