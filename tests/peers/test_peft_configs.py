"""PEFT's own range of configurations over tiny models: what it saves is read, merged and attached to the same numbers.

A field that changes the mathematics is done right or refused by name; nothing is applied as if it were plain LoRA.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

peft = pytest.importorskip("peft")

from torch import nn  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

import inweave  # noqa: E402
from inweave.errors import FormatError, InweaveError  # noqa: E402
from inweave.layers import attach, merge  # noqa: E402
from tests.support import stopwatch  # noqa: E402

MARKS = (
    "lora_", "hada_", "lokr_", "oft_", "boft_", "ia3_", "vera_lambda", "modules_to_save", "trainable_tokens_delta",
    ".bias",
)  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT's, about embeddings and tied weights
        yield


class Mixed(nn.Module):
    """One layer of each kind that PEFT adapts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.line = nn.Conv1d(8, 6, 3, padding=1)
        self.plane = nn.Conv2d(6, 6, 3, padding=1, groups=1)
        self.point = nn.Conv2d(6, 4, 1)
        self.room = nn.Conv3d(4, 4, 2)
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(self.table(tokens))))
        x = self.line(x.transpose(1, 2))
        x = self.point(self.plane(x[..., None].expand(*x.shape, 4)))
        return self.room(x[..., None].expand(*x.shape, 3)).flatten(1)


def mixed() -> nn.Module:
    torch.manual_seed(1)
    return Mixed().eval()


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False, **options,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def opt() -> nn.Module:
    torch.manual_seed(3)
    config = OPTConfig(
        vocab_size=40, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, word_embed_proj_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    return OPTForCausalLM(config).eval()


def gpt2() -> nn.Module:
    torch.manual_seed(4)
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2)).eval()


def classifier() -> nn.Module:
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, num_labels=3
    )
    return BertForSequenceClassification(config).eval()


TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 1, 2]])


def output(model: nn.Module) -> torch.Tensor:
    result = model(TOKENS)
    return (result if isinstance(result, torch.Tensor) else result.logits).detach()


