"""Layers of a model that two processes share: merged and collected whole, by `fully_shard` over gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.forked import run_forked
from tests.unit.layers.test_subclasses import check_sharded, network, shard, with_factors

PROGRAM = """
from tests.e2e.ranks import run_ranks
from tests.e2e.test_sharded_layers import sharded_process
run_ranks(sharded_process)
"""


def sharded_process() -> None:
    dist.init_process_group("gloo")
    with torch.no_grad():
        model = shard(with_factors(network()))
        assert model.get_submodule("0").weight.to_local().shape == (32, 32)  # half of the rows
        check_sharded(model, with_factors(network()))
    dist.destroy_process_group()


def test_two_processes_merge_and_collect_whole_values() -> None:
    result = run_forked(PROGRAM)
    assert result.returncode == 0, result.stderr[-3000:]
