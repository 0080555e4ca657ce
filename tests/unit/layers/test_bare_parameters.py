"""LoRA on bare parameters: the experts of Mixtral and Qwen3-MoE, and torch's MultiheadAttention; PEFT is the oracle."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("transformers")

import peft
import torch
import transformers
from torch import nn

import inweave
from inweave.errors import ConfigError, MergeStateError, TargetError
from inweave.models.quantization import quantize_layers
from inweave.ops.quantized import FORMATS, QuantizedLinear

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
         "vocab_size": 32, "max_position_embeddings": 32, "pad_token_id": 0}  # fmt: skip
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LIBRARY: Any = transformers  # its names are loaded when they are used
IDS = torch.arange(12).reshape(2, 6) % 31


def mixtral() -> Any:
    torch.manual_seed(0)
    config: Any = LIBRARY.MixtralConfig(**SIZES, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2)
    return LIBRARY.MixtralForCausalLM(config).eval()


def qwen() -> Any:
    torch.manual_seed(0)
    config: Any = LIBRARY.Qwen3MoeConfig(
        **SIZES, intermediate_size=24, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, head_dim=8
    )
    return LIBRARY.Qwen3MoeForCausalLM(config).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(IDS).logits
        return result


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.lin(self.attn(x, x, x, need_weights=False)[0])
        return result


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def randomized(model: Any, marker: str) -> Any:
    """Give every adapter parameter random values."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if marker in name:
                value.copy_(torch.randn(value.shape, generator=generator) * 0.2)
    return model


def peft_moe(model: Any, folder: Path, **options: Any) -> torch.Tensor:
    """Save a random PEFT adapter for a copy of the model, and return that model's output."""
    chosen = {"target_modules": [], "target_parameters": EXPERTS, "r": 3, "lora_alpha": 5, **options}
    tuned = randomized(peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**chosen)), "lora_")
    tuned.save_pretrained(folder)
    return logits(tuned)


def peft_attention(model: nn.Module, folder: Path, **options: Any) -> torch.Tensor:
    chosen = {"target_modules": ["attn", "lin"], "r": 3, "lora_alpha": 5, **options}
    tuned = randomized(peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**chosen)), "lora_").eval()
    tuned.save_pretrained(folder)
    with torch.no_grad():
        result: torch.Tensor = tuned(X)
    return result


OPTIONS: list[dict[str, Any]] = [
    {},
    {"target_modules": ["q_proj"]},
    {"target_parameters": ["gate_up_proj", "down_proj"]},
    {"target_parameters": ["mlp.experts.down_proj"]},
    {"rank_pattern": {"gate_up_proj": 2}, "alpha_pattern": {"experts.down_proj": 7}, "use_rslora": True},
    {"target_parameters": ["mlp.gate.weight", *EXPERTS]},
]


@pytest.mark.parametrize("build", [mixtral, qwen])
@pytest.mark.parametrize("options", OPTIONS, ids=["experts", "layers too", "short names", "one", "patterns", "router"])
def test_a_peft_folder_with_target_parameters_is_woven(build: Any, options: dict[str, Any], tmp_path: Path) -> None:
    model = build()
    expected, base = peft_moe(model, tmp_path, **options), logits(model)
    adapter = inweave.load(tmp_path)
    assert not adapter.problems and (expected - base).abs().max() > 1e-3
    weaver = inweave.Weaver(model)
    weaver.apply([(tmp_path, 1.0)])
    torch.testing.assert_close(logits(model), expected, atol=2e-5, rtol=1e-4)
    weaver.apply([])
    assert torch.equal(logits(model), base)


def test_a_peft_folder_of_a_multihead_attention_is_woven(tmp_path: Path) -> None:
    model = Attention().eval()
    for options in ({}, {"alpha_pattern": {"attn": 9}, "rank_pattern": {"attn": 2}}):
        expected = peft_attention(model, tmp_path, **options)
        weaver = inweave.Weaver(model)
        weaver.apply([(tmp_path, 1.0)])
        torch.testing.assert_close(model(X), expected, atol=1e-5, rtol=1e-4)
        weaver.apply([])


