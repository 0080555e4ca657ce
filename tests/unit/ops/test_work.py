"""The operations of a piece of work are those that torch's own counter finds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from inweave.models.blank import blank
from inweave.models.open import open_model
from inweave.ops.tensors.peak import MetaAttention
from inweave.ops.tensors.work import WorkCounter
from inweave.training.config.schema import TrainConfig
from inweave.training.memory.meta import _step
from tests.peers import tiny_models as tiny


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize(
    "work",
    [
        lambda: _empty(3, 5) @ _empty(5, 7),
        lambda: torch.addmm(_empty(7), _empty(3, 5), _empty(5, 7)),
        lambda: _empty(2, 3, 5) @ _empty(2, 5, 7),
        lambda: torch.baddbmm(_empty(2, 3, 7), _empty(2, 3, 5), _empty(2, 5, 7)),
        lambda: functional.linear(_empty(2, 4, 5), _empty(7, 5), _empty(7)),
        lambda: functional.conv2d(_empty(2, 6, 9, 11), _empty(8, 3, 3, 2), groups=2, stride=2, padding=1),
        lambda: functional.conv1d(_empty(2, 6, 9), _empty(8, 6, 3), _empty(8), dilation=2),
        lambda: functional.conv3d(_empty(1, 2, 4, 5, 6), _empty(3, 2, 2, 3, 1)),
        lambda: functional.conv_transpose2d(_empty(2, 6, 5, 7), _empty(6, 4, 3, 3), stride=2),
        lambda: functional.scaled_dot_product_attention(_empty(2, 3, 5, 8), _empty(2, 3, 9, 8), _empty(2, 3, 9, 8)),
    ],
)
def test_every_operation_counts_as_in_torch(work: Callable[[], object]) -> None:
    with FlopCounterMode(display=False) as expected, WorkCounter() as counter, MetaAttention():
        work()
    assert counter.operations == expected.get_total_flops() > 0


@pytest.mark.parametrize("variant", [name for name in tiny.VARIANTS if not name.endswith("inpaint")])
def test_a_step_of_every_family_counts_as_in_torch(variant: str) -> None:
    model = blank(open_model(tiny.folder(variant)), torch.float32)
    config = TrainConfig(dataset="none", resolution=4 * model.patch, precision="fp32")
    with FlopCounterMode(display=False) as expected, WorkCounter() as counter, MetaAttention(), torch.no_grad():
        _step(model, config, (4 * model.patch, 1), None, backward=False)
    assert counter.operations == expected.get_total_flops() > 0


def test_operations_that_make_tensors_and_the_scores_of_attention_are_counted() -> None:
    with WorkCounter() as counter, MetaAttention():
        x = _empty(2, 3, 5, 8)
        y = functional.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2)
        _ = (y + 1).view(-1)
    assert counter.launches == 4  # the first tensor, attention, the copy of its transposed result, the sum
    assert counter.scores == {2 * 3 * 5 * 5}


def test_the_estimate_of_memory_loads_no_compiler() -> None:
    code = "import sys, inweave.training.memory.estimate; print('torch.utils.flop_counter' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert loaded.stdout.strip() == "False"
