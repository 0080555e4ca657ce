"""A whole step of an SDXL-like network: fused blocks, measured attention, compiled blocks, one CUDA graph.

Its gradients are as exact as PEFT's, and with `deterministic` the state after updates has the same bits twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("peft")
pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from tests.peers.sdxl_step import assert_as_exact_as_peft, differing, our_step, trained_bits  # noqa: E402

CUDA = torch.device("cuda")
SIZE = 256  # pixels: 256 and 64 tokens


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # what is compiled may forbid to set them for good
        yield
    torch.backends.cuda.matmul.allow_tf32 = before


def assert_recorded(step: Any, compiled: bool) -> None:
    assert step.graphs.problem is None and len(step.graphs) == 2, step.graphs.problem
    assert step.blocks.problem is None and step.blocks.active == compiled, step.blocks.problem


@pytest.mark.parametrize("compiled", [False, True], ids=["recorded", "recorded and compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_a_step_are_as_exact_as_pefts(dtype: torch.dtype, compiled: bool) -> None:
    step = our_step(CUDA, dtype, graph="on", compile="on" if compiled else "off")
    assert_as_exact_as_peft(step, SIZE, 3)
    assert_recorded(step, compiled)
    assert bool(step.attention) == (dtype != torch.float32), step.attention


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.bfloat16, {}),
        (torch.bfloat16, {"compile": "on"}),
        (torch.float16, {"gradient_checkpointing": "full"}),
        (torch.float32, {"gradient_checkpointing": "selective"}),
    ],
    ids=lambda value: str(value) if isinstance(value, torch.dtype) else "-".join(value.values()),
)
def test_updates_done_again_have_the_same_bits(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    results = []
    for _ in range(2):
        step = our_step(CUDA, dtype, graph="on", deterministic=True, **settings)
        results.append(trained_bits(step, SIZE, 5))
        assert_recorded(step, "compile" in settings)
        assert int(step.skipped) < 5 and all("deterministic" in key for key in step.attention)
        assert len(step.attention) >= 4, "self and cross attention at two sizes"
    assert not differing(*results)
    assert results[0]["losses"].isfinite().all() and results[0]["gradients"].any()
