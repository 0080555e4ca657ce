"""What attached adapters are: frozen unless they are trained; and models that already have PEFT's layers."""

from __future__ import annotations

import importlib
from typing import Any

import peft
import pytest
import torch
from torch import nn

import inweave
from inweave.adapter import Adapter
from inweave.errors import TargetError
from inweave.layers import activate, attach, collect, freeze, inject, lora_layers
from inweave.weights.networks import index_of

transformers: Any = importlib.import_module("transformers")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


def adapter() -> Adapter:
    return collect(inject(network(), 2))


def trained_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def of(name: str) -> set[str]:
    return {f"{layer}.adapters.{name}.{role}" for layer in "01" for role in ("down", "up")}


def test_an_attached_adapter_is_frozen_and_trained_if_asked() -> None:
    assert trained_names(attach(network(), adapter())) == set()
    assert trained_names(attach(network(), adapter(), trainable=True)) == of("default")
    model = inject(network(), 2, name="mine")
    assert trained_names(attach(model, adapter())) == of("mine")


def test_whole_values_are_frozen_with_the_adapter() -> None:
    source = network()
    inject(source, 2, targets=["0"])
    inweave.trainable(source, "1")
    whole = collect(source)
    assert trained_names(attach(network(), whole)) == set()
    expected = {"0.adapters.default.down", "0.adapters.default.up", "1.weight", "1.bias"}
    assert trained_names(attach(network(), whole, trainable=True)) == expected


def test_inactive_adapters_require_no_gradients_as_in_peft() -> None:
    model = inject(inject(network(), 2, name="one"), 2, name="two")
    attach(model, adapter(), name="file")
    freeze(model, r".*two\.down")
    theirs: Any = peft.get_peft_model(network(), peft.LoraConfig(r=2, target_modules=["0", "1"]), adapter_name="one")
    theirs.add_adapter("two", peft.LoraConfig(r=2, target_modules=["0", "1"]))
    for name in ("one", "two", "one"):
        activate(model, name)
        theirs.set_adapter(name)
        ours = {parameter.split(".")[2] for parameter in trained_names(model)}
        assert ours == {parameter.split(".")[-2] for parameter in trained_names(theirs)} == {name}
    activate(model, ["two", "file"])
    assert trained_names(model) == {"0.adapters.two.up", "1.adapters.two.up"}  # what was frozen stays frozen
    activate(model, [])
    assert trained_names(model) == set()
    activate(model, ["one", "two"])
    assert trained_names(model) == of("one") | {"0.adapters.two.up", "1.adapters.two.up"}


def test_a_model_with_peft_layers_is_refused_for_that_reason() -> None:
    theirs: Any = peft.get_peft_model(network(), peft.LoraConfig(r=2, target_modules=["0", "1"]))
    inner = theirs.base_model.model
    reason = r"Sequential already has PEFT layers \(0 and 1 more\).*unload"
    with pytest.raises(TargetError, match=reason):
        inweave.Weaver(inner).apply([adapter()])
    with pytest.raises(TargetError, match=reason):
        attach(inner, adapter())
    with pytest.raises(TargetError, match=reason):
        inject(inner, 2)
    assert not lora_layers(inner)
    assert inweave.Weaver(theirs.unload()).apply([adapter()]) == 2


def test_a_language_model_is_the_component_model() -> None:
    config = transformers.FalconConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    model = transformers.FalconForCausalLM(config)
    assert set(index_of(model).components) == {"model"}
    inject(model, 2, targets=["query_key_value"])
    nn.init.ones_(next(iter(lora_layers(model).values())).branch("default").get_parameter("up"))
    plain = transformers.FalconForCausalLM(config)
    weaver = inweave.Weaver(plain)
    assert weaver.apply([collect(model)]) == 1
    assert {placement.component for placement in weaver.plan(collect(model)).placements} == {"model"}
    with pytest.raises(TargetError) as error:
        weaver.apply([(collect(model), 1e38)])
    assert "unet" not in str(error.value)