def fill(model: nn.Module, seed: int = 6) -> None:
    """Numbers everywhere, so that nothing is proved on zeros."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and any(mark in name for mark in MARKS):
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)


LORA = peft.LoraConfig
QV = ["q_proj", "v_proj"]
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "linear": (mixed, lambda: LORA(r=3, lora_alpha=5, target_modules=["first", "second"])),
    "conv1d": (mixed, lambda: LORA(r=3, lora_alpha=5, target_modules=["line"])),
    "conv2d": (mixed, lambda: LORA(r=3, lora_alpha=5, target_modules=["plane", "point"])),
    "conv3d": (mixed, lambda: LORA(r=3, lora_alpha=5, target_modules=["room"])),
    "embedding": (mixed, lambda: LORA(r=3, lora_alpha=5, target_modules=["table"])),
    "every kind": (mixed, lambda: LORA(r=2, target_modules=["table", "line", "plane", "room", "first"])),
    "dora linear": (mixed, lambda: LORA(r=3, use_dora=True, target_modules=["first", "second"])),
    "dora conv": (mixed, lambda: LORA(r=3, use_dora=True, target_modules=["plane", "point", "line", "room"])),
    "dora embedding": (mixed, lambda: LORA(r=3, use_dora=True, target_modules=["table"])),
    "lora_bias": (mixed, lambda: LORA(r=3, lora_alpha=7, lora_bias=True, target_modules=["second", "plane"])),
    "bias all": (mixed, lambda: LORA(r=3, bias="all", target_modules=["second"])),
    "bias lora_only": (mixed, lambda: LORA(r=3, bias="lora_only", target_modules=["second", "line"])),
    "rslora": (llama, lambda: LORA(r=4, lora_alpha=3, use_rslora=True, target_modules=QV)),
    "rslora patterns": (llama, lambda: LORA(
        r=4, use_rslora=True, target_modules=QV, rank_pattern={"q_proj": 2}, alpha_pattern={r"layers\.1\..*": 9})),
    "patterns": (llama, lambda: LORA(
        r=4, target_modules=[*QV, "up_proj"], rank_pattern={"^model.layers.1.self_attn.q_proj": 2, "up_proj": 3},
        alpha_pattern={"model.layers.0.*": 1, "(q|v)_proj": 11})),
    "lookahead": (llama, lambda: LORA(r=2, target_modules=r"model\.layers\.(?!1\b)\d+\..*_proj")),
    "layers": (llama, lambda: LORA(r=2, target_modules=QV, layers_to_transform=[0, 2])),
    "excluded": (llama, lambda: LORA(r=2, target_modules="all-linear", exclude_modules=r".*layers\.0\..*")),
    "all-linear": (llama, lambda: LORA(r=2, target_modules="all-linear")),
    "gaussian": (llama, lambda: LORA(r=2, init_lora_weights="gaussian", target_modules=QV)),
    "orthogonal": (llama, lambda: LORA(r=2, init_lora_weights="orthogonal", target_modules=QV)),
    "eva": (llama, lambda: LORA(r=2, init_lora_weights="eva", eva_config=peft.EvaConfig(), target_modules=QV)),
    "mica": (llama, lambda: LORA(r=2, init_lora_weights="mica", target_modules=QV)),
    "saved": (llama, lambda: LORA(r=2, target_modules=QV, modules_to_save=["lm_head", "input_layernorm"])),
    "tokens": (llama, lambda: LORA(r=2, target_modules=QV, trainable_token_indices=[2, 5, 9])),
    "named tokens": (llama, lambda: LORA(
        r=2, target_modules=QV, trainable_token_indices={"embed_tokens": [3], "lm_head": [1, 4]})),
    "opt": (opt, lambda: LORA(r=2, lora_alpha=3, bias="all", target_modules=["q_proj", "fc1"])),
    "gpt2": (gpt2, lambda: LORA(r=2, lora_alpha=3, fan_in_fan_out=True, target_modules=["c_attn", "c_fc"])),
    "gpt2 all-linear": (gpt2, lambda: LORA(r=2, fan_in_fan_out=True, target_modules="all-linear")),
    "gpt2 dora": (gpt2, lambda: LORA(r=2, fan_in_fan_out=True, use_dora=True, target_modules=["c_attn", "c_fc"])),
    "classifier": (classifier, lambda: LORA(r=2, task_type="SEQ_CLS", target_modules=["query"])),
    "loha": (llama, lambda: peft.LoHaConfig(r=2, alpha=3, target_modules=QV, rank_pattern={"q_proj": 3})),
    "loha conv": (mixed, lambda: peft.LoHaConfig(r=2, alpha=3, target_modules=["plane", "first"])),
    "loha effective": (mixed, lambda: peft.LoHaConfig(r=2, use_effective_conv2d=True, target_modules=["plane"])),
    "lokr": (llama, lambda: peft.LoKrConfig(r=2, alpha=3, target_modules=QV, alpha_pattern={"q_proj": 7})),
    "lokr both": (llama, lambda: peft.LoKrConfig(
        r=1, decompose_both=True, decompose_factor=4, target_modules=QV)),
    "lokr conv": (mixed, lambda: peft.LoKrConfig(r=2, use_effective_conv2d=True, target_modules=["plane", "first"])),
    "oft": (llama, lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=QV)),
    "oft exact": (llama, lambda: peft.OFTConfig(r=2, oft_block_size=0, use_cayley_neumann=False, target_modules=QV)),
    "oft shared": (llama, lambda: peft.OFTConfig(r=0, oft_block_size=4, block_share=True, target_modules=QV)),
    "boft": (llama, lambda: peft.BOFTConfig(boft_block_size=4, boft_n_butterfly_factor=2, target_modules=QV)),
    "ia3": (llama, lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "ia3 regex": (llama, lambda: peft.IA3Config(
        target_modules=r".*\.(k|down)_proj", feedforward_modules=r".*\.down_proj")),
    "vera": (llama, lambda: peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"])),
}  # fmt: skip


def saved(case: str, folder: Path) -> tuple[Path, torch.Tensor]:
    make, config = CASES[case]
    model = peft.get_peft_model(make(), config()).eval()
    fill(model)
    model.save_pretrained(str(folder))
    return folder, output(peft.PeftModel.from_pretrained(make(), str(folder)).eval())  # PEFT sorts pattern tables


def close(ours: torch.Tensor, theirs: torch.Tensor, base: torch.Tensor) -> None:
    assert not torch.allclose(theirs, base, atol=1e-3)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("case", CASES)
def test_what_peft_saves_is_woven_to_its_own_output(case: str, tmp_path: Path) -> None:
    folder, expected = saved(case, tmp_path / "peft")
    model = CASES[case][0]()
    base = output(model)
    adapter = inweave.load(folder)
    assert not adapter.problems
    inweave.Weaver(model).apply([adapter])
    close(output(model), expected, base)


#: targets that are not layers: they are merged instead, with a message
MERGED_ONLY = ("oft", "boft", "ia3", "vera", "tokens", "bias", "saved", "classifier", "opt")


@pytest.mark.parametrize("case", [case for case in CASES if not any(word in case for word in MERGED_ONLY)])
def test_what_peft_saves_is_attached_to_its_own_output(case: str, tmp_path: Path) -> None:
    folder, expected = saved(case, tmp_path / "peft")
    model = CASES[case][0]()
    base = output(model)
    attach(model, folder)
    close(output(model), expected, base)
    merge(model)
    close(output(model), expected, base)


WRITABLE = [case for case in CASES if not case.startswith(("lokr", "oft", "boft", "ia3", "vera"))]


@pytest.mark.parametrize("case", WRITABLE)
def test_what_is_read_from_peft_and_written_again_gives_peft_the_same_output(case: str, tmp_path: Path) -> None:
    folder, expected = saved(case, tmp_path / "peft")
    make = CASES[case][0]
    adapter = inweave.load(folder)
    inweave.save(replace(adapter, config=None), tmp_path / "again", dialect="peft", base=inweave.index_of(make()))
    model = peft.PeftModel.from_pretrained(make(), str(tmp_path / "again")).eval()
    close(output(model), expected, output(make()))


REFUSED: dict[str, tuple[Any, str]] = {
    "alora_invocation_tokens": ([1, 2], "activated LoRA"),
    "arrow_config": ({"top_k": 2}, "Arrow"),
    "use_qalora": (True, "QA-LoRA"),
    "use_bdlora": ({"nblocks": 2, "target_modules_bd_a": ["q_proj"]}, "BD-LoRA"),
    "kasa_config": ({"beta": 1e-4}, "KaSA"),
    "monteclora_config": ({"num_samples": 8}, "MonteCLoRA"),
    "ensure_weight_tying": (True, "ties"),
    "layer_replication": ([[0, 2], [1, 3]], "layers"),
    "megatron_config": ({"tensor_model_parallel_size": 2}, "one process's part"),
    "init_lora_weights": ("lora_ga", "changed base"),
    "use_rslora": ("yes", "true or false"),
    "use_dora": (True, "no magnitude"),
    "rank_pattern": ({"q_proj": 2.5}, "whole numbers"),
}
STARTS = ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "PiSSA", "something_new"]


def edited(folder: Path, **fields: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_lora_is_refused_by_name(name: str, tmp_path: Path) -> None:
    folder, _ = saved("linear", tmp_path / "peft")
    value, message = REFUSED[name]
    with pytest.raises(InweaveError, match=f"{name}.*{message}|{message}.*{name}|use_dora.*no magnitude"):
        inweave.Weaver(mixed()).apply([inweave.load(edited(folder, **{name: value}))])


@pytest.mark.parametrize("start", STARTS)
def test_a_start_that_changes_the_base_is_refused(start: str, tmp_path: Path) -> None:
    folder, _ = saved("linear", tmp_path / "peft")
    with pytest.raises(FormatError, match="init_lora_weights"):
        inweave.load(edited(folder, init_lora_weights=start))


def test_a_real_pissa_adapter_is_refused_until_peft_has_converted_it(tmp_path: Path) -> None:
    config = LORA(r=2, init_lora_weights="pissa", target_modules=QV)
    model = peft.get_peft_model(llama(), config).eval()
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(str(tmp_path / "start"))
    model.peft_config["default"].init_lora_weights = "pissa"
    fill(model)
    expected = output(model)
    model.save_pretrained(str(tmp_path / "plain"))
    with pytest.raises(FormatError, match="pissa"):
        inweave.load(tmp_path / "plain")
    model.save_pretrained(str(tmp_path / "converted"), path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    ours = llama()
    inweave.Weaver(ours).apply([inweave.load(tmp_path / "converted")])
    close(output(ours), expected, output(llama()))


def test_a_field_of_the_future_is_named_in_a_warning(tmp_path: Path) -> None:
    folder, _ = saved("linear", tmp_path / "peft")
    adapter = inweave.load(edited(folder, use_tomorrow=True, tomorrow_config=None, tomorrow_list=[]))
    assert [warning for warning in adapter.warnings if "use_tomorrow" in warning]
    assert not [warning for warning in adapter.warnings if "tomorrow_" in warning]


def test_every_field_of_the_installed_peft_is_known() -> None:
    from inweave.formats.peft_fields import _KNOWN, _REFUSED

    configs = ("LoraConfig", "LoHaConfig", "LoKrConfig", "OFTConfig", "BOFTConfig", "IA3Config", "VeraConfig")
    names = {field.name for config in configs for field in fields(getattr(peft, config))}
    assert names - _KNOWN - _REFUSED.keys() == {"megatron_config"}


def test_a_saved_module_that_the_file_lacks_is_named(tmp_path: Path) -> None:
    folder, _ = saved("linear", tmp_path / "peft")
    adapter = inweave.load(edited(folder, modules_to_save=["score"], trainable_token_indices=[1]))
    assert any("modules_to_save lists score" in warning for warning in adapter.warnings)
    assert any("trainable_token_indices" in warning for warning in adapter.warnings)


def test_several_adapters_of_one_model_are_kept_apart(tmp_path: Path) -> None:
    model = peft.get_peft_model(llama(), LORA(r=2, target_modules=QV), adapter_name="one")
    model.add_adapter("two", LORA(r=3, lora_alpha=7, target_modules=["o_proj", "q_proj"]))
    fill(model)
    for name, seed in (("one", 7), ("two", 8)):
        model.set_adapter(name)
        fill(model, seed)
    model.eval().save_pretrained(str(tmp_path))
    for name in ("one", "two"):
        model.set_adapter(name)
        ours = attach(llama(), tmp_path / name, name=name)
        close(output(ours), output(model), output(llama()))
    model.base_model.set_adapter(["one", "two"])
    both = attach(attach(llama(), tmp_path / "one", name="one"), tmp_path / "two", name="two")
    close(output(both), output(model), output(llama()))


@pytest.mark.parametrize("pattern", ["(?=(a+)+b)", ".*" * 12 + "X", "(.*){9}X", "(x+x+)+y"])
def test_no_pattern_of_a_configuration_takes_long(pattern: str, tmp_path: Path) -> None:
    folder, _ = saved("linear", tmp_path / "peft")
    with stopwatch(time.thread_time) as cost:
        inweave.load(edited(folder, alpha_pattern={pattern: 3, "x" * 40: 2}, rank_pattern={pattern: 2}))
    assert cost.seconds < 1


@pytest.mark.parametrize("pattern", ["(?>a+)b", "(a)?(?(1)b|c)", r"(a)\1", "("])
def test_a_pattern_that_cannot_be_used_is_refused_by_name(pattern: str, tmp_path: Path) -> None:
    folder, _ = saved("linear", tmp_path / "peft")
    with pytest.raises(FormatError, match="alpha_pattern"):
        inweave.load(edited(folder, alpha_pattern={pattern: 3}))


def test_factors_of_bare_parameters_are_read(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=3,
    )  # fmt: skip
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(MixtralForCausalLM(config), LORA(r=2, target_modules=QV, target_parameters=names))
    model.save_pretrained(str(tmp_path / "peft"))
    adapter = inweave.load(tmp_path / "peft")
    owners = [entry.ref.name.rpartition(".")[2] for entry in adapter if "experts" in entry.ref.name]
    assert not adapter.problems and sorted(owners) == ["down_proj", "gate_up_proj"]
