"""kill -9 at any moment, and the resumed run still ends with the same bits; `make soak` does it for longer."""

from __future__ import annotations

import os

import pytest

from tests.forked import run_forked
from tests.support import sized

ROUNDS = sized(3, 10)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_run_killed_again_and_again_ends_like_one_that_was_not() -> None:
    result = run_forked("from tests.soak import main; main()", "--rounds", str(ROUNDS), "--seed", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith(f"{ROUNDS} rounds, ")
