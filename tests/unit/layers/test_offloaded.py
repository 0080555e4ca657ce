"""Layers under offloading: accelerate's hooks, diffusers' groups; the same outputs as without, and PEFT's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_submodules
from diffusers.hooks import apply_group_offloading
from peft import PeftModel
from torch import nn

import inweave
from inweave.errors import MergeStateError, TargetError
from inweave.layers import collect, lora_layers, merge, unmerge

TARGETS = ["table", "first", "conv", "last"]
ALGORITHMS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "lora": (TARGETS, {}),
    "lora without a table": (TARGETS[1:], {}),  # PEFT cannot offload adapters of embeddings, nor DoRA
    "dora": (["first", "conv", "last"], {"dora": True}),
    "loha": (["first", "conv", "last"], {"network": "loha"}),
    "lokr": (["first", "conv", "last"], {"network": "lokr"}),
}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 8)
        self.first = nn.Linear(8, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.last = nn.Linear(16, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.first(self.table(rows)).relu()
        out: torch.Tensor = self.last(self.conv(hidden.transpose(-1, -2)).transpose(-1, -2))
        return out


ROWS = torch.arange(14).reshape(2, 7) % 7


def to_memory(model: nn.Module, folder: Path) -> None:
    accelerate.cpu_offload(model, torch.device("cpu"))


def to_disk(model: nn.Module, folder: Path) -> None:
    accelerate.disk_offload(model, str(folder), torch.device("cpu"))


def dispatch_to_disk(model: nn.Module, folder: Path) -> None:
    places: dict[str, Any] = {"table": "cpu", "first": "disk", "conv": "disk", "last": "cpu"}
    accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


def offload_groups(kind: str) -> Callable[[nn.Module, Path], None]:
    def offload(model: nn.Module, folder: Path) -> None:
        cpu = torch.device("cpu")
        blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        apply_group_offloading(model, cpu, cpu, kind, offload_to_disk_path=str(folder), **blocks)  # type: ignore[arg-type]

    return offload


OFFLOADS: dict[str, Callable[[nn.Module, Path], None]] = {
    "memory": to_memory,
    "disk": to_disk,
    "dispatched": dispatch_to_disk,
    "groups of leaves on disk": offload_groups("leaf_level"),
    "groups of blocks on disk": offload_groups("block_level"),
}


def trained_model(algorithm: str = "lora") -> Small:
    targets, options = ALGORITHMS[algorithm]
    model = inweave.inject(Small().eval(), 4, alpha=8, targets=targets, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in lora_layers(model).values():
            for parameter in layer.adapters.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("how", OFFLOADS)
@torch.no_grad()
def test_an_offloaded_model_computes_the_same(algorithm: str, how: str, tmp_path: Path) -> None:
    model = trained_model(algorithm)
    expected = model(ROWS)
    OFFLOADS[how](model, tmp_path)
    assert torch.equal(model(ROWS), expected)
    assert torch.equal(model(ROWS), expected)  # the parameters were put away and loaded again


@pytest.mark.parametrize("how", ["memory", "disk"])
@torch.no_grad()
def test_peft_computes_the_same_when_offloaded(how: str, tmp_path: Path) -> None:
    ours = trained_model("lora without a table")
    inweave.save(collect(ours), tmp_path / "peft", dialect="peft")
    theirs: Any = PeftModel.from_pretrained(Small().eval(), str(tmp_path / "peft"))
    OFFLOADS[how](ours, tmp_path / "ours")
    OFFLOADS[how](theirs, tmp_path / "theirs")
    torch.testing.assert_close(ours(ROWS), theirs(ROWS), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("how", ["memory", "disk", "dispatched"])
@torch.no_grad()
def test_collect_reads_what_the_hooks_keep(how: str, tmp_path: Path) -> None:
    model = trained_model("dora")
    before = {key: bytes(tensor.data) for key, tensor in collect(model).tensors.items()}
    OFFLOADS[how](model, tmp_path)
    assert {key: bytes(tensor.data) for key, tensor in collect(model).tensors.items()} == before


def test_collect_refuses_groups_on_disk(tmp_path: Path) -> None:
    model = trained_model()
    OFFLOADS["groups of leaves on disk"](model, tmp_path)
    with pytest.raises(TargetError, match="table: offloaded to disk by diffusers"):
        collect(model)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@torch.no_grad()
def test_merge_writes_the_offloaded_weight_and_unmerge_restores_it(algorithm: str, tmp_path: Path) -> None:
    merged_first, offloaded_first = trained_model(algorithm), trained_model(algorithm)
    unmerged = offloaded_first(ROWS)
    merge(merged_first)
    to_memory(offloaded_first, tmp_path)
    merge(offloaded_first)
    assert torch.equal(offloaded_first(ROWS), merged_first(ROWS))
    assert not torch.equal(offloaded_first(ROWS), unmerged)  # merging rounds elsewhere than the layers do
    unmerge(offloaded_first)
    assert torch.equal(offloaded_first(ROWS), unmerged)


@torch.no_grad()
def test_unmerge_follows_a_model_offloaded_while_merged(tmp_path: Path) -> None:
    model = trained_model()
    expected = model(ROWS)
    merge(model)
    to_memory(model, tmp_path)
    unmerge(model)
    assert torch.equal(model(ROWS), expected)


@pytest.mark.parametrize("how", [name for name in OFFLOADS if name != "memory"])
@torch.no_grad()
def test_merge_refuses_weights_on_disk_and_changes_nothing(how: str, tmp_path: Path) -> None:
    model = trained_model()
    expected = model(ROWS)
    OFFLOADS[how](model, tmp_path)
    with pytest.raises(TargetError, match=r"(table|first): .*offloaded to disk"):
        merge(model)
    assert torch.equal(model(ROWS), expected)


def test_merge_refuses_a_model_without_numbers() -> None:
    with torch.device("meta"):
        model = Small()
    inweave.inject(model, 4, targets=["first"])
    with pytest.raises(TargetError, match="first: its weight is on the meta device"):
        merge(model)


@torch.no_grad()
def test_adapters_are_added_to_an_offloaded_model(tmp_path: Path) -> None:
    for algorithm in ("lora", "dora"):
        model, expected = Small().eval(), trained_model(algorithm)
        to_memory(model, tmp_path)
        inweave.attach(model, collect(expected))
        torch.testing.assert_close(model(ROWS), expected(ROWS), rtol=0, atol=1e-7)  # two units in the last place
        merge(model)
        merge(expected)
        torch.testing.assert_close(model(ROWS), expected(ROWS), rtol=0, atol=1e-7)  # two units in the last place


def test_the_hooks_are_removed_before_the_layers() -> None:
    model = trained_model()
    accelerate.cpu_offload(model, torch.device("cpu"))
    with pytest.raises(MergeStateError, match="table: offloading put a hook on this layer"):
        inweave.eject(model)
    remove_hook_from_submodules(model)
    inweave.eject(model)
    assert torch.equal(model(ROWS), Small()(ROWS))
