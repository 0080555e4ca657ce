"""kill -9 at any moment, and the resumed run still ends with the same bits; `make soak` does it for longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import sized

SOAK = Path(__file__).parents[1] / "soak.py"
ROUNDS = sized(3, 10)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_run_killed_again_and_again_ends_like_one_that_was_not() -> None:
    result = subprocess.run(
        [sys.executable, str(SOAK), "--rounds", str(ROUNDS), "--seed", "1"],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith(f"{ROUNDS} rounds, ")
