"""PEFT folders with more than LoRA factors: biases, saved embeddings, and flags that contradict a layer."""

from __future__ import annotations

from pathlib import Path

import pytest

import inweave
from inweave.errors import FormatError
from inweave.formats.read import read
from tests.support import dotted_pair, random, write


class TestPeftFolders:
    """Directories written by PEFT with more than LoRA factors."""

    @pytest.fixture
    def libraries(self):  # type: ignore[no-untyped-def]
        pytest.importorskip("torch")
        return pytest.importorskip("peft"), pytest.importorskip("transformers")

    def llama(self, transformers):  # type: ignore[no-untyped-def]
        import torch

        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, tie_word_embeddings=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)

    def saved(self, libraries, folder: Path, **options):  # type: ignore[no-untyped-def]
        import torch
        from safetensors.torch import save_file

        peft, transformers = libraries
        base = self.llama(transformers)
        save_file({k: v.clone() for k, v in base.state_dict().items()}, folder / "base.safetensors")
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=3, **options))
        for name, parameter in model.named_parameters():
            if "lora_" in name or name.endswith("bias"):
                parameter.data = torch.randn_like(parameter) * 0.3
        model.save_pretrained(str(folder / "one"))
        return model

    def test_biases_survive_peft_to_peft(self, libraries, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        import torch

        peft, transformers = libraries
        torch.manual_seed(1)
        base = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=1, n_head=2)
        )
        from safetensors.torch import save_file

        save_file(
            {k: v.clone() for k, v in base.state_dict().items() if k != "lm_head.weight"}, tmp_path / "base.safetensors"
        )
        config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["c_attn"], bias="all", fan_in_fan_out=True)
        model = peft.get_peft_model(base, config)
        for name, parameter in model.named_parameters():
            if "lora_" in name or name.endswith("bias"):
                parameter.data = torch.randn_like(parameter)
        model.save_pretrained(str(tmp_path / "one"))
        inweave.convert(tmp_path / "one", tmp_path / "two", to="peft", base=tmp_path / "base.safetensors")
        one, two = inweave.load(tmp_path / "one").tensors, inweave.load(tmp_path / "two").tensors
        assert one.keys() == two.keys()
        assert all(one[key].same(two[key]) for key in one)
        assert any(key.endswith("base_layer.bias") for key in one)

    def test_adapted_embeddings_with_their_saved_weights(self, libraries, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        self.saved(libraries, tmp_path, target_modules=["q_proj", "embed_tokens", "lm_head"])
        verdict = inweave.check(tmp_path / "one", tmp_path / "base.safetensors")
        assert verdict.ok, verdict.as_dict()
        assert any("base_layer.weight" in warning for warning in verdict.report.warnings)
        inweave.convert(tmp_path / "one", tmp_path / "two", to="peft", base=tmp_path / "base.safetensors")
        one, two = inweave.load(tmp_path / "one").tensors, inweave.load(tmp_path / "two").tensors
        assert one.keys() == two.keys()
        assert all(one[key].same(two[key]) for key in one)

    def test_a_flag_that_contradicts_a_layer_is_settled_by_its_shape(self, tmp_path: Path) -> None:
        config = {"peft_type": "LORA", "lora_alpha": 4, "r": 4, "fan_in_fan_out": False}
        tensors = dotted_pair("base_model.model.attn.c_attn", 24, 8)
        base = write(
            tmp_path / "base.safetensors", {"attn.c_attn.weight": random(1, 8, 24), "head.weight": random(2, 5, 8)}
        )
        verdict = inweave.check(read(tensors, {}, config), base)
        assert verdict.ok
        assert any("fan_in_fan_out" in warning for warning in verdict.report.warnings)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq"])
def test_an_adapter_of_a_changed_base_is_refused(start: str) -> None:
    config = {"peft_type": "LORA", "lora_alpha": 4, "r": 4, "init_lora_weights": start}
    with pytest.raises(FormatError, match="changed base"):
        read(dotted_pair("base_model.model.proj", 8, 8), {}, config)
