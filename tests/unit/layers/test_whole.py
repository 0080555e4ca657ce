"""Attached adapters carry what has no factors (heads, norms, biases, token rows), and give PEFT's outputs with it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from inweave import (
    Weaver,
    activate,
    attach,
    collect,
    disabled,
    eject,
    inject,
    load,
    merge,
    save,
    set_strength,
    trainable,
    unmerge,
)
from inweave.errors import ConfigError, MergeStateError, TargetError
from tests.support import random, write

peft = pytest.importorskip("peft")
hf = pytest.importorskip("transformers")

BERT = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40,
    "initializer_range": 0.5,
}  # fmt: skip
LLAMA = BERT | {"num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": True}
IDS = torch.arange(12).reshape(2, 6)
PEFT: dict[str, dict[str, Any]] = {
    "head": {"task_type": "SEQ_CLS"},
    "modules": {"modules_to_save": ["pooler", "classifier"]},
    "norms": {"modules_to_save": ["LayerNorm"]},
    "embedding": {"modules_to_save": ["position_embeddings"]},
    "biases of the layers": {"bias": "lora_only"},
    "all biases": {"bias": "all"},
    "biases of the factors": {"lora_bias": True},
    "token rows": {"trainable_token_indices": [3, 5]},
    "everything": {"bias": "all", "modules_to_save": ["classifier"], "trainable_token_indices": [2, 9]},
}


def bert(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=3)).eval()


def llama() -> Any:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)).eval()


def out(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=IDS).logits
    return logits


def fill(model: nn.Module, seed: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)


def from_peft(folder: Path, model: Any, seed: int = 5, **options: Any) -> torch.Tensor:
    """Make PEFT save a random adapter for the model, and return the outputs with it."""
    options = {"target_modules": ["query", "value"]} | options
    made = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=6, **options))
    fill(made, seed)
    made.eval().save_pretrained(folder)
    return out(made)


@pytest.mark.parametrize("kind", PEFT)
def test_attached_switched_collected_and_read_by_peft_again(kind: str, tmp_path: Path) -> None:
    expected = from_peft(tmp_path / "theirs", bert(), **PEFT[kind])
    model, plain = bert(), out(bert())
    bits, frozen = copy.deepcopy(model.state_dict()), [p.requires_grad for p in model.parameters()]
    attach(model, tmp_path / "theirs")
    torch.testing.assert_close(out(model), expected)
    assert (expected - plain).abs().max() > 1e-3
    with disabled(model):
        assert torch.equal(out(model), plain)
    activate(model, [])
    assert torch.equal(out(model), plain)
    activate(model, "default")
    merge(model)
    torch.testing.assert_close(out(model), expected)
    unmerge(model)
    adapter = collect(model)
    read = load(tmp_path / "theirs")
    used = {key for entry in read for key in entry.keys}  # PEFT writes some biases more than once
    assert {key: bytes(read.tensors[key].data) for key in used} == {k: v.data for k, v in adapter.tensors.items()}
    save(adapter, tmp_path / "ours", dialect="peft")
    torch.testing.assert_close(out(peft.PeftModel.from_pretrained(bert(), str(tmp_path / "ours")).eval()), expected)
    eject(model)
    assert all(torch.equal(bits[name], value) for name, value in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == frozen


def test_a_head_that_inject_trained_is_attached_again(tmp_path: Path) -> None:
    model = inject(bert(), 2)
    fill(model)
    save(collect(model), tmp_path / "ours", dialect="peft")
    assert torch.equal(out(attach(bert(1), tmp_path / "ours")) - out(bert(1)) != 0, torch.ones(2, 3, dtype=torch.bool))
    assert torch.equal(out(attach(bert(), tmp_path / "ours")), out(model))


def test_token_rows_reach_the_tied_output_layer(tmp_path: Path) -> None:
    expected = from_peft(tmp_path, llama(), target_modules=["q_proj"], trainable_token_indices=[1, 4])
    model = attach(llama(), tmp_path)
    torch.testing.assert_close(out(model), expected)
    assert len(collect(model).tensors) == len(load(tmp_path).tensors)
    with disabled(model):
        assert torch.equal(out(model), out(llama()))
    eject(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tied_module_saved_whole_is_refused_unless_allowed(tmp_path: Path) -> None:
    expected = from_peft(tmp_path, llama(), target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    with pytest.raises(TargetError, match=r"embed_tokens: its weight is also that of lm_head.*allow_tied"):
        attach(llama(), tmp_path)
    torch.testing.assert_close(out(attach(llama(), tmp_path, allow_tied=True)), expected)


def test_two_adapters_with_heads_are_switched(tmp_path: Path) -> None:
    expected = [from_peft(tmp_path / str(seed), bert(), seed, task_type="SEQ_CLS") for seed in (5, 6)]
    model = attach(bert(), tmp_path / "5", name="five")
    with pytest.raises(ConfigError, match=r"classifier\.(weight|bias): 'five' and 'six' both replace it"):
        attach(model, tmp_path / "6", name="six")
    torch.testing.assert_close(out(model), expected[0])
    activate(model, [])
    attach(model, tmp_path / "6", name="six")
    for name, result in (("six", expected[1]), ("five", expected[0]), ("six", expected[1])):
        activate(model, name)
        torch.testing.assert_close(out(model), result)
    with pytest.raises(ConfigError, match="both replace it"):
        activate(model, ["five", "six"])
    torch.testing.assert_close(out(model), expected[1])
    eject(model, "six")
    activate(model, "five")
    torch.testing.assert_close(out(model), expected[0])
    assert collect(model, "five").tensors.keys() == load(tmp_path / "5").tensors.keys()


def test_a_bias_of_the_factors_follows_the_strength(tmp_path: Path) -> None:
    from_peft(tmp_path, bert(), lora_bias=True)
    peer = peft.PeftModel.from_pretrained(bert(), str(tmp_path)).eval()
    model = attach(bert(), tmp_path)
    for strength in (0.5, -1.0, 0.0, 2.0):
        for layer in peer.modules():
            if hasattr(layer, "set_scale"):
                layer.set_scale("default", strength)
        set_strength(model, "default", strength)
        torch.testing.assert_close(out(model), out(peer))


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)))  # type: ignore[no-any-return]


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def biased() -> Biased:
    torch.manual_seed(0)
    return Biased()


def differences(folder: Path) -> Path:
    return write(
        folder / "a.safetensors",
        {"a.lora_A.weight": random(1, 2, 4), "a.lora_B.weight": random(2, 6, 2), "a.lora_B.bias": random(3, 6),
         "norm.diff": random(4, 6), "norm.diff_b": random(5, 6), "b.diff": random(6, 3, 6)},
    )  # fmt: skip


def merged(path: Path, strength: float) -> Biased:
    """A model that has the bias, with the adapter in its weights."""
    model = biased()
    model.a.bias = nn.Parameter(torch.zeros(6))
    Weaver(model).apply([(path, strength)])
    return model


def test_differences_are_added_and_a_missing_bias_is_created(tmp_path: Path) -> None:
    path = differences(tmp_path)
    model = attach(biased(), path)
    for strength in (1.0, -0.5):
        set_strength(model, "default", strength)
        torch.testing.assert_close(model(X), merged(path, strength)(X))
    attach(model, path, name="again")
    torch.testing.assert_close(model(X), merged(path, 0.5)(X))
    again = attach(biased(), collect(model, "again"))
    activate(model, "again")
    assert torch.equal(again(X), model(X))
    eject(model)
    assert model.a.bias is None and torch.equal(model(X), biased()(X))


def test_an_adapter_of_whole_values_alone(tmp_path: Path) -> None:
    model = biased().requires_grad_(False)
    trainable(model, ["norm", "b"])
    fill(model)
    save(collect(model), tmp_path / "whole", dialect="peft")
    again = attach(biased(), tmp_path / "whole")
    assert torch.equal(again(X), model(X))
    set_strength(again, "default", 0)
    assert torch.equal(again(X), biased()(X))
    with pytest.raises(ConfigError, match="'default' is already"):
        attach(again, tmp_path / "whole")
    eject(again, "default")
    assert torch.equal(again(X), biased()(X))


def test_moves_and_copies_of_the_model_are_followed(tmp_path: Path) -> None:
    expected = from_peft(tmp_path, bert(), task_type="SEQ_CLS", trainable_token_indices=[1])
    model = attach(bert(), tmp_path)
    activate(model, [])
    model.double()
    activate(model, "default")
    assert out(model).dtype == torch.float64
    torch.testing.assert_close(out(model).float(), expected)
    activate(model, [])
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        activate(twin, "default")
        torch.testing.assert_close(out(twin).float(), expected)
        assert torch.equal(out(model), out(bert().double()))


def test_a_second_adapter_leaves_the_trained_head_of_the_first(tmp_path: Path) -> None:
    from_peft(tmp_path, bert(), task_type="SEQ_CLS")
    model = attach(bert(), tmp_path)
    trainable(model, "classifier")
    with torch.no_grad():
        model.classifier.bias += 1
    trained = out(model)
    with pytest.raises(ConfigError, match="classifier belongs to the adapter default"):
        inject(model, 2, name="second")
    inject(model, 2, targets=["key"], name="second", freeze=False)
    assert "classifier" not in {entry.ref.name for entry in collect(model, "second")}
    activate(model, [])
    assert torch.equal(out(model), out(bert()))
    activate(model, "default")
    assert torch.equal(out(attach(bert(), collect(model))), trained)


def test_rows_and_sums_cannot_be_made_trainable(tmp_path: Path) -> None:
    from_peft(tmp_path, bert(), trainable_token_indices=[1])
    with pytest.raises(TargetError, match=r"word_embeddings.weight: adapters add to it or replace rows"):
        trainable(attach(bert(), tmp_path), "word_embeddings")


def test_what_has_no_place_is_refused_by_name(tmp_path: Path) -> None:
    from_peft(tmp_path, bert(), task_type="SEQ_CLS")
    model = bert()
    del model.classifier
    with pytest.raises(TargetError, match=r"classifier.weight: the model has no such module"):
        attach(model, tmp_path)
    with torch.device("meta"):
        empty = bert()
    with pytest.raises(TargetError, match="no data here"):
        attach(empty, tmp_path)
    offloaded = attach(bert(), tmp_path)
    offloaded.classifier.to("meta")
    with pytest.raises(MergeStateError, match="offloaded"):
        activate(offloaded, [])


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
