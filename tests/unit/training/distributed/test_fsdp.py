"""What a sharded base requires of a run: several processes that call the network equally often."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from inweave.errors import ConfigError, MemoryBudgetError
from inweave.training.config.schema import TrainConfig
from inweave.training.distributed.fsdp import blocks, frozen_bytes
from inweave.training.distributed.world import World
from inweave.training.session import train
from tests.unit.training.image_sets import shared_model
from tests.unit.training.tiny import TinyNetwork, tiny


@pytest.mark.parametrize(
    ("variant", "kinds"),
    [
        ("sd1.5", {"BasicTransformerBlock", "ResnetBlock2D"}),
        ("sd3-medium", {"JointTransformerBlock"}),
        ("flux1-dev", {"FluxTransformerBlock", "FluxSingleTransformerBlock"}),
        ("z-image-turbo", {"ZImageTransformerBlock"}),
        ("qwen-image", {"QwenImageTransformerBlock"}),
    ],
)
def test_blocks_are_the_smallest_that_a_library_keeps_together(variant: str, kinds: set[str]) -> None:
    network = shared_model(variant).denoiser
    modules = blocks(network)
    assert {type(module).__name__ for module in modules} == kinds
    inside = [inner for module in modules for inner in module.modules()]
    assert len(inside) == len({id(inner) for inner in inside}), "no block lies in another"
    parameters = sum(weight.numel() for module in modules for weight in module.parameters())
    time = "t_embedder."  # of Z-Image, which is 1024 wide at any size
    assert parameters > 0.5 * sum(w.numel() for name, w in network.named_parameters() if not name.startswith(time))


def test_blocks_of_a_network_that_says_nothing() -> None:
    rows = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])) for _ in range(3)])
    assert blocks(nn.Sequential(nn.Linear(2, 2), nn.Sequential(rows))) == list(rows)
    assert blocks(TinyNetwork()) == []


def test_frozen_bytes_exclude_trainable_weights(tmp_path: Path) -> None:
    run = tiny(tmp_path)
    network = run.task.networks["model"]
    assert frozen_bytes(network) == (2 * (8 * 8 + 8) * 4,) * 2


@pytest.mark.parametrize(("count", "size"), [(0, 2), (1, 2), (3, 2), (4, 2), (5, 3), (2, 4)])
def test_turns(count: int, size: int) -> None:
    shares = [list(World(size, rank).turns(count)) for rank in range(size)]
    assert sorted(number for each in shares for number, _ in each) == list(range(count))
    together = [list(World(size, rank).turns(count, together=True)) for rank in range(size)]
    assert len({len(each) for each in together}) == 1
    assert [[turn for turn in each if turn[1]] for each in together] == shares
    assert all(0 <= number < count for each in together for number, _ in each)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"vram": "8GiB"}, "leave vram out"),
        ({"train_denoiser": False, "train_text_encoders": True}, "train_denoiser = true"),
    ],
)
def test_incompatible_settings(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TrainConfig.of(dataset="-", shard=True, **settings)


def test_one_process_has_nobody_to_share_with() -> None:
    with pytest.raises(ConfigError, match="start several"):
        train(TrainConfig.of(dataset="-", shard=True), world=World())


def test_no_memory_is_an_error_at_once(tmp_path: Path) -> None:
    """Otherwise the batch is split into micro-batches; the other processes do not know and wait for this one."""
    run = tiny(tmp_path, shard=True)
    run.task.limit = 1  # type: ignore[attr-defined]
    with pytest.raises(MemoryBudgetError, match="lower batch_size"):
        run.train()


def test_a_run_that_splits_micro_batches_is_not_resumed_sharded(tmp_path: Path) -> None:
    run = tiny(tmp_path, save_every=2)
    run.task.limit = 1  # type: ignore[attr-defined]
    run.train()
    assert run.step.split == 2
    with pytest.raises(ConfigError, match="resume it without shard"):
        tiny(tmp_path, save_every=2, shard=True, resume="auto").train()
