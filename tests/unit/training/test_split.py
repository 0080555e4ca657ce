"""How a batch is split changes rounding only: by accumulation, by memory that ran out, over processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from inweave.layers.dropout import dropout, layer_number, row_mask
from inweave.models.model import file_index
from inweave.training.data.batches import Order
from inweave.training.distributed.world import World
from inweave.training.loop import Run
from inweave.training.memory.checkpointing import apply_checkpointing
from inweave.training.tasks.base import generators_for
from tests.unit.training.image_sets import fresh_model, make_set, task_on
from tests.unit.training.tiny import EVERYTHING, tiny

NAMES = ("a", "b", "c", "d")
RANDOM: dict[str, Any] = {  # everything that is random about an example
    "caption_dropout": 0.3, "shuffle_tags": True, "flip": True, "dropout": 0.3, "noise_offset": 0.1,
    "lr_scheduler": "constant", "hidden_dropout": 0.2, "rank_dropout": 0.2,
}  # fmt: skip


def run_on(folder: Path, variant: str = "sd1.5", world: World | None = None, **settings: Any) -> Run:
    model = fresh_model(variant)
    data = make_set(folder / "set", {name: f"{name}, one, two, three" for name in NAMES})
    settings = {"steps": 2, "output": str(folder / "out"), "max_grad_norm": 0, **RANDOM, **settings}
    if model.flow:
        settings.pop("noise_offset")
    task = task_on(data, model=model, **settings)
    return Run(task, model, file_index(model), task.config, world)


def gradients(run: Run, size: int = 4, split: int = 1) -> torch.Tensor:
    """Of the first update, in micro-batches of ``size`` that are split into ``split`` parts."""
    order = replace(run.task.order, batch_size=size, _epochs={})
    run.step.split = split
    batches = [run._sample_batch(batch) for batch in order.step_positions(0, accumulation=4 // size)]
    run.step._accumulate(0, batches)
    return run.flat.grads.clone()


def assert_rounding_only(one: torch.Tensor, other: torch.Tensor) -> None:
    assert float((one - other).norm() / one.norm()) < 1e-4


@pytest.mark.parametrize("variant", ["sd1.5", pytest.param("sd3-medium", marks=pytest.mark.full)])
def test_a_batch_and_its_parts_give_the_same_update(variant: str, tmp_path: Path) -> None:
    run = run_on(tmp_path, variant, train_text_encoders=True)
    whole = gradients(run)
    for size, split in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4)):
        assert_rounding_only(whole, gradients(run, size, split))
    apply_checkpointing(run.task.networks, "full")  # the same masks when activations are recomputed
    assert_rounding_only(whole, gradients(run, 1))
    run.config = run.config.model_copy(update={"seed": 1})
    assert float((whole - gradients(run)).norm() / whole.norm()) > 0.1, "the comparison can fail"


def test_accumulation_is_the_large_batch_in_a_file(tmp_path: Path) -> None:
    """Through the whole run: 2 x 1 and batch 2, with nothing else the same but the seed."""
    files = []
    for size, accumulation in ((2, 1), (1, 2)):
        settings = {
            **EVERYTHING,
            "hidden_dropout": 0.2,
            "rank_dropout": 0.2,
            "gradient_accumulation": accumulation,
            "batch_size": size,
            "max_grad_norm": 0,
        }
        run = tiny(tmp_path / str(size), **settings)
        run.task.order = replace(run.task.order, buckets=(0,) * 10, repeats=(0, 1, 1, 0, 1, 1, 0, 1, 1, 0), _epochs={})
        run.task.order = replace(run.task.order, batch_size=size)
        files.append(load_file(run.train().path / "adapter_model.safetensors"))
    for name, tensor in files[0].items():
        assert torch.allclose(tensor, files[1][name], rtol=1e-3, atol=1e-5), name


def test_two_processes_with_half_a_batch_see_what_one_with_a_whole_batch_sees(tmp_path: Path) -> None:
    one = run_on(tmp_path / "one", batch_size=4)
    inputs = one._sample_batch(one.task.order.step_positions(0)[0])
    halves = []
    for rank in (0, 1):
        run = run_on(tmp_path / str(rank), batch_size=2, world=World(2, rank))
        halves.append(run._sample_batch(run.task.order.step_positions(0, world=2, rank=rank)[0]))
    for name, value in inputs.items():
        assert torch.equal(value, torch.cat([half[name] for half in halves])), name


def test_the_randomness_of_an_example_does_not_depend_on_its_neighbors(tmp_path: Path) -> None:
    task = run_on(tmp_path).task
    positions = [(0, 2, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1)]
    together = task.sample_batch(tuple(example for _, example, _ in positions), generators_for(7, positions))
    for row, position in enumerate(positions):
        single = task.sample_batch((position[1],), generators_for(7, [position]))
        assert all(torch.equal(value[0], together[name][row]) for name, value in single.items())
    noises = together["noise"].flatten(1)
    assert len({tuple(row.tolist()[:8]) for row in noises}) == len(positions), "another epoch or repeat is another draw"


@pytest.mark.parametrize("repeats", [1, 3])
def test_images_of_one_size_come_in_one_order_whatever_the_batch_size(repeats: int) -> None:
    orders = [Order(("a",) * 12, (repeats,) * 12, size, seed=5) for size in (1, 2, 3, 4)]
    lines = [[each for batch in order.positions(3) for each in batch] for order in orders]
    assert all(line == lines[0] for line in lines) and len(set(lines[0])) == 12 * repeats


def test_buckets_are_merged_at_random() -> None:
    order = Order(("a",) * 40 + ("b",) * 4, (1,) * 44, 4, seed=0)
    places = [next(place for place, batch in enumerate(order.batches(epoch)) if batch[0] >= 40) for epoch in range(200)]
    assert len(set(places)) >= 10 and 3.5 < sum(places) / 200 < 7.5


def test_the_masks_of_dropout_belong_to_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(2**31, (6, 2), generator=generator)
    x = torch.randn(6, 50, 40, generator=generator).requires_grad_()
    layer = layer_number("layer")
    whole = dropout(x, 0.25, True, seeds, layer)
    parts = torch.cat([dropout(x[i : i + 2], 0.25, True, seeds[i : i + 2], layer) for i in (0, 2, 4)])
    assert torch.equal(whole, parts)
    chunks = dropout(x.reshape(12, 25, 40), 0.25, True, seeds, layer)  # an example's rows lie together
    assert torch.equal(chunks.reshape(6, 50, 40), whole)
    mask = row_mask(seeds, x.shape, 0.25, layer)
    assert torch.allclose(whole, torch.where(mask, x / 0.75, 0.0))
    other = row_mask(seeds, x.shape, 0.25, layer_number("another"))
    share = mask.float().mean((1, 2))
    assert (share - 0.75).abs().max() < 0.05 and abs(float(share.mean()) - 0.75) < 0.02
    assert abs(float((mask == other).float().mean()) - 0.625) < 0.02, "layers are independent"
    assert abs(float((mask[0] == mask[1]).float().mean()) - 0.625) < 0.04, "and so are rows"
    assert dropout(x, 0.25, False, seeds, layer) is x