@pytest.mark.parametrize("options", [{}, {"rank_pattern": {"gate_up_proj": 2}, "alpha_pattern": {"down_proj": 7}}])
def test_a_rewritten_folder_is_the_same_for_peft(options: dict[str, Any], tmp_path: Path) -> None:
    model = qwen()
    expected = peft_moe(model, tmp_path / "theirs", target_modules=["q_proj"], **options)
    inweave.save(inweave.load(tmp_path / "theirs"), tmp_path / "ours", dialect="peft")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "ours")
    assert torch.equal(logits(loaded), expected)
    attention = Attention().eval()
    output = peft_attention(attention, tmp_path / "attention", alpha_pattern={"attn": 9})
    inweave.save(inweave.load(tmp_path / "attention"), tmp_path / "attention2", dialect="peft")
    with torch.no_grad():  # PEFT adds and subtracts in each forward pass, so its numbers drift
        again = peft.PeftModel.from_pretrained(copy.deepcopy(attention), tmp_path / "attention2")(X)
    torch.testing.assert_close(again, output, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("build", [mixtral, qwen])
def test_attached_experts_compute_as_in_peft(build: Any, tmp_path: Path) -> None:
    model = build()
    expected, base = peft_moe(model, tmp_path, target_modules=["q_proj"]), logits(model)
    inweave.attach(model, tmp_path)
    torch.testing.assert_close(logits(model), expected, atol=1e-6, rtol=1e-5)
    with inweave.disabled(model):
        assert torch.equal(logits(model), base)
    inweave.merge(model)
    torch.testing.assert_close(logits(model), expected, atol=2e-5, rtol=1e-4)
    inweave.unmerge(model)
    adapter = inweave.collect(model)
    inweave.save(adapter, tmp_path / "again", dialect="peft")
    loaded = peft.PeftModel.from_pretrained(build(), tmp_path / "again")
    assert torch.equal(logits(loaded), expected)
    inweave.eject(model)
    assert torch.equal(logits(model), base) and not any("adapters" in name for name in model.state_dict())


@pytest.mark.parametrize("build", [mixtral, qwen])
def test_injected_experts_are_trained_and_peft_loads_them(build: Any, tmp_path: Path) -> None:
    model = build()
    base, names = logits(model), set(model.state_dict())
    inweave.inject(model, 3, 5, ["q_proj"], target_parameters=EXPERTS)
    assert torch.equal(logits(model), base) and names <= set(model.state_dict())
    randomized(model, "adapters")
    model.train()
    model(IDS).logits.square().mean().backward()
    trained = [value for value in model.parameters() if value.requires_grad]
    assert len(trained) == 12 and all(value.grad is not None and value.grad.abs().sum() > 0 for value in trained)
    output = logits(model.eval())
    inweave.save(inweave.collect(model), tmp_path, dialect="peft")
    loaded = peft.PeftModel.from_pretrained(build(), tmp_path)
    torch.testing.assert_close(logits(loaded), output, atol=1e-6, rtol=1e-5)
    inweave.eject(model, merge=True)
    torch.testing.assert_close(logits(model), output, atol=2e-5, rtol=1e-4)


def test_an_attention_of_torch_takes_adapters_as_in_peft(tmp_path: Path) -> None:
    model = Attention().eval()
    with torch.no_grad():
        base = model(X)
        expected = peft_attention(model, tmp_path / "theirs", alpha_pattern={"attn": 9})
        inweave.attach(model, tmp_path / "theirs")
        torch.testing.assert_close(model(X), expected, atol=1e-6, rtol=1e-5)
        inweave.merge(model)
        torch.testing.assert_close(model(X), expected, atol=1e-6, rtol=1e-5)
        inweave.eject(model, keep_merged=True)
        assert type(model.attn) is nn.MultiheadAttention
        fresh = Attention().eval()
        inweave.inject(fresh, 3, 5, ["attn", "lin"])
        assert torch.equal(fresh(X), base)
        randomized(fresh, "adapters")
        output = fresh(X)
        assert (output - base).abs().max() > 1e-3
        inweave.save(inweave.collect(fresh), tmp_path / "ours", dialect="peft")
        loaded = peft.PeftModel.from_pretrained(Attention().eval(), tmp_path / "ours")
        torch.testing.assert_close(loaded(X), output, atol=1e-6, rtol=1e-5)
        inweave.eject(fresh)
        assert torch.equal(fresh(X), base)
    with torch.enable_grad():
        inweave.inject(fresh, 3, 5, ["attn"])
        randomized(fresh, "adapters")
        fresh(X).square().sum().backward()
    trained = [value for value in fresh.parameters() if value.requires_grad]
    assert len(trained) == 4 and all(value.grad is not None and value.grad.abs().sum() > 0 for value in trained)


def test_what_a_bare_parameter_cannot_take_is_refused_before_anything_changes() -> None:
    model = qwen()
    names = set(model.state_dict())
    for options, match in (
        ({"dora": True}, "plain LoRA only"),
        ({"dropout": 0.1}, "takes no dropout"),
        ({"network": "loha"}, "plain LoRA only"),
    ):
        with pytest.raises(ConfigError, match=match):
            inweave.inject(model, 2, 2.0, [], target_parameters=EXPERTS, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'experts\.gate_up' matches no parameter; the nearest are"):
        inweave.inject(model, 2, targets=[], target_parameters=["experts.gate_up"])
    with pytest.raises(TargetError, match="name a layer's weight by the layer"):
        inweave.inject(model, 2, targets=[], target_parameters=["q_proj.weight"])
    other = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2, kdim=4)})
    with pytest.raises(TargetError, match="different sizes"):
        inweave.inject(other, 2, targets=["attn"])
    assert set(model.state_dict()) == names


