"""Weights of the base that are trained along with an adapter are part of it; names are those of the plain model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from inweave import Weaver, attach, collect, eject, index_of, inject, load, merge, save, trainable
from inweave.errors import TargetError
from inweave.layers import freeze, model_index
from tests.support import random, write


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin0 = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.lin1 = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(self.lin0(x)))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.lin1(x)


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


X = torch.linspace(-1, 1, 18).reshape(3, 6)


def disturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)


def tuned(*patterns: str) -> Net:
    model = inject(net(), 2, 3.0, ["lin0", "blocks.1"])
    for pattern in patterns:
        trainable(model, pattern)
    disturb(model)
    return model


@pytest.mark.parametrize("patterns", [("lin1",), ("norm",), ("lin1.weight",), ("lin1", "norm.bias"), ("lin0.bias",)])
def test_trained_weights_of_the_base_are_saved_and_loaded_again(patterns: tuple[str, ...], tmp_path: Path) -> None:
    model = tuned(*patterns)
    save(collect(model), tmp_path / "peft", dialect="peft")
    ours = net()
    Weaver(ours).apply([load(tmp_path / "peft")])
    torch.testing.assert_close(ours(X), model(X))


@pytest.mark.parametrize("patterns", [("lin1",), ("norm",), ("lin1.weight", "norm.weight"), ("lin0.bias",)])
def test_real_peft_loads_them_too(patterns: tuple[str, ...], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = tuned(*patterns)
    save(collect(model), tmp_path / "peft", dialect="peft")
    theirs = peft.PeftModel.from_pretrained(net(), str(tmp_path / "peft")).eval()
    torch.testing.assert_close(theirs(X), model(X))


def test_they_stay_part_of_it_when_frozen_and_copied(tmp_path: Path) -> None:
    model = copy.deepcopy(tuned("lin1"))
    freeze(model)
    names = [entry.ref.name for entry in collect(model)]
    assert names == ["lin0", "blocks.1", "lin1", "lin1"]


def test_a_weight_chosen_before_the_adapter_is_injected_is_part_of_it() -> None:
    model = net()
    trainable(model, "lin1")
    assert "lin1" in {entry.ref.name for entry in collect(inject(model, 2, targets=["lin0"]))}


@pytest.mark.parametrize("dialect", ["kohya", "diffusers", "candle", "onetrainer", "bfl"])
def test_a_dialect_that_cannot_hold_them_refuses_them_by_name(dialect: str, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"lin1|diffusion models"):
        save(collect(tuned("lin1")), tmp_path / "a.safetensors", dialect=dialect, base=model_index(net()))


def test_a_weight_that_carries_an_adapter_and_was_trained_itself_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"lin0.*weight was trained along with the adapter"):
        save(collect(tuned("lin0.weight")), tmp_path / "peft", dialect="peft")


def test_modules_that_no_file_holds_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    inject(model, 2, targets=["0"])
    trainable(model, "1")
    with pytest.raises(TargetError, match="running_mean"):
        collect(model)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "compile": lambda model: torch.compile(model, backend="eager"),
    "data parallel": nn.DataParallel,
    "checkpoint": checkpoint_wrapper,
    "both": lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
}


def inner(model: Net) -> Net:
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    return model


WRAPPERS["inside"] = inner


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_have_no_part_in_names(wrapper: str, tmp_path: Path) -> None:
    model = WRAPPERS[wrapper](net())
    inject(model, 2, 3.0, ["lin0", "blocks.1"])
    assert trainable(model, ["lin1.weight"]) == ["lin1.weight"]
    disturb(model)
    adapter = collect(model)
    assert {entry.ref.name for entry in adapter} == {"lin0", "blocks.1", "lin1"}
    assert not [key for key in adapter.tensors if "orig_mod" in key or "wrapped" in key or ".module." in key]
    save(adapter, tmp_path / "peft", dialect="peft")
    plain = net()
    Weaver(plain).apply([load(tmp_path / "peft")])
    with torch.no_grad():
        torch.testing.assert_close(plain(X), model(X))
    assert set(next(iter(model_index(model))).parts) == set(net().state_dict())
    eject(model)
    assert not [name for name in model.state_dict() if ".adapters." in name]


@pytest.mark.parametrize("targets", ["all-linear", ["lin1"]])
def test_a_layer_that_is_compiled_by_itself_is_refused(targets: object) -> None:
    """torch.compile keeps the function of the module it was given, and would never call the layer in its place."""
    model = net()
    model.lin1 = torch.compile(model.lin1, backend="eager")  # type: ignore[assignment]
    with pytest.raises(TargetError, match=r"lin1: .*compile"):
        inject(model, 2, targets=targets)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_adapter_is_attached_to_a_wrapped_model(wrapper: str, tmp_path: Path) -> None:
    first = inject(net(), 2, 3.0, ["lin0", "blocks.1"])
    disturb(first)
    model = attach(WRAPPERS[wrapper](net()), collect(first))
    with torch.no_grad():
        torch.testing.assert_close(model(X), first(X))
        merge(model)
        torch.testing.assert_close(model(X), first(X))


@pytest.mark.parametrize(
    "wrapped",
    ["_orig_mod.{}", "module.{}", "module._orig_mod.{}", "_fsdp_wrapped_module.{}", "base_model.model._orig_mod.{}",
     "base_model.model.module.{}", "_orig_mod.base_model.model.{}", "_checkpoint_wrapped_module.{}"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["blocks.1", "blocks._orig_mod.1", "blocks.1._fsdp_wrapped_module"])
def test_files_of_wrapped_models_are_read(wrapped: str, name: str, tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.safetensors",
        {
            f"{wrapped.format(name)}.lora_A.weight": random(1, 2, 8),
            f"{wrapped.format(name)}.lora_B.weight": random(2, 8, 2),
        },
    )
    assert [entry.ref.name for entry in load(path)] == ["blocks.1"]
    assert Weaver(net()).apply([path]) == 1


def test_the_weaver_sees_through_wrappers() -> None:
    first = inject(net(), 2, 3.0, ["lin0", "blocks.1"])
    disturb(first)
    model = torch.compile(net(), backend="eager")
    assert set(next(iter(index_of(model))).parts) == set(net().state_dict())
    assert Weaver(model).apply([collect(first)]) == 2


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_a_module_of_modules_is_trained_and_saved_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"first": nn.Linear(4, 4), "inner": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))}
    )
    base = {name: value.clone() for name, value in model.state_dict().items()}
    inject(model, 2, targets=["first"])
    assert trainable(model, "inner") == ["inner.0.weight", "inner.0.bias", "inner.2.weight", "inner.2.bias"]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    folder = tmp_path / "adapter"
    save(collect(model), folder, dialect="peft")
    fresh = nn.ModuleDict(
        {"first": nn.Linear(4, 4), "inner": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))}
    )
    fresh.load_state_dict(base)
    Weaver(fresh).apply([(folder, 1.0)])
    merge(model)
    for name in ("first", "inner.0", "inner.2"):
        torch.testing.assert_close(fresh.get_submodule(name).weight, model.get_submodule(name).weight)
        torch.testing.assert_close(fresh.get_submodule(name).bias, model.get_submodule(name).bias)
