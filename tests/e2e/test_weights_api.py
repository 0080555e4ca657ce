"""Weights from Python, typed from public names only, as the README shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import inweave
from tests.support import random, write


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 24), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_file(Net().state_dict(), tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


def lora(path: Path, seed: int = 0) -> Path:
    return write(path, {
        "base_model.model.first.lora_A.weight": random(seed, 3, 20),
        "base_model.model.first.lora_B.weight": random(seed + 1, 24, 3),
        "base_model.model.second.lora_A.weight": random(seed + 2, 3, 24),
        "base_model.model.second.lora_B.weight": random(seed + 3, 16, 3),
    })  # fmt: skip


def close(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(state, expected, rtol=1e-6, atol=1e-6)


def test_a_model_on_the_meta_device_is_built_with_adapters_merged(base: Path, tmp_path: Path) -> None:
    style = lora(tmp_path / "style.safetensors")
    plan = inweave.resolve(inweave.load(style), inweave.index_of(base))
    with torch.device("meta"):
        model_on_meta = Net()
    model = inweave.build(model_on_meta, inweave.MergedSource(inweave.FileSource(base), [(plan, 0.8)]))
    before = load_file(base)
    change = load_file(style)
    prefix = "base_model.model.first"
    expected = before["first.weight"] + 0.8 * change[f"{prefix}.lora_B.weight"] @ change[f"{prefix}.lora_A.weight"]
    torch.testing.assert_close(model.state_dict()["first.weight"], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(model.state_dict()["first.bias"], before["first.bias"])
    model(torch.randn(2, 20))


def test_plans_adapters_paths_and_texts_are_the_same_stack(base: Path, tmp_path: Path) -> None:
    style = lora(tmp_path / "style.safetensors")
    source = inweave.FileSource(base)
    states = []
    for entry in ((inweave.resolve(style, base), 0.8), (inweave.load(style), 0.8), (style, 0.8), f"{style}:0.8"):
        merged = inweave.MergedSource(source, [entry])
        states.append({name: merged.get(name) for name in merged.names()})
    assert all(torch.equal(state[name], states[0][name]) for state in states for name in state)


def test_bake_extract_and_resize_from_python(base: Path, tmp_path: Path) -> None:
    style = lora(tmp_path / "style.safetensors")
    report = inweave.bake(base, [f"{style}:0.5"], tmp_path / "tuned.safetensors")
    assert (report.tensors, report.merged) == (4, 2)
    assert [(each["name"], each["strength"]) for each in report.loras] == [("style.safetensors", 0.5)]
    with safe_open(tmp_path / "tuned.safetensors", "pt") as file:
        assert json.loads(file.metadata()["inweave.merged"]) == report.loras
    merged = inweave.MergedSource(inweave.FileSource(base), [(style, 0.5)])
    tuned = load_file(tmp_path / "tuned.safetensors")
    assert all(torch.equal(tuned[name], merged.get(name)) for name in tuned)

    result = inweave.extract(tmp_path / "tuned.safetensors", base, tmp_path / "found", rank=3, dialect="peft",
                            dtype=torch.float32, device="cpu")  # fmt: skip
    assert result.saved is not None and result.energy > 0.999
    again = inweave.bake(base, [tmp_path / "found"], tmp_path / "again.safetensors")
    close(load_file(again.path), tuned)

    small = inweave.resize(style, tmp_path / "small", rank=1, dialect="peft", base=base)
    assert small.saved is not None
    assert {entry.factors.rank for entry in inweave.load(tmp_path / "small")} == {1}
    other = lora(tmp_path / "other.safetensors", 40)
    inweave.resize([f"{style}:0.5", (other, -0.3)], tmp_path / "both", dialect="peft", base=base)
    expected = inweave.MergedSource(inweave.FileSource(base), [(style, 0.5), (other, -0.3)])
    both = inweave.MergedSource(inweave.FileSource(base), [tmp_path / "both"])
    close({n: both.get(n) for n in both.names()}, {n: expected.get(n) for n in both.names()})


def test_mistakes_are_named_before_any_work(base: Path, tmp_path: Path) -> None:
    style = lora(tmp_path / "style.safetensors")
    with pytest.raises(inweave.ConfigError, match="the weights themselves are needed"):
        inweave.bake("sdxl", [style], tmp_path / "out.safetensors")
    with pytest.raises(inweave.ConfigError, match="one of the adapters"):
        inweave.bake(base, [style], style)
    with pytest.raises(inweave.ConfigError, match="no dtype is called 'int4'"):
        inweave.bake(base, [style], tmp_path / "out.safetensors", dtype="int4")
    with pytest.raises(inweave.ConfigError, match="choose a size"):
        inweave.resize(style, tmp_path / "out")
    with pytest.raises(inweave.ConfigError, match="pairs"):
        inweave.MergedSource(inweave.FileSource(base), [(style, 0.5, 1)])  # type: ignore[list-item]
    with pytest.raises(inweave.ConfigError, match="no dialect is called"):
        inweave.extract(base, base, tmp_path / "out", dialect="latin")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.safetensors", "style.safetensors"]
