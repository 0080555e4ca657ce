"""kill -9 at any moment, and the run still ends with the same bits; `make soak` does it for longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[1] / "soak.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_run_that_is_killed_again_and_again_ends_as_the_straight_one() -> None:
    done = subprocess.run(
        [sys.executable, str(SOAK), "--rounds", "6", "--seed", "1"],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("6 rounds, ")
