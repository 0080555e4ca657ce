"""Real networks of transformers, small and random: trained, saved for PEFT, loaded by PEFT, and back.

inject -> a few steps (the loss falls, the base keeps its bits) -> merged = unmerged
       -> a PEFT directory -> peft loads it and gives the same outputs -> peft saves it
       -> inject gives the same outputs again
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from inweave.exchange.convert import rewrite
from inweave.exchange.load import load
from inweave.formats.files import write_file
from inweave.layers import attach, collect, eject, inject, lora_layers, merge, model_index, unmerge
from tests.unit.layers.zoo import base_bits

peft = pytest.importorskip("peft")
hf = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = SMALL | SPECIAL | {"num_key_value_heads": 2, "max_position_embeddings": 32}
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
IDS = torch.arange(12).reshape(2, 6) % 48
PIXELS = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Family:
    make: Callable[[], nn.Module]
    targets: list[str] | str
    modules: int
    run: Callable[[nn.Module], torch.Tensor] = lambda model: model(input_ids=IDS).logits
    tied: bool = False


def gpt2(kind: str) -> dict[str, object]:
    return {"vocab_size": 48, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, **SPECIAL, "model_type": kind}


FAMILIES = {
    "llama": Family(
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)), ["q_proj", "v_proj", "down_proj", "embed_tokens"], 7
    ),
    "mistral": Family(lambda: hf.MistralForCausalLM(hf.MistralConfig(**LLAMA)), "all-linear", 14),
    "qwen3": Family(lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**LLAMA, head_dim=8)), "all-linear", 14),
    "stablelm": Family(lambda: hf.StableLmForCausalLM(hf.StableLmConfig(**LLAMA)), "all-linear", 14),
    "falcon": Family(
        lambda: hf.FalconForCausalLM(
            hf.FalconConfig(vocab_size=48, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **SPECIAL)
        ),
        ["query_key_value", "dense"], 4,
    ),
    "mpt": Family(
        lambda: hf.MptForCausalLM(hf.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=48, max_seq_len=32)),
        "all-linear", 8,
    ),
    "gpt_bigcode": Family(
        lambda: hf.GPTBigCodeForCausalLM(hf.GPTBigCodeConfig(**gpt2("gpt_bigcode"))), ["c_attn", "c_proj"], 6
    ),
    "gpt2": Family(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2("gpt2"))), ["c_attn", "c_proj", "wpe"], 7),
    "bert": Family(
        lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL)), ["query", "value", "word_embeddings"], 5, tied=True
    ),
    "t5": Family(
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=48, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4)
        ),
        ["q", "v", "wo"], 16,
        lambda model: model(input_ids=IDS, decoder_input_ids=IDS).logits,
    ),
    "dinov2": Family(
        lambda: hf.Dinov2Model(hf.Dinov2Config(**VISION)), ["q_proj", "v_proj", "projection", "fc1"], 7,
        lambda model: model(pixel_values=PIXELS).last_hidden_state,
    ),
    "resnet": Family(
        lambda: hf.ResNetModel(
            hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
        ),
        ["convolution"], 6,
        lambda model: model(pixel_values=PIXELS).last_hidden_state,
    ),
    "blip": Family(
        lambda: hf.BlipForConditionalGeneration(
            hf.BlipConfig(
                text_config=SMALL | SPECIAL | {"projection_dim": 16, "encoder_hidden_size": 32, "sep_token_id": 3},
                vision_config=VISION | {"intermediate_size": 40}, projection_dim=16,
            )
        ),
        ["qkv", "query", "value"], 10,
        lambda model: model(input_ids=IDS, pixel_values=PIXELS).logits,
    ),
}  # fmt: skip


def train(model: nn.Module, run: Callable[[nn.Module], torch.Tensor], target: torch.Tensor) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.002)
    losses = []
    for _ in range(8):
        loss = (run(model) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_from_injection_to_peft_and_back(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    torch.manual_seed(0)
    base = family.make().eval()
    model = copy.deepcopy(base)
    modules = dict(model.named_modules())
    inject(model, 3, 5.0, family.targets, allow_tied=family.tied)
    assert len(lora_layers(model)) == family.modules
    before = base_bits(model)
    with torch.no_grad():
        start = family.run(base)
        target = start + torch.randn(start.shape, generator=torch.Generator().manual_seed(1)) * start.std()
    losses = train(model, family.run, target)
    assert losses[-1] < losses[0]
    assert base_bits(model) == before

    with torch.no_grad():
        trained = family.run(model)
        room = 1e-5 * float(trained.abs().max())
        assert (trained - start).abs().max() > 1000 * room
        merge(model)
        assert (family.run(model) - trained).abs().max() <= room
        unmerge(model)
        assert torch.equal(family.run(model), trained)
        assert base_bits(model) == before

        output = rewrite(collect(model), "peft", model_index(model))
        assert not output.lost
        write_file(tmp_path / "adapter_model.safetensors", output.tensors, output.metadata)
        (tmp_path / "adapter_config.json").write_text(json.dumps(output.config))
        peer = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path)).eval()
        assert (family.run(peer) - trained).abs().max() <= room
        peer.save_pretrained(str(tmp_path / "theirs"))
        again = attach(copy.deepcopy(base), load(tmp_path / "theirs"), allow_tied=family.tied)
        assert len(lora_layers(again)) == family.modules
        assert torch.equal(family.run(again), trained)

    eject(model)
    assert dict(model.named_modules()) == modules
    with torch.no_grad():
        assert torch.equal(family.run(model), start)


def test_gpt2_is_recognized_without_importing_transformers() -> None:
    """Recognized by structure: a subprocess with only the class's text has no transformers loaded."""
    import subprocess
    import sys

    program = (
        "import sys, torch\n"
        "from torch import nn\n"
        "class Conv1D(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.nf = 3\n"
        "        self.weight = nn.Parameter(torch.randn(4, 3))\n"
        "    def forward(self, x): return x @ self.weight\n"
        "from inweave.layers import inject, lora_layers\n"
        "model = inject(nn.ModuleDict({'c_attn': Conv1D()}), 2)\n"
        "assert list(lora_layers(model)) == ['c_attn']\n"
        "heavy = {'transformers', 'peft', 'diffusers', 'numpy.testing'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