def test_two_adapters_switch_and_leave_one_by_one(tmp_path: Path) -> None:
    model = Attention().eval()
    with torch.no_grad():
        base = model(X)
        inweave.inject(model, 2, targets=["attn"], name="one")
        inweave.inject(model, 3, targets=["attn", "lin"], name="two")
        randomized(model, "adapters")
        both = model(X)
        inweave.activate(model, "one")
        one = model(X)
        copied = copy.deepcopy(model)
        assert torch.equal(copied(X), one) and not torch.equal(one, both)
        copied.attn.in_proj_weight.zero_()
        assert torch.equal(model(X), one)
        inweave.eject(model, "two")
        assert torch.equal(model(X), one) and type(model.lin) is nn.Linear
        inweave.eject(model, "one")
        assert torch.equal(model(X), base) and type(model.attn) is nn.MultiheadAttention


def test_the_fast_path_of_torch_does_not_skip_adapters() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)}).eval()
    with torch.no_grad():
        base = model["layer"](X)
        inweave.inject(model, 2, targets=["self_attn"])
        randomized(model, "adapters")
        changed = model["layer"](X)
        inweave.merge(model)
        torch.testing.assert_close(model["layer"](X), changed, atol=1e-5, rtol=1e-4)
        assert (changed - base).abs().max() > 1e-3
        inweave.eject(model, keep_merged=True)
        torch.testing.assert_close(model["layer"](X), changed, atol=1e-5, rtol=1e-4)


