"""Layers of a model that two processes share: merged and collected whole, by `fully_shard` over gloo."""

from __future__ import annotations

import datetime
from pathlib import Path

import torch
import torch.distributed as dist

from tests.unit.layers.test_subclasses import check_sharded, network, shard, with_factors


def sharded_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    with torch.no_grad():
        model = shard(with_factors(network()))
        assert model.get_submodule("0").weight.to_local().shape == (32, 32)  # half of the rows
        check_sharded(model, with_factors(network()))
    dist.destroy_process_group()


def test_two_processes_merge_and_collect_whole_values(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(sharded_process, (str(tmp_path),), nprocs=2)  # type: ignore[attr-defined]
