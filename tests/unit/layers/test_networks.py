"""LoHa and LoKr on every kind of layer that takes them: one formula, merged or not, and the choices of `inject`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from inweave.adapter.lokr import split_factors
from inweave.errors import ConfigError, TargetError
from inweave.formats.read import read
from inweave.layers import activate, attach, collect, delete, disabled, eject, lora_layers, merge, unmerge
from inweave.ops.delta import change
from tests.support import random
from tests.unit.layers.test_inject import Net
from tests.unit.layers.zoo import (
    DTYPES,
    KINDS,
    NETWORKS,
    OPERATORS,
    base_bits,
    bits,
    fill,
    injected,
    layer_of,
    networked,
    product_of,
    reference,
)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("kind", OPERATORS)
def test_forward_is_the_formula_merged_or_not(kind: str, network: str) -> None:
    model, x = networked(kind, network), KINDS[kind].input()
    expected, layer = reference(model, x), layer_of(model)
    assert (expected - layer.base(x).double()).abs().max() > 0.05  # the adapter does something
    torch.testing.assert_close(model["layer"](x).double(), expected, rtol=1e-5, atol=1e-5)
    before = base_bits(model)
    merge(model)
    torch.testing.assert_close(model["layer"](x).double(), expected, rtol=1e-5, atol=1e-5)
    unmerge(model)
    assert base_bits(model) == before
    assert eject(model)["layer"] is layer.base


@pytest.mark.parametrize("network", ["loha", "lokr", "lokr-full", "lokr-both"])
@pytest.mark.parametrize("kind", OPERATORS)
def test_the_product_is_the_canonical_one_bit_for_bit(kind: str, network: str) -> None:
    model = networked(kind, network)
    layer = layer_of(model)
    branch = layer.branch("default")
    factors = branch.to_factors(transposed=layer.transposed)
    weight = layer.weight.detach()
    delta = change(factors, torch.empty_like(weight, device="meta"))
    mine = (branch.scale * branch.product().detach()).reshape(layer.out, *layer.into)
    assert torch.equal(mine.T if layer.transposed else mine, delta)
    torch.testing.assert_close(branch.product().detach().double(), product_of(branch))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("kind", OPERATORS)
def test_a_fresh_network_changes_nothing_and_then_everything(kind: str, network: str) -> None:
    """Zero at the start, and not stuck there: the first gradient reaches the factor that is zero."""
    x, plain = KINDS[kind].input(), KINDS[kind].module()
    before = plain["layer"](x)
    options = {"rank": 2, "alpha": 3.0, "targets": ["layer"]} | NETWORKS[network]
    model = injected(copy.deepcopy(plain), **options)  # type: ignore[arg-type]
    if options.get("dora"):
        torch.testing.assert_close(model["layer"](x), before, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(model["layer"](x), before)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (model["layer"](x) - torch.ones_like(before)).square().sum().backward()
        optimizer.step()
    assert all(bool(p.grad.any()) for p in layer_of(model).adapters.parameters())


@pytest.mark.parametrize("network", ["loha", "lokr-both", "lokr-full"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_merging_is_one_rounding_in_place(dtype: str, network: str) -> None:
    model = networked("conv2d-groups", network, DTYPES[dtype])
    layer = layer_of(model)
    before, where = base_bits(model), layer.weight.data_ptr()
    merge(model)
    delta = change(layer.factors("default"), layer._pristine)
    assert torch.equal(layer.weight, (layer._pristine.float() + delta).to(DTYPES[dtype]))
    assert layer.weight.data_ptr() == where and base_bits(model) != before
    unmerge(model)
    assert base_bits(model) == before


def test_networks_coexist() -> None:
    kind, x = "conv2d-groups", KINDS["conv2d-groups"].input()
    model = KINDS[kind].module()
    for name in ("lora", "loha", "lokr"):
        injected(model, 2, 3.0, ["layer"], name=name, network=name)  # type: ignore[arg-type]
        fill(model, len(name), name=name)
    for active in (["loha"], ["lora", "lokr"], {"lora": 0.5, "loha": -1.5, "lokr": 2.0}):
        activate(model, active)
        expected = reference(model, x)
        torch.testing.assert_close(model["layer"](x).double(), expected, rtol=1e-5, atol=1e-5)
        merge(model)
        torch.testing.assert_close(model["layer"](x).double(), expected, rtol=1e-5, atol=1e-5)
        unmerge(model)
    with disabled(model):
        assert torch.equal(model["layer"](x), layer_of(model).base(x))
    delete(model, "loha")
    assert not any("w1_a" in name for name, _ in model.named_parameters())
    assert {collect(model, name).algorithms for name in ("lora", "lokr")} == {("locon",), ("lokr",)}


def test_dropout_is_on_the_input_and_in_training_only() -> None:
    for network in ("loha", "lokr"):
        model, x = networked("conv2d", network, dropout=0.5), KINDS["conv2d"].input()
        layer, branch = layer_of(model), layer_of(model).branch("default")
        assert torch.equal(model.eval()["layer"](x), networked("conv2d", network)["layer"](x))
        torch.manual_seed(0)
        got = model.train()["layer"](x)
        torch.manual_seed(0)
        added = layer.kind.apply(
            layer.base, nn.functional.dropout(x, 0.5), branch.product().reshape(layer.out, *layer.into)
        )
        torch.testing.assert_close(got, layer.base(x) + branch.scale * added)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("network", ["loha", "loha-dora", "lokr", "lokr-full", "lokr-both"])
def test_torch_compile_sees_one_graph(network: str, backend: str) -> None:
    model, x = networked("conv2d-groups", network), KINDS["conv2d-groups"].input()
    model["layer"](x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in layer_of(model).adapters.parameters()]
    model.zero_grad()
    torch._dynamo.reset()  # what earlier cases compiled counts against this one
    compiled = torch.compile(model["layer"], backend=backend, fullgraph=True)
    out = compiled(x)
    torch.testing.assert_close(out, model["layer"](x))
    out.square().sum().backward()
    for parameter, grad in zip(layer_of(model).adapters.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


@pytest.mark.parametrize("network", ["loha", "lokr"])
def test_autocast_computes_in_its_dtype(network: str) -> None:
    model, x = networked("linear", network), KINDS["linear"].input()
    with torch.autocast("cpu", torch.bfloat16):
        low = model["layer"](x)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), model["layer"](x), rtol=0.05, atol=0.1)
    low.float().sum().backward()
    assert {p.grad.dtype for p in layer_of(model).adapters.parameters()} == {torch.float32}


def test_the_halves_of_a_loha_are_not_saved_for_the_backward_pass() -> None:
    model = injected(nn.ModuleDict({"layer": nn.Linear(64, 64)}), 2, targets=["layer"], network="loha")
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model["layer"](torch.randn(1, 64, requires_grad=True))
    assert sum(size == 64 * 64 for size in sizes) == 2  # the base's weight and the product, for the layer below


def test_an_embedding_takes_lora_only() -> None:
    for network in ("loha", "lokr"):
        model = Net()
        with pytest.raises(TargetError, match=f"embed: an embedding takes LoRA only, not {network}"):
            injected(model, 2, targets=["embed", "to_q"], network=network)  # type: ignore[arg-type]
        assert not lora_layers(model) and all(p.requires_grad for p in model.parameters())
    halves = {f"hada_w{i}_{j}": random(i, *(9, 2) if j == "a" else (2, 6)) for i in (1, 2) for j in "ab"}
    with pytest.raises(TargetError, match="an embedding takes LoRA only"):
        attach(Net(), read({f"diffusion_model.embed.{key}": value for key, value in halves.items()}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": "locon"}, "network must be one of lora, loha, lokr, got 'locon'"),
        ({"factor": 4}, "belong to lokr"),
        ({"network": "loha", "decompose_both": True}, "belong to lokr; loha does not use them"),
        ({"network": "lokr", "factor": 0}, "factor must be"),
        ({"network": "lokr", "factor": 2.0}, "factor must be"),
        ({"network": "lokr", "factor": -2}, "factor must be"),
        ({"network": "lokr", "rank": 0}, "rank must be"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    model = Net()
    with pytest.raises(ConfigError, match=message):
        injected(model, **options)  # type: ignore[arg-type]
    assert not lora_layers(model)


def test_an_adapter_brings_its_network() -> None:
    model = attach(Net(), collect(injected(Net(), 2, targets=["to_q"], network="loha")))
    assert {layer.branch("default").network() for layer in lora_layers(model).values()} == {"loha"}


@pytest.mark.parametrize(
    ("size", "factor", "parts"),
    [
        (127, -1, (1, 127)), (128, -1, (8, 16)), (250, -1, (10, 25)), (1024, -1, (32, 32)), (1, -1, (1, 1)),
        (250, 4, (2, 125)), (250, 5, (5, 50)), (360, 16, (15, 24)), (12, 6, (2, 6)), (7, 100, (1, 7)),
    ],
)  # fmt: skip
def test_sizes_are_split_in_two(size: int, factor: int, parts: tuple[int, int]) -> None:
    assert split_factors(size, factor) == parts


def test_shapes_and_scales() -> None:
    model = nn.ModuleDict({"wide": nn.Linear(64, 96), "conv": nn.Conv2d(64, 36, 3), "small": nn.Linear(4, 4)})
    injected(model, 4, 2.0, list(model), network="lokr", rank_pattern={"small": 3}, decompose_both=True, factor=-1)
    shapes = {
        name: {role: tuple(value.shape) for role, value in layer.branch("default").roles().items()}
        for name, layer in lora_layers(model).items()
    }
    assert shapes == {
        "wide": {"w1": (8, 8), "w2_a": (12, 4), "w2_b": (4, 8)},
        "conv": {"w1": (6, 8), "w2": (6, 8, 3, 3)},
        "small": {"w1": (2, 2), "w2": (2, 2)},
    }
    branches = {name: layer.branch("default") for name, layer in lora_layers(model).items()}
    assert {name: (branch.alpha, branch.scale, branch.rank) for name, branch in branches.items()} == {
        "wide": (2.0, 0.5, 4), "conv": (4.0, 1.0, None), "small": (4.0, 1.0, None),
    }  # fmt: skip
    assert "LokrBranch(rank=4, alpha=2)" in repr(model) and "LokrBranch(full" in repr(model)


def test_a_seed_and_a_name_determine_all_values() -> None:
    def numbers(network: str, targets: list[str], seed: int) -> dict[str, bytes]:
        torch.manual_seed(seed * 100)
        model = Net()
        state = torch.get_rng_state()
        injected(model, 2, targets=targets, network=network, seed=seed)  # type: ignore[arg-type]
        assert torch.equal(torch.get_rng_state(), state)
        return {name: bits(value) for name, value in model.state_dict().items() if ".adapters." in name}

    for network, role in (("loha", "w1_a"), ("lokr", "w1")):
        all_of_them, one = numbers(network, ["to_q", "to_k"], 7), numbers(network, ["blocks.1.to_q"], 7)
        assert {name: all_of_them[name] for name in one} == one
        name = f"blocks.1.to_q.adapters.default.{role}"
        assert numbers(network, ["to_q"], 8)[name] != one[name]
        assert all_of_them[f"blocks.0.to_q.adapters.default.{role}"] != one[name]
