"""Quantization-aware training on the bundled model: what a run trains, resumes, refuses and plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from inweave.errors import ConfigError
from inweave.layers import LoraLayer, lora_layers, merge
from inweave.layers.qat import QuantizationAware
from inweave.ops.quantized import FORMATS, QuantizedLinear
from inweave.training.config.schema import TrainConfig
from inweave.training.session import check, prepare
from tests.unit.training.image_sets import make_set


def config_of(folder: Path, **settings: Any) -> TrainConfig:
    if not (folder / "set").exists():
        make_set(folder / "set", {"one": "a cat"})
    return TrainConfig.of(
        dataset=str(folder / "set"), cache_dir=str(folder / "cache"), device="cpu", resolution=64,
        **{"steps": 3, "targets": "attention", "learning_rate": 1e-2, "output": str(folder / "out"), **settings},
    )  # fmt: skip


def aware_layers(run: Any) -> list[LoraLayer]:
    layers = [layer for layer in lora_layers(run.model.denoiser).values() if isinstance(layer, LoraLayer)]
    return [layer for layer in layers if isinstance(layer.operation, QuantizationAware)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("quantize", ["off", "int8"])
def test_a_run_trains_what_merging_will_store_and_resumes_bit_for_bit(quantize: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"qat": "int8", "quantize": quantize, "save_every": 1, "keep_last": 0}
    run, _ = prepare(config_of(tmp_path, **settings))
    layers = aware_layers(run)
    assert len(layers) > 10 and all(isinstance(layer.base, QuantizedLinear) is (quantize == "int8") for layer in layers)
    straight = run.train()
    with safe_open(straight.path, "pt") as opened:
        assert 'qat = "int8"' in opened.metadata()["inweave.config"]
    for layer in layers[:3]:
        x = torch.randn(2, layer.into[0])
        before = layer(x)
        merge(layer)
        if quantize == "off":
            FORMATS["int8"].quantize(layer.base)
        assert torch.equal(layer.base(x), before)
    (state,) = (tmp_path / "out").glob("*-state/step-000001")
    again, _ = prepare(config_of(tmp_path, **settings, output=str(tmp_path / "other"), resume=str(state)))
    result = again.train()
    assert result.losses == straight.losses[1:]
    one, two = load_file(result.path), load_file(straight.path)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_the_first_half_of_a_run_is_that_of_a_plain_one(tmp_path: Path) -> None:
    """So that the adapter stays close to what a plain run gives, also after it is merged and quantized."""
    losses = [
        prepare(config_of(tmp_path, steps=4, qat=qat, log_every=1, output=str(tmp_path / qat)))[0].train().losses
        for qat in ("nf4", "off")
    ]
    assert losses[0][:2] == losses[1][:2] and losses[0][2] != losses[1][2]


def test_what_cannot_go_together_is_refused_by_name(tmp_path: Path) -> None:
    for settings, words in (
        ({"qat": "int8", "quantize": "nf4"}, 'qat: the base is quantize = "nf4"'),
        ({"qat": "nf4", "dropout": 0.1}, "dropout: qat trains the merged weight"),
        ({"qat": "nf4", "rank_dropout": 0.1}, "rank_dropout: qat"),
        ({"qat": "int8", "shard": True}, "shard = true"),
        ({"qat": "int8", "train_denoiser": False, "train_text_encoders": True}, "train_denoiser = false"),
    ):
        with pytest.raises(ConfigError, match=words):
            config_of(tmp_path, **settings)
    config = config_of(tmp_path, qat="int8", targets=["time_embedding.linear_1"])
    problems = check(config)[2]["problems"]
    assert any("changes none of the layers that are trained" in problem for problem in problems)
    with pytest.raises(ConfigError, match="changes none of the layers"):
        prepare(config)


def test_dora_trains_and_the_plan_counts_the_rounded_weight(tmp_path: Path) -> None:
    config = config_of(tmp_path, qat="nf4", network="dora", steps=1)
    _, _, needs = check(config)
    _, _, plain = check(config.model_copy(update={"qat": "off"}))
    assert needs["problems"] == [] and needs["activation_bytes"] > plain["activation_bytes"]
    run, _ = prepare(config)
    before = [p.detach().clone() for layer in aware_layers(run) for p in layer.adapters.parameters()]
    result = run.train()
    after = [p for layer in aware_layers(run) for p in layer.adapters.parameters()]
    assert result.skipped_steps == 0
    assert any(not torch.equal(one, two) for one, two in zip(before, after, strict=True))
