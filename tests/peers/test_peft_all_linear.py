"""`all-linear` chooses the layers that PEFT chooses, and a classification head is trained and saved whole, as PEFT
does.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

peft = pytest.importorskip("peft")

from torch import nn  # noqa: E402
from transformers import MixtralConfig, MixtralForCausalLM, RobertaConfig, RobertaForSequenceClassification  # noqa: E402

from inweave import Weaver, collect, eject, inject, load, save  # noqa: E402
from inweave.layers import lora_layers  # noqa: E402
from tests.peers.test_peft_configs import TOKENS, classifier, gpt2, llama, opt, output  # noqa: E402


def roberta() -> nn.Module:
    torch.manual_seed(5)
    config = RobertaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, num_labels=3
    )
    return RobertaForSequenceClassification(config).eval()


@pytest.mark.parametrize("make", [classifier, roberta, llama, opt, gpt2], ids=lambda make: make.__name__)
def test_all_linear_means_the_same_layers_as_in_peft(make: object, tmp_path: Path) -> None:
    assert callable(make)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        task = "SEQ_CLS" if make in (classifier, roberta) else "CAUSAL_LM"
        theirs = peft.get_peft_model(make(), peft.LoraConfig(r=2, target_modules="all-linear", task_type=task))
        adapted = {
            name.removeprefix("base_model.model.")
            for name, module in theirs.named_modules()
            if isinstance(module, peft.tuners.lora.LoraLayer)
        }
        model = inject(make(), 2)
        assert set(lora_layers(model)) == adapted
        heads = {
            name.partition(".modules_to_save.default.")[0].removeprefix("base_model.model.")
            for name, parameter in theirs.named_parameters()
            if parameter.requires_grad and "modules_to_save" in name
        }
        whole = {entry.ref.name for entry in collect(model) if entry.ref.name not in adapted}
        assert {name.partition(".")[0] for name in whole} == heads
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
        save(collect(model), tmp_path / "peft", dialect="peft")
        ours, peers = make(), peft.PeftModel.from_pretrained(make(), str(tmp_path / "peft")).eval()
        Weaver(ours).apply([load(tmp_path / "peft")])
        torch.testing.assert_close(output(ours), output(model), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(output(peers), output(model), atol=1e-4, rtol=1e-4)


def test_fused_experts_are_named() -> None:
    config = MixtralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=3,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    with pytest.warns(UserWarning, match="fused expert weights.*experts"):
        inject(model, 2)
    assert model(TOKENS).logits.shape[-1] == 40


def test_one_adapter_of_several_is_ejected() -> None:
    model = llama()
    inject(model, 2, targets=["q_proj"], name="one")
    inject(model, 2, targets=["q_proj", "v_proj"], name="two")
    eject(model, "two")
    assert all(list(layer.adapters) == ["one"] for layer in lora_layers(model).values())
    assert {name.rpartition(".")[2] for name in lora_layers(model)} == {"q_proj"}
    assert not collect(model, "one").problems