class Stacks(nn.Module):
    """Stacked experts of one shape, or those of two sizes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], is_transposed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_transposed = is_transposed
        self.leaves = list(shapes)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) * 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for leaf in self.leaves:
            weight = getattr(self, leaf)
            total = weight[0] + weight[1]
            x = torch.tanh(x @ (total if self.is_transposed else total.T))[..., :8]
        return x


class WithStacks(nn.Module):
    def __init__(self, shapes: dict[str, tuple[int, ...]], is_transposed: bool = False) -> None:
        super().__init__()
        self.experts = Stacks(shapes, is_transposed)
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.lin(self.experts(x))
        return result


@pytest.mark.parametrize("leaves", [["w1", "v1", "w2"], ["w3", "w1"], ["down_proj", "gate_up_proj"]], ids="-".join)
def test_nested_parameters_of_one_shape_are_told_apart_by_the_order_of_the_model(
    leaves: list[str], tmp_path: Path
) -> None:
    model = WithStacks(dict.fromkeys(leaves, (4, 8, 8)))
    names = [f"experts.{leaf}" for leaf in leaves]
    with torch.no_grad():
        inweave.inject(model, 2, 3, ["lin"], target_parameters=names[::-1])
        output = randomized(model, "adapters")(X)
        inweave.save(inweave.collect(model), tmp_path / "ours", dialect="peft")
        inweave.eject(model)
        inweave.save(inweave.load(tmp_path / "ours"), tmp_path / "again", dialect="peft")
        options = {"rank_pattern": {leaves[0]: 1}, "alpha_pattern": {leaves[-1]: 7}}
        theirs = peft_moe_of(model, tmp_path / "theirs", names, **options)
        for folder, expected in (("ours", output), ("again", output), ("theirs", theirs)):
            inweave.attach(model, tmp_path / folder)
            torch.testing.assert_close(model(X), expected, atol=1e-6, rtol=1e-5)
            inweave.eject(model)
            weaver = inweave.Weaver(model)
            weaver.apply([(tmp_path / folder, 1.0)])
            torch.testing.assert_close(model(X), expected, atol=1e-6, rtol=1e-5)
            weaver.apply([])
            loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / folder)
            torch.testing.assert_close(loaded(X), expected, atol=1e-6, rtol=1e-5)


def peft_moe_of(model: nn.Module, folder: Path, names: list[str], **options: Any) -> torch.Tensor:
    config = peft.LoraConfig(target_modules=["lin"], target_parameters=names, r=2, lora_alpha=5, **options)
    tuned = randomized(peft.get_peft_model(copy.deepcopy(model), config), "lora_")
    tuned.save_pretrained(folder)
    result: torch.Tensor = tuned(X)
    return result


@pytest.mark.parametrize("leaves", [["gate_up_proj", "down_proj"], ["down_proj"]], ids="-".join)
@pytest.mark.parametrize("is_transposed", [True, False])
def test_square_experts_are_read_as_their_module_stores_them(
    leaves: list[str], is_transposed: bool, tmp_path: Path
) -> None:
    model = WithStacks({"gate_up_proj": (4, 8, 16) if is_transposed else (4, 16, 8), "down_proj": (4, 8, 8)},
                       is_transposed)  # fmt: skip
    with torch.no_grad():
        output = peft_moe_of(model, tmp_path, [f"experts.{leaf}" for leaf in leaves])
        inweave.attach(model, tmp_path)
        torch.testing.assert_close(model(X), output, atol=1e-6, rtol=1e-5)
        inweave.eject(model)
        inweave.Weaver(model).apply([(tmp_path, 1.0)])
        torch.testing.assert_close(model(X), output, atol=1e-6, rtol=1e-5)


def test_a_merged_weight_is_not_quantized() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(64, 64)])})
    inweave.inject(model, 2, targets=["0"])
    before = randomized(model, "adapters")["blocks"][0].weight.detach().clone()
    inweave.merge(model)
    merged = model["blocks"][0].weight.detach().clone()
    with pytest.raises(MergeStateError, match="cannot quantize the weight while merged"):
        quantize_layers(model, "nf4", torch.device("cpu"))
    assert torch.equal(model["blocks"][0].weight, merged)
    inweave.unmerge(model)
    assert torch.equal(model["blocks"][0].weight, before)
    inweave.merge(model)
    FORMATS["nf4"].quantize(model["blocks"][0].base)
    with pytest.raises(MergeStateError, match="quantized while merged"):
        inweave.unmerge(model)
    inweave.eject(model, keep_merged=True)
    assert isinstance(model["blocks"][0], QuantizedLinear)


def test_a_second_adapter_is_attached_to_an_attention(tmp_path: Path) -> None:
    model = Attention().eval()
    peft_attention(model, tmp_path, alpha_pattern={"attn": 9})
    with torch.no_grad():
        inweave.attach(model, tmp_path, name="one")
        one = model(X)
        host = model.attn
        inweave.attach(model, tmp_path, name="two")
        assert model.attn is host and not torch.allclose(model(X), one)
        inweave.activate(model, "two")
        assert torch.equal(model(X), one)
        inweave.eject(model)
        assert type(model.attn) is nn.MultiheadAttention


def test_the_output_projection_of_an_attention_is_not_quantized() -> None:
    def model() -> Any:
        torch.manual_seed(0)
        return nn.ModuleList([nn.ModuleDict({"attn": nn.MultiheadAttention(128, 2), "lin": nn.Linear(128, 128)})])

    x = torch.ones(3, 1, 128)
    for injects in (True, False):
        adapted = model()
        if injects:
            inweave.inject(adapted, 2, targets=["attn"])
        expected = adapted[0]["attn"](x, x, x)[0]
        quantize_layers(adapted, "nf4", torch.device("cpu"))
        assert isinstance(adapted[0]["lin"], QuantizedLinear)
        assert torch.equal(adapted[0]["attn"](x, x, x)[0], expected)
    other = model()
    FORMATS["nf4"].quantize(other[0]["attn"].out_proj)
    with pytest.raises(TargetError, match="out_proj is quantized"):
        inweave.inject(other, 2, targets=["attn"])
    assert type(other[0]["attn"]) is nn.MultiheadAttention
