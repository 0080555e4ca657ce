"""`bench/figures.py`: every figure in a process of its own, and one that fails does not stop the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("peft")

BENCH = Path(__file__).parents[3] / "bench"
#: the script with other figures, which need no GPU
SCRIPT = """
import sys
import figures
kernels = "kernels lora --tiny --device cpu"
figures.FIGURES = {
    "late": figures.Figure(kernels, 0.001),
    "wrong": figures.Figure("kernels nothing --device cpu", 60),
    "kernels": figures.Figure(kernels, 120),
}
sys.exit(figures.main())
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCH), *sys.path[1:]]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_figures_that_fail_leave_no_file_and_the_others_are_measured(tmp_path: Path) -> None:
    (tmp_path / "late.json").write_text("of another day")
    result = run(str(tmp_path))
    assert result.returncode == 1, result.stderr
    assert "late: no figure: it exceeded its time limit of 0.001 s" in result.stdout
    assert "wrong: no figure: exit code" in result.stdout and "Traceback" not in result.stderr
    assert "kernels: measured" in result.stdout
    (report,) = tmp_path.iterdir()
    assert json.loads(report.read_text())["command"] == "inweave bench kernels lora --tiny --device cpu"


def test_a_name_of_no_figure_is_refused(tmp_path: Path) -> None:
    result = run(str(tmp_path), "step")
    assert result.returncode == 2 and "no figure is called step; these are: late, wrong, kernels" in result.stderr
