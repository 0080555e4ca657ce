"""Whatever is passed to a public function by mistake is an error of inweave's own that says what was expected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")


from torch import nn

import inweave
from inweave.errors import ConfigError
from tests.support import random, write

api: Any = inweave  # wrong types on purpose


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8))


def adapter() -> Any:
    return api.collect(api.inject(model(), 4))


CALLS: dict[str, Callable[[], object]] = {
    "a path that is a number": lambda: api.load(3),
    "a base that is nothing": lambda: api.resolve("style.safetensors", None),
    "a hash of nothing": lambda: api.hash_file(None),
    "a source that is a number": lambda: api.FileSource(3),
    "a checkpoint that is a number": lambda: api.bake(1, [], "out.safetensors"),
    "a path instead of an adapter": lambda: api.save("style.safetensors", "out.safetensors"),
    "a path instead of a configuration": lambda: api.train("style.toml"),
    "a configuration from a number": lambda: api.TrainConfig.load(3),
    "LoRAs that are a number": lambda: api.GenerateConfig(prompt="a", loras=3),
    "a LoRA that is a number": lambda: api.GenerateConfig(prompt="a", loras=[3]),
    "an unknown amount of values": lambda: api.check("style.safetensors", "sdxl", values="some"),
    "a stack that is a number": lambda: api.Weaver(model()).apply(3),
    "an entry that is a number": lambda: api.Weaver(model()).apply([3]),
    "a strength that is a word": lambda: api.Weaver(model()).apply([("style.safetensors", "strong")]),
    "no strength": lambda: api.Weaver(model()).apply([("style.safetensors", None)]),
    "a strength beyond floats": lambda: api.Weaver(model()).apply([("style.safetensors", 10**400)]),
    "a strength of 5,000 digits": lambda: api.Weaver(model()).apply([("style.safetensors", 10**5000)]),
    "a strength that is NaN": lambda: api.Weaver(model()).apply([("style.safetensors", float("nan"))]),
    "a strength beyond floats, as an object": lambda: api.Weaver(model()).apply([("a", api.Strength(10**400))]),
    "a component without a strength": lambda: api.Weaver(model()).apply([("a", {"unet": None})]),
    "a component beyond floats": lambda: api.Weaver(model()).apply([("a", {"unet": 10**400})]),
    "a block without a strength": lambda: api.Weaver(model()).apply([("a", api.Strength(blocks={"IN00": None}))]),
    "blocks that are a list": lambda: api.Weaver(model()).apply([("a", api.Strength(blocks=[1.0]))]),
    "a strength in text beyond floats": lambda: api.Weaver(model()).apply(["a:1e400"]),
    "a merged source without a strength": lambda: api.MergedSource(api.DictSource({}), [("a", None)]),
    "a baked strength beyond floats": lambda: api.resize([("a", 10**400)], "out.safetensors", rank=2),
    "a layer strength beyond floats": lambda: api.set_strength(api.inject(model(), 4), "default", 10**400),
    "a layer without a strength": lambda: api.activate(api.inject(model(), 4), {"default": None}),
    "a chosen LoRA beyond floats": lambda: api.LoraChoice(name="a", strength=10**400),
    "a chosen LoRA without a strength": lambda: api.LoraChoice(name="a", strength=None),
    "a chosen LoRA that is NaN": lambda: api.LoraChoice(name="a", unet=float("nan")),
    "a weaver of an empty module": lambda: api.Weaver(nn.Module()),
    "a weaver of a path": lambda: api.Weaver("model.safetensors"),
    "a model built from a path": lambda: api.build(model(), "model.safetensors"),
    "a path built from a source": lambda: api.build("model.safetensors", api.DictSource({})),
    "an unknown place for originals": lambda: api.Weaver(model(), keep="somewhere"),
    "a merged source of a number": lambda: api.MergedSource(3, []),
    "a model from a number": lambda: api.build(model(), 3),
    "an unknown device": lambda: api.build(model(), api.DictSource(model().state_dict()), device="x"),
    "a number instead of a model": lambda: api.inject(3, 4),
    "a rank that is a word": lambda: api.inject(model(), "x"),
    "an alpha that is a word": lambda: api.inject(model(), 4, alpha="x"),
    "targets that are a number": lambda: api.inject(model(), 4, targets=3),
    "a spec that is a number": lambda: api.inject(model(), 4, spec=3),
    "a pattern that is a number": lambda: api.inject(model(), 4, rank_pattern=3),
    "a dtype that is a word": lambda: api.inject(model(), 4, dtype="float"),
    "a seed that is a word": lambda: api.inject(model(), 4, seed="x"),
    "an adapter that is a number": lambda: api.attach(model(), 5),
    "a layer strength that is a word": lambda: api.set_strength(api.inject(model(), 4), "default", "x"),
    "parameters of a number": lambda: api.trainable(3, "weight"),
    "a base that is a module": lambda: api.save(adapter(), "out", dialect="peft", base=model()),
    "a dialect that is a list": lambda: api.save(adapter(), "out", dialect=["peft"]),
    "an output that is a number": lambda: api.save(adapter(), 3, dialect="peft"),
    "a name that is a list": lambda: api.load("style.safetensors", name=["a"]),
    "an adapter's name that is a list": lambda: api.collect(api.inject(model(), 4), ["default"]),
    "a component that is a number": lambda: api.attach(model(), adapter(), component=3),
    "names that are a number": lambda: api.activate(api.inject(model(), 4), 3),
    "names that are numbers": lambda: api.activate(api.inject(model(), 4), [3]),
    "a strength of a list of names": lambda: api.set_strength(api.inject(model(), 4), ["default"], 1.0),
    "a number to eject": lambda: api.eject(api.inject(model(), 4), 3),
    "a target that is a number": lambda: api.inject(model(), 4, targets=[3]),
    "a pattern's key that is a number": lambda: api.inject(model(), 4, rank_pattern={3: 4}),
    "a rank beyond every model": lambda: api.inject(model(), 10**400),
    "an alpha beyond every float": lambda: api.inject(model(), 4, alpha=10**400),
    "freezing by a number": lambda: api.inject(model(), 4, freeze=3),
    "trained in a word": lambda: api.trainable(model(), "0", dtype="float"),
    "progress that is a number": lambda: api.bake("base.safetensors", [], "out.safetensors", progress=3),
    "parts that are a number": lambda: api.pipeline(parts=3),
    "folders that are a number": lambda: api.pipeline(lora_folders=3),
    "a LoRA parsed from a number": lambda: api.LoraChoice.parse(3),
    "ignored tensors that are a number": lambda: api.build(model(), api.DictSource(model().state_dict()), ignore=3),
    "a dtype that is a list": lambda: api.build(model(), api.DictSource(model().state_dict()), dtype=[3]),
    "an index that is a number": lambda: api.MergedSource(api.DictSource(model().state_dict()), [], index=3),
    "a kind nobody knows": lambda: api.register_layer(3, kind="?"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_wrong_argument_is_an_error_of_our_own(call: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        call()


def test_a_list_of_files_that_do_not_exist_is_an_error_that_names_them() -> None:
    with pytest.raises(inweave.FormatError, match=r"a\.safetensors: no such file"):
        inweave.Weaver(model()).apply(["a.safetensors"])


def test_one_adapter_by_itself_is_a_stack_of_one(tmp_path: Path) -> None:
    network = model()
    path = write(
        tmp_path / "style.safetensors", {"0.lora_A.weight": random(1, 2, 8), "0.lora_B.weight": random(2, 8, 2)}
    )
    assert inweave.Weaver(network).apply(f"{path}:0.5") == 1
