"""The gradients of a whole step of an SDXL-like network are PEFT's, and a step done again has the same bits.

`tests/gpu/test_whole_step.py` does the same on a GPU, recorded and compiled.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

pytest.importorskip("diffusers")
pytest.importorskip("peft")

from tests.peers.sdxl_step import assert_as_exact_as_peft, differing, our_step, trained_bits

CPU = torch.device("cpu")


def test_gradients_of_a_step_are_as_exact_as_pefts() -> None:
    assert_as_exact_as_peft(our_step(CPU, torch.float32), 64, 1)


def test_a_step_that_is_done_again_has_the_same_bits() -> None:
    one, two = (trained_bits(our_step(CPU, torch.float32, deterministic=True), 64, 2) for _ in range(2))
    assert not differing(one, two)
    assert float(one["gradients"].norm()) > 0 and one["losses"][0] != one["losses"][1]
