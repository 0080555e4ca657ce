"""Stacks merged into quantized layers: the bits of a fresh build, restored bit for bit, with the loss reported."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import inweave
from inweave.adapter import Adapter
from inweave.errors import MergeStateError, TargetError
from inweave.formats.read import read
from inweave.ops.quantized import FORMATS
from inweave.weights.build import build
from inweave.weights.merged import MergedSource
from inweave.weights.source import DictSource
from inweave.weights.weaver import Weaver
from tests.support import lora_pair

NAMES = ("fp8", "int8", "int8-hadamard", "nf4")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(128, 64), nn.Linear(64, 128), nn.Linear(128, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.second(torch.tanh(self.first(x))))
        return y


def net(format: str, state: dict[str, torch.Tensor] | None = None) -> Any:
    torch.manual_seed(0)
    model = Net().requires_grad_(False)
    if state is not None:
        model.load_state_dict(state)
    for layer in (model.first, model.second):
        FORMATS[format].quantize(layer)
    return model


def lora(seed: int, *modules: str) -> Adapter:
    sizes = {"first": (64, 128), "second": (128, 64), "last": (8, 128)}
    pairs = (lora_pair(f"lora_unet_{name}", *sizes[name], seed=seed + n) for n, name in enumerate(modules))
    return read({key: value for pair in pairs for key, value in pair.items()})


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    raw = ((one[name].contiguous().view(torch.uint8), two[name].contiguous().view(torch.uint8)) for name in one)
    return one.keys() == two.keys() and all(torch.equal(a, b) for a, b in raw)


def dequantized(model: Any) -> dict[str, torch.Tensor]:
    layers = {"first": model.first, "second": model.second, "last": model.last}
    return {f"{n}.{leaf}": getattr(layer, leaf).clone() for n, layer in layers.items() for leaf in ("weight", "bias")}


@pytest.mark.parametrize("format", NAMES)
def test_stacks_have_the_bits_of_a_fresh_build_and_the_base_comes_back(format: str) -> None:
    model = net(format)
    base, plain = bits(model), dequantized(model)
    weaver = Weaver(model)
    one, two = lora(1, "first", "second", "last"), lora(5, "second")
    for stack in ([(one, 0.7)], [(two, -0.4), (one, 0.2)], [(two, 1.0)], [(one, 0.7)]):
        weaver.apply(stack)
        fresh = build(Net(), MergedSource(DictSource(plain), stack, component="unet"))
        for layer in (fresh.first, fresh.second):  # type: ignore[union-attr]
            FORMATS[format].quantize(layer)  # type: ignore[arg-type]
        assert same(bits(model), bits(fresh)) and not same(bits(model), base)
        changed = ("second",) if stack == [(two, 1.0)] else ("first", "second")
        assert weaver.rounding_loss.keys() == {f"unet.{name}.weight" for name in changed}
        assert all(0 < share < (3 if format == "nf4" else 0.8) for share in weaver.rounding_loss.values())
    weaver.apply([])
    assert same(bits(model), base) and weaver.rounding_loss == {} and not weaver.woven


@pytest.mark.parametrize("format", NAMES)
def test_the_loss_is_what_rounding_took(format: str) -> None:
    model = net(format)
    before = model.first.weight.clone()
    weaver, adapter = Weaver(model), lora(1, "first")
    weaver.apply([(adapter, 0.05)])
    down, up = (next(t for key, t in lora_pair("lora_unet_first", 64, 128, seed=1).items() if part in key)
                for part in ("lora_down", "lora_up"))  # fmt: skip
    merged = build(Net(), MergedSource(DictSource(dequantized(net(format))), [(adapter, 0.05)], component="unet"))
    change = merged.first.weight - before  # type: ignore[operator, union-attr]
    lost = float((model.first.weight - merged.first.weight).norm() / change.norm())  # type: ignore[operator, union-attr]
    assert weaver.rounding_loss == {"unet.first.weight": pytest.approx(lost, rel=1e-4)} and down.shape and up.shape


def test_what_is_not_finite_leaves_the_old_stack() -> None:
    model = net("int8")
    weaver = Weaver(model)
    weaver.apply([(lora(1, "first"), 1.0)])
    before = bits(model)
    with pytest.raises(TargetError, match=r"first\.weight .*would overflow"):
        weaver.apply([(lora(1, "first"), 3e38)])
    assert same(bits(model), before)


def test_a_converted_model_is_followed_and_restored() -> None:
    model = net("nf4")
    base = bits(model)
    weaver = Weaver(model)
    weaver.apply([(lora(1, "first", "second"), 1.0)])
    model.to(torch.bfloat16)
    weaver.apply([(lora(5, "second"), 1.0)])
    weaver.apply([])
    now = bits(model)
    assert all(torch.equal(now[name], base[name]) for name in base if "bias" not in name and "last" not in name)


def test_other_numbers_and_a_layer_quantized_meanwhile_are_refused() -> None:
    model = net("int8")
    weaver = Weaver(model)
    weaver.apply([(lora(1, "first", "last"), 1.0)])
    model.first.numbers[0, 0] += 1
    with pytest.raises(MergeStateError, match=r"first\.weight"):
        weaver.apply([])
    weaver.restore()
    weaver.apply([(lora(1, "last"), 1.0)])
    FORMATS["int8"].quantize(model.last)
    with pytest.raises(MergeStateError, match=r"last\.weight"):
        weaver.apply([])


def test_the_printed_recipe_merges_and_restores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text("utf-8")
    recipe = re.search(r"<!-- recipe: quantized -->\n```python\n(.*?)```", page, re.DOTALL)
    assert recipe is not None
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"proj": nn.Linear(128, 128)})
    trained = copy.deepcopy(model)
    inweave.inject(trained, rank=4, targets="all-linear")
    with torch.no_grad():
        for name, value in trained.named_parameters():
            if name.endswith(".up"):
                value.normal_(0, 0.05)
    inweave.save(inweave.collect(trained), "style.safetensors", dialect="candle")
    names: dict[str, Any] = {"model": model}
    exec(compile(recipe[1], "training.md", "exec"), names)
    assert names["weaver"].rounding_loss == {} and not names["weaver"].woven
    assert isinstance(model["proj"], FORMATS["nf4"])
