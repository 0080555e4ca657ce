"""Which modules are selected, what is refused with which message, and where the initial values come from."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
from torch import nn

import inweave
from inweave.errors import ConfigError, InweaveError, TargetError
from inweave.layers import collect, eject, inject, lora_layers, merge, unmerge
from tests.unit.layers.zoo import KINDS, Conv1D, base_bits, fill, injected, layer_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k = nn.Linear(6, 6), nn.Linear(6, 4)
        self.to_out = nn.ModuleList([nn.Linear(6, 6), nn.Dropout(0.1)])
        self.norm = nn.LayerNorm(6)
        self.c_fc = Conv1D(6, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 9)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


TARGETS = {
    "suffix": (["to_q"], {"blocks.0.to_q", "blocks.1.to_q"}),
    "longer suffix": (["0.to_q", "to_out.0"], {"blocks.0.to_q", "blocks.0.to_out.0", "blocks.1.to_out.0"}),
    "whole name": (["head", "blocks.1.to_k"], {"head", "blocks.1.to_k"}),
    "regex": (r".*\.1\.to_[qk]", {"blocks.1.to_q", "blocks.1.to_k"}),
    "compiled": (re.compile(r"blocks\.\d\.to_k"), {"blocks.0.to_k", "blocks.1.to_k"}),
    "mixed": (["embed", re.compile(r".*0\.to_k")], {"embed", "blocks.0.to_k"}),
    "plain string": ("to_k", {"blocks.0.to_k", "blocks.1.to_k"}),
    "all-linear": (
        "all-linear",
        {f"blocks.{i}.{name}" for i in (0, 1) for name in ("to_q", "to_k", "to_out.0", "c_fc")},
    ),
}


@pytest.mark.parametrize("case", TARGETS)
def test_targets(case: str) -> None:
    targets, expected = TARGETS[case]
    model = inject(Net(), 2, targets=targets)  # type: ignore[arg-type]
    assert set(lora_layers(model)) == expected
    assert {p for p in model.parameters() if p.requires_grad} == {
        p for layer in lora_layers(model).values() for p in layer.adapters.parameters()
    }


@pytest.mark.parametrize("entry", [r".*to_q", "to_.", "o_q", "blocks"])
def test_an_entry_of_a_list_is_whole_segments_and_no_regex(entry: str) -> None:
    with pytest.raises((ConfigError, TargetError), match=r"matches no module|not a layer that takes LoRA"):
        inject(Net(), 2, targets=[entry])


def refused(model: nn.Module, **options: object) -> InweaveError:
    """The error, after a check that the model is unchanged."""
    before = {name: id(module) for name, module in model.named_modules()}
    flags = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises((ConfigError, TargetError)) as caught:
        injected(model, **options)  # type: ignore[arg-type]
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    return caught.value


def test_what_matches_nothing_names_the_nearest() -> None:
    error = refused(Net(), targets=["to_q", "to_kk", "attn.to_v"])
    assert isinstance(error, ConfigError)
    assert len(error.problems) == 2
    assert "'to_kk' matches no module; the nearest are to_k" in str(error.problems[0])
    assert "attn.to_v" in str(error.problems[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": []}, "empty"),
        ({"targets": "blocks.(0"}, "not a regular expression"),
        ({"rank": 0}, "rank must be"),
        ({"rank": 2.5}, "rank must be"),
        ({"rank": True}, "rank must be"),
        ({"alpha": 0.0}, "alpha must be"),
        ({"alpha": math.nan}, "alpha must be"),
        ({"dropout": 1.0}, "dropout must be"),
        ({"dropout": -0.1}, "dropout must be"),
        ({"rslora": True}, "give alpha"),
        ({"dtype": torch.int8}, "dtype must be"),
        ({"name": "a.b"}, "cannot be an adapter's name"),
        ({"name": ""}, "cannot be an adapter's name"),
        ({"name": "keys"}, "cannot be an adapter's name"),
        ({"rank_pattern": {"to_v": 4}}, "rank_pattern 'to_v' matches no module"),
        ({"alpha_pattern": {"to_(q": 4}}, "not a regular expression"),
        ({"rank_pattern": {"to_q": 0}}, "rank must be"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    error = refused(Net(), **options)
    assert isinstance(error, ConfigError)
    assert message in str(error)


def test_all_problems_are_reported_at_once() -> None:
    error = refused(Net(), rank=-1, alpha=math.inf, dropout=2.0, targets=["nothing"])
    assert isinstance(error, ConfigError)
    assert len(error.problems) == 4


def test_unsupported_kinds_are_all_named() -> None:
    error = refused(Net(), targets=["norm", "to_q"])
    assert isinstance(error, TargetError)
    assert str(error).count("LayerNorm is not a layer that takes LoRA") == 2
    assert str(error).count("inweave.register_layer(LayerNorm, kind=...)") == 2
    assert "blocks.0.norm" in str(error) and "blocks.1.norm" in str(error)


def test_a_model_that_is_one_layer_has_no_place_to_put_lora() -> None:
    error = refused(nn.Linear(3, 3))
    assert "no Linear layer in this model" in str(error)


def test_the_same_name_twice() -> None:
    model = inject(Net(), 2, targets=["to_q"])
    with pytest.raises(ConfigError, match=r"'default' is already injected \(on blocks\.0\.to_q\)"):
        inject(model, 2, targets=["to_k"])
    assert set(lora_layers(model)) == {"blocks.0.to_q", "blocks.1.to_q"}
    inject(model, 3, targets=["to_q", "to_k"], name="other")
    assert [list(layer.adapters) for layer in lora_layers(model).values()] == [
        ["default", "other"], ["other"], ["default", "other"], ["other"],
    ]  # fmt: skip


def test_patterns_give_ranks_and_alphas_and_the_first_match_wins() -> None:
    model = injected(
        Net(), 2, 4.0, ["to_q", "to_k", "to_out.0"],
        rank_pattern={r"blocks\.0\..*": 3, "to_q": 5}, alpha_pattern={"to_k": 1.0, r"1\.to_k": 9.0},
    )  # fmt: skip
    pairs = {name: layer.branch("default") for name, layer in lora_layers(model).items()}
    assert {name: pair.rank for name, pair in pairs.items()} == {
        "blocks.0.to_q": 3, "blocks.0.to_k": 3, "blocks.0.to_out.0": 3,
        "blocks.1.to_q": 5, "blocks.1.to_k": 2, "blocks.1.to_out.0": 2,
    }  # fmt: skip
    assert pairs["blocks.1.to_k"].alpha == 1.0 and pairs["blocks.1.to_k"].scale == 0.5
    assert pairs["blocks.1.to_q"].alpha == 4.0 and pairs["blocks.1.to_q"].scale == 0.8


def test_scales() -> None:
    def scale(**options: object) -> float:
        return layer_of(injected(KINDS["linear"].module(), targets=["layer"], **options)).branch("default").scale  # type: ignore[arg-type]

    assert scale(rank=4) == 1.0
    assert scale(rank=4, alpha=2.0) == 0.5
    assert scale(rank=4, alpha=2.0, rslora=True) == 1.0
    assert scale(rank=16, alpha=2.0, rslora=True) == 0.5


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.embed(x))
        return output


@pytest.mark.parametrize("view", [False, True])
def test_tied_weights_are_refused_unless_allowed(view: bool) -> None:
    model = Tied()
    if view:
        model.head.weight = nn.Parameter(model.embed.weight.detach()[:])  # the same storage, another Parameter
    error = refused(model, targets=["embed"])
    assert isinstance(error, TargetError)
    assert "embed: its weight is also that of head" in str(error)


@pytest.mark.parametrize("targets", [["embed"], ["head"], ["embed", "head"]])
def test_an_allowed_tie_is_undone_by_a_merge_and_tied_again(targets: list[str]) -> None:
    torch.manual_seed(0)
    model, x = Tied(), torch.arange(9)
    shared, before = model.embed.weight, model.embed.weight.detach().clone()
    inject(model, 2, 3.0, targets, allow_tied=True)
    fill(model)
    unmerged = model(x)
    merge(model)
    torch.testing.assert_close(model(x), unmerged)
    unmerge(model)
    assert model.embed.weight is shared and model.head.weight is shared
    assert torch.equal(shared, before)
    eject(model)
    assert model.head.weight is model.embed.weight is shared


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(4, 4)
        self.inner = nn.ModuleDict({"back": self.front})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner["back"](self.front(x).relu())
        return output


@pytest.mark.parametrize("targets", [["front"], ["back"], "all-linear"])
def test_a_shared_module_is_adapted_once_and_both_names_are_reported(targets: list[str] | str) -> None:
    model, x = Shared(), torch.ones(2, 4)
    layer = model.front
    inject(model, 2, 3.0, targets)
    fill(model)
    assert model.front is model.inner["back"]
    assert lora_layers(model)["front"].names == ("front", "inner.back")
    assert [entry.ref.name for entry in collect(model)] == ["front"]
    unmerged = model(x)
    merge(model)
    torch.testing.assert_close(model(x), unmerged)
    unmerge(model)
    eject(model)
    assert model.front is layer and model.inner["back"] is layer


def test_initial_values() -> None:
    """down: kaiming uniform with a = sqrt(5), so within 1 / sqrt(fan in) and filling that range; up: zero."""
    model = nn.ModuleDict({"linear": nn.Linear(400, 30), "conv": nn.Conv2d(16, 8, 5), "embed": nn.Embedding(50, 400)})
    inject(model, 64, targets=["linear", "conv", "embed"])
    pairs = {name: layer.branch("default") for name, layer in lora_layers(model).items()}
    for name in ("linear", "conv"):
        bound = 1 / math.sqrt(400)
        down = pairs[name].down.detach()
        assert 0.98 * bound < down.abs().max() <= bound
        assert abs(float(down.std()) / (bound / math.sqrt(3)) - 1) < 0.02
        assert not pairs[name].up.any()
    assert not pairs["embed"].down.any()
    assert abs(float(pairs["embed"].up.detach().std()) - 1) < 0.02


def factors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if ".adapters." in name}


def test_a_seed_determines_all_values() -> None:
    torch.manual_seed(1)
    one = factors(injected(Net(), 3, targets="all-linear", seed=7))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    two_model = Net()
    torch.set_rng_state(state)
    two = factors(injected(two_model, 3, targets="all-linear", seed=7))
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is neither used nor moved
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    other = factors(injected(Net(), 3, targets="all-linear", seed=8))
    assert not torch.equal(one["blocks.0.to_q.adapters.default.down"], other["blocks.0.to_q.adapters.default.down"])
    part = factors(injected(Net(), 3, targets=["blocks.1.to_q"], seed=7))  # neither order nor company matters
    name = "blocks.1.to_q.adapters.default.down"
    assert torch.equal(part[name], one[name])
    assert not torch.equal(one[name], one["blocks.0.to_q.adapters.default.down"])


@pytest.mark.parametrize(
    ("base", "requested", "expected"),
    [
        (torch.float32, None, torch.float32),
        (torch.bfloat16, None, torch.float32),
        (torch.float16, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16, torch.float16),
    ],
)
def test_the_dtype_of_new_parameters(base: torch.dtype, requested: torch.dtype | None, expected: torch.dtype) -> None:
    model = injected(KINDS["linear"].module(dtype=base), 2, 1.0, ["layer"], dtype=requested, dora=True)
    assert {parameter.dtype for parameter in layer_of(model).adapters.parameters()} == {expected}
    assert model["layer"](KINDS["linear"].input(dtype=base)).dtype == base


def test_meta_models_take_lora_but_no_dora() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"layer": nn.Linear(4, 3)})
    error = refused(model, targets=["layer"], dora=True)
    assert "on the meta device" in str(error)
    inject(model, 2, targets=["layer"])
    pair = layer_of(model).branch("default")
    assert pair.down.device.type == "cpu" and pair.down.any()


def test_eject_restores_what_was_frozen_before() -> None:
    model = Net()
    model.embed.weight.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    names, weights = list(model.state_dict()), base_bits(model)
    modules = dict(model.named_modules())
    inject(model, 2, targets="all-linear")
    inject(model, 2, targets=["embed"], name="other")
    eject(model)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    assert list(model.state_dict()) == names and base_bits(model) == weights
    assert all(dict(model.named_modules())[name] is module for name, module in modules.items())
    with pytest.raises(ConfigError, match="no LoRA layers"):
        eject(model)


def test_a_part_of_a_model_can_be_injected_and_ejected_from_above() -> None:
    model = Net()
    inject(model.blocks[1], 2, targets="all-linear")
    assert model.embed.weight.requires_grad and not model.blocks[1].norm.weight.requires_grad
    eject(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_freezing_can_be_left_out() -> None:
    model = inject(Net(), 2, targets=["to_q"], freeze=False)
    assert model.blocks[0].to_q.weight.requires_grad and model.embed.weight.requires_grad


def test_fields_of_the_spec_are_keyword_arguments_too() -> None:
    by_spec = nn.Sequential(nn.Linear(8, 8))
    by_options = copy.deepcopy(by_spec)
    spec = inweave.AdapterSpec(rslora=True, seed=3)
    first = inject(by_spec, 4, 2.0, spec=spec).state_dict()
    second = inject(by_options, 4, 2.0, rslora=True, seed=3).state_dict()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert inject(nn.Sequential(nn.Linear(8, 8)), 4, 2.0, spec=spec, seed=5).state_dict().keys() == first.keys()
    with pytest.raises(ConfigError, match="no option 'rslorra'; did you mean rslora"):
        inject(nn.Sequential(nn.Linear(8, 8)), 4, 2.0, rslorra=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("targets", [["to_q"], ["attn2.to_k"], "all-linear"])
def test_projections_that_diffusers_fused_are_refused(targets: Any) -> None:
    diffusers = pytest.importorskip("diffusers")
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=8, attention_head_dim=4,
        norm_num_groups=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    adapter = inweave.collect(inweave.inject(unet, rank=2, targets=targets))
    inweave.eject(unet)
    unet.fuse_qkv_projections()
    for add in (lambda: inweave.inject(unet, rank=2, targets=targets), lambda: inweave.attach(unet, adapter)):
        with pytest.raises(TargetError, match=r"to_q?kv and never calls it; unfuse_qkv_projections\(\) first"):
            add()
    inweave.inject(unet, rank=2, targets=["attn2.to_q"])  # of cross-attention only k and v are fused
    inweave.eject(unet)
    unet.unfuse_qkv_projections()
    inweave.attach(unet, adapter)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dora": "x"}, "dora must be True or False, got 'x'"),
        ({"rslora": 1, "alpha": 2.0}, "rslora must be True or False, got 1"),
        ({"network": "lokr", "decompose_both": None}, "decompose_both must be True or False"),
        ({"targets": {"linear": 4}}, "got a mapping; rank_pattern"),
    ],
)
def test_an_option_of_another_type_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        inject(nn.ModuleDict({"linear": nn.Linear(4, 4)}), 2, **options)
