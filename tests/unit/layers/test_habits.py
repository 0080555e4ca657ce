"""Calls that users of PEFT look for, with PEFT's results: exclusion, counts, merging for good, grouped layers."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from inweave import Weaver, attach, collect, eject, inject, load, merge, save, trainable_parameters
from inweave.errors import ConfigError, TargetError
from inweave.layers import lora_layers
from tests.unit.layers.zoo import fill

peft = pytest.importorskip("peft")
hf = pytest.importorskip("transformers")

LLAMA = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
IDS = torch.arange(12).reshape(2, 6)


def llama() -> Any:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)).eval()


def out(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=IDS).logits
    return logits


def stir(peer: nn.Module) -> None:
    """Give PEFT's factors values: a fresh pair has no effect."""
    generator = torch.Generator().manual_seed(4)
    for name, parameter in peer.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "down_proj"], r".*(q|k)_proj"])
@pytest.mark.parametrize("exclude", [["layers.1.self_attn.q_proj"], r".*layers\.0\..*q_proj", ["q_proj"]])
def test_excluded_modules_are_those_of_peft(targets: Any, exclude: Any) -> None:
    model = inject(llama(), 2, targets=targets, exclude=exclude)
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=targets, exclude_modules=exclude)
    peer = peft.get_peft_model(llama(), config)
    assert set(lora_layers(model)) == set(peer.base_model.targeted_module_names)
    count = trainable_parameters(model)
    assert (count.trained, count.total) == peer.get_nb_trainable_parameters()


def test_excluding_nothing_or_everything_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"exclude 'q_porj' matches no module; the nearest are .*q_proj"):
        inject(llama(), 2, exclude=["q_porj"])
    with pytest.raises(ConfigError, match="leaves nothing of the targets"):
        inject(llama(), 2, targets=["q_proj"], exclude=r".*q_proj")


def test_the_share_of_trained_parameters() -> None:
    model = inject(llama(), 2, targets=["q_proj"])
    count = trainable_parameters(model)
    assert count.trained == 2 * 2 * (16 + 16) and count.share == count.trained / count.total
    assert str(count) == f"128 of {count.total:,} parameters are trained ({count.trained / count.total:.4%})"
    with pytest.raises(ConfigError, match="expected a torch module"):
        trainable_parameters("model")  # type: ignore[arg-type]


@pytest.mark.parametrize("is_merged", [False, True])
def test_merged_and_unloaded_in_one_call(is_merged: bool, tmp_path: Path) -> None:
    peer = peft.get_peft_model(llama(), peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "up_proj"]))
    stir(peer)
    peer.save_pretrained(tmp_path)
    model = attach(llama(), tmp_path)
    if is_merged:
        merge(model)
    eject(model, merge=True)
    assert (out(model) - out(llama())).abs().max() > 1e-3
    theirs = peer.merge_and_unload()
    assert not lora_layers(model) and model.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-6, atol=1e-6)
    with pytest.raises(ConfigError, match="give no name"):
        eject(attach(llama(), tmp_path), "default", merge=True)


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pairs = nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.point = nn.Conv2d(8, 6, 1, groups=2)
        self.line = nn.Conv1d(8, 4, 3, groups=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.depth(torch.tanh(self.pairs(x)))
        return torch.cat([self.point(x).flatten(1), self.line(x.flatten(2)).flatten(1)], 1)


X = torch.linspace(-1, 1, 200).reshape(2, 4, 5, 5)


@pytest.mark.parametrize("options", [{}, {"rslora": True}, {"network": "loha"}, {"dtype": torch.bfloat16}])
def test_grouped_convolutions_are_read_by_peft(options: Any, tmp_path: Path) -> None:
    model = inject(Grouped(), 3, 5.0, ["pairs", "depth", "point", "line"], **options)
    fill(model)
    adapter = collect(model)
    save(adapter, tmp_path, dialect="peft")
    with torch.no_grad():
        expected = model(X)
        peer = peft.PeftModel.from_pretrained(Grouped(), str(tmp_path)).eval()
        torch.testing.assert_close(peer(X), expected, rtol=1e-3, atol=1e-4)
        assert (expected - Grouped()(X)).abs().max() > 0.1
        again = attach(Grouped(), tmp_path)
        assert torch.equal(again(X), expected)
        woven = Grouped()
        Weaver(woven).apply([tmp_path])
        torch.testing.assert_close(woven(X), expected, rtol=1e-3, atol=1e-4)
    read = collect(again)
    assert {key: tensor.data for key, tensor in read.tensors.items()} == {
        key: tensor.data for key, tensor in adapter.tensors.items()
    }
    assert [entry.factors.scale for entry in read] == pytest.approx([entry.factors.scale for entry in adapter])


def test_what_peft_trained_on_all_inputs_of_a_grouped_convolution_is_refused(tmp_path: Path) -> None:
    peer = peft.get_peft_model(Grouped(), peft.LoraConfig(r=4, target_modules=["pairs"]))
    stir(peer)
    peer.save_pretrained(tmp_path)
    with pytest.raises(TargetError, match=r"the base has \[8, 2, 3, 3\], the adapter changes \[8, 4, 3, 3\]"):
        attach(Grouped(), tmp_path)


def test_dora_of_grouped_convolutions_is_refused_by_name(tmp_path: Path) -> None:
    model = inject(Grouped(), 2, targets=["pairs"], dora=True)
    with pytest.raises(TargetError, match=r"pairs: PEFT has no DoRA for grouped convolutions"):
        save(collect(model), tmp_path / "a", dialect="peft")


def test_the_name_of_the_output_chooses_the_dialect(tmp_path: Path) -> None:
    model = inject(llama(), 2, targets=["q_proj"])
    fill(model)
    done = save(collect(model), tmp_path / "mine")
    assert done.dialect == "peft" and torch.equal(out(attach(llama(), tmp_path / "mine")), out(model))
    with pytest.raises(TargetError, match=r'PEFT folder: save\(adapter, "FOLDER", dialect="peft"\)'):
        save(collect(model), tmp_path / "mine.safetensors")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda adapter: pickle.loads(pickle.dumps(adapter))])
def test_a_loaded_adapter_is_copied_and_pickled(copied: Any, tmp_path: Path) -> None:
    peer = peft.get_peft_model(llama(), peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"]))
    stir(peer)
    peer.save_pretrained(tmp_path)
    adapter = load(tmp_path)
    twin = copied(adapter)
    assert torch.equal(out(attach(llama(), twin)), out(attach(llama(), adapter)))
    assert (out(attach(llama(), twin)) - out(llama())).abs().max() > 1e-3
    assert twin.config == adapter.config


def test_all_linear_leaves_out_the_tied_decoder_of_blip() -> None:
    """PEFT adapts one of two modules that share a weight; here that would be refused."""
    small = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = {"vocab_size": 48, "projection_dim": 16, "encoder_hidden_size": 32, "sep_token_id": 3, "pad_token_id": 0}
    vision = small | {"image_size": 28, "patch_size": 14}
    config = hf.BlipConfig(text_config=small | text, vision_config=vision, projection_dim=16)
    targets = set(lora_layers(inject(hf.BlipForConditionalGeneration(config), 2)))
    options = peft.LoraConfig(r=2, target_modules="all-linear")
    peer = peft.get_peft_model(hf.BlipForConditionalGeneration(config), options).base_model.targeted_module_names
    assert set(peer) - targets == {"text_decoder.cls.predictions.decoder"} and not targets - set(peer)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
