"""Modules that others wrapped, parametrized, quantized or tied, before and while adapters are merged into their
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import inweave
from inweave.errors import ConfigError, MergeStateError, TargetError
from inweave.formats.read import read
from inweave.ops.tensors.overlaps import overlaps
from inweave.weights.source import DictSource
from tests.support import random


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(12, 8)
        self.lin = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.third = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)
        self.big = nn.Linear(8, 24, bias=False)
        self.conv = nn.Conv2d(8, 12, 1, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lin(self.emb(ids)))


def pair(module: str, out: int, into: int) -> dict[str, Any]:
    return {
        f"unet.{module}.lora_down.weight": random(1, 2, into),
        f"unet.{module}.lora_up.weight": random(2, out, 2),
    }


LIN, HEAD = read(pair("lin", 8, 8)), read(pair("head", 12, 8))
EMB = read({"unet.emb.lora_embedding_A": random(1, 2, 12), "unet.emb.lora_embedding_B": random(2, 8, 2)})
IDS = torch.tensor([1, 2, 3])


def checkpointed(net: Net) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net.lin = checkpoint_wrapper(net.lin)  # type: ignore[assignment]


WRAPPERS: dict[str, Callable[[Net], object]] = {
    "activation checkpointing": checkpointed,
    "DataParallel": lambda net: setattr(net, "lin", nn.DataParallel(net.lin)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
@pytest.mark.parametrize("when", ["before", "between", "woven"])
def test_wrapped_modules_are_woven_under_their_own_names(wrap: Callable[[Net], object], when: str) -> None:
    net, plain = Net(), Net()
    base = plain.lin.weight.detach().clone()
    inweave.Weaver(plain).apply([(LIN, 1.0)])
    weight = net.lin.weight
    if when == "before":
        wrap(net)
    weaver = inweave.Weaver(net)
    if when == "woven":
        weaver.apply([(LIN, 0.5)])
    if when != "before":
        wrap(net)
    assert weaver.apply([(LIN, 1.0)]) == 1
    assert torch.equal(weight, plain.lin.weight)
    assert weaver.apply([]) == 1
    assert torch.equal(weight, base)


class Same(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


def unregister(net: Net) -> torch.Tensor:
    weight: torch.Tensor = net.lin._parameters.pop("weight").detach()
    return weight


def quantize(net: Net) -> None:
    net.lin._parameters["weight"] = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)


COMPUTED: dict[str, Callable[[Net], object]] = {
    "parametrize": lambda net: nn.utils.parametrize.register_parametrization(net.lin, "weight", Same()),
    "weight norm": lambda net: parametrizations.weight_norm(net.lin),
    "spectral norm": lambda net: parametrizations.spectral_norm(net.lin),
    "pruning": lambda net: prune.l1_unstructured(net.lin, "weight", 1),
    "quantization": quantize,
}
MOVED: dict[str, Callable[[Net], object]] = {
    "a wrapper of somebody's": lambda net: setattr(net, "lin", nn.Sequential(net.lin)),
    "a buffer that is not saved": lambda net: net.lin.register_buffer("weight", unregister(net), persistent=False),
    "an attribute": lambda net: object.__setattr__(net.lin, "weight", unregister(net)),
}


@pytest.mark.parametrize("change", [*COMPUTED.values(), *MOVED.values()], ids=[*COMPUTED, *MOVED])
def test_a_module_changed_while_adapters_are_merged_in_is_refused_by_name(change: Callable[[Net], object]) -> None:
    net = Net()
    weaver = inweave.Weaver(net)
    weaver.apply([(LIN, 1.0)])
    change(net)
    for _ in range(2):
        with pytest.raises(MergeStateError, match=r"lin\.weight: wrapped, quantized or parametrized while adapters"):
            weaver.apply([])
        assert weaver.woven


@pytest.mark.parametrize("change", COMPUTED.values(), ids=COMPUTED.keys())
def test_a_weight_that_is_computed_is_refused_with_the_reason(change: Callable[[Net], object]) -> None:
    net = Net()
    change(net)
    with pytest.raises(TargetError, match=r"lin\.weight is (computed|parametrized|stored as int8).*no adapter can be"):
        inweave.Weaver(net).apply([(LIN, 1.0)])


def test_a_removed_module_is_no_longer_woven() -> None:
    net = Net()
    weaver = inweave.Weaver(net)
    weaver.apply([(LIN, 1.0), (HEAD, 1.0)])
    net.lin = nn.Identity()  # type: ignore[assignment]
    weaver.apply([])
    assert not weaver.woven and torch.equal(net.head.weight, Net().head.weight)


def test_a_parameter_that_became_a_buffer_is_followed() -> None:
    net = Net()
    weaver = inweave.Weaver(net)
    weaver.apply([(LIN, 1.0)])
    net.lin.register_buffer("weight", unregister(net))
    assert weaver.apply([]) == 1
    assert torch.equal(net.lin.weight, Net().lin.weight)


def test_a_sparse_weight_is_refused_by_name() -> None:
    net = Net()
    net.lin.weight = nn.Parameter(net.lin.weight.detach().to_sparse())
    weaver = inweave.Weaver(net)
    with pytest.raises(TargetError, match=r"lin\.weight: a sparse tensor"):
        weaver.apply([(LIN, 1.0)])
    assert weaver.apply([(HEAD, 1.0)]) == 1


# ties


def three(net: Net) -> None:
    net.third.weight = net.head.weight
    net.emb.weight = net.head.weight


def as_parameter(name: str, view: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Net], object]:
    return lambda net: setattr(net.get_submodule(name), "weight", nn.Parameter(view(net.head.weight.detach())))


def inside_another(net: Net) -> None:
    net.head.weight = nn.Parameter(net.big.weight.detach()[12:])


def every_other_row(net: Net) -> None:
    net.head.weight = nn.Parameter(net.big.weight.detach()[1::2])


def first_row(net: Net) -> None:
    net.lin.bias = nn.Parameter(net.head.weight.detach()[3])


TIES: dict[str, tuple[Callable[[Net], object], str]] = {
    "three modules": (three, "emb"),
    "transposed": (as_parameter("down", torch.t), "down"),
    "a convolution's": (as_parameter("conv", lambda w: w.view(12, 8, 1, 1)), "conv"),
    "rows of another": (inside_another, "big"),
    "every other row of another": (every_other_row, "big"),
    "a bias": (first_row, "lin.bias"),
    "a buffer": (lambda net: net.register_buffer("table", net.head.weight.detach()), "table"),
    "a buffer that is not saved": (
        lambda net: net.register_buffer("table", net.head.weight.detach(), persistent=False),
        "table",
    ),
    "its bits": (lambda net: net.register_buffer("table", net.head.weight.detach().view(torch.int32)), "table"),
    "a list of parameters": (lambda net: setattr(net, "table", nn.ParameterList([net.head.weight])), "table.0"),
}


def tensors(net: Net) -> list[tuple[str, torch.Tensor]]:
    return [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]


@pytest.mark.parametrize(("tie", "other"), TIES.values(), ids=TIES.keys())
def test_shared_memory_is_refused_or_untied(tie: Callable[[Net], object], other: str) -> None:
    net = Net()
    tie(net)
    before = {name: value.clone() for name, value in tensors(net)}
    with pytest.raises(TargetError, match=rf"head\.weight: tied: it shares its memory with .*{other}"):
        inweave.Weaver(net).apply([(HEAD, 1.0)])
    with pytest.raises(TargetError, match=rf"head: its weight is also that of .*{other}"):
        inweave.attach(net, HEAD)
    weaver = inweave.Weaver(net, untie=True)
    weaver.apply([(HEAD, 1.0)])
    assert [name for name, value in tensors(net) if not torch.equal(value, before[name])] == ["head.weight"]
    weaver.apply([])
    assert all(torch.equal(value, before[name]) for name, value in tensors(net))


def test_a_merge_of_layers_changes_nothing_that_lies_in_the_same_memory() -> None:
    net = Net()
    inside_another(net)
    big = net.big.weight.detach().clone()
    inweave.attach(net, HEAD, allow_tied=True)
    inweave.merge(net)
    assert torch.equal(net.big.weight, big)
    inweave.unmerge(net)


def test_views_that_take_turns_in_memory_are_not_tied() -> None:
    whole = torch.randn(12, 16)
    net = Net()
    net.head.weight, net.third.weight = nn.Parameter(whole[:, :8]), nn.Parameter(whole[:, 8:])
    assert inweave.Weaver(net).apply([(HEAD, 1.0)]) == 1
    assert overlaps({"left": whole[:, :9], "right": whole[:, 8:]}) == {"left": ["right"], "right": ["left"]}
    assert overlaps({"even": whole[::2], "odd": whole[1::2], "all": whole}) == {
        "even": ["all"], "odd": ["all"], "all": ["even", "odd"],
    }  # fmt: skip


def test_networks_that_share_a_weight_are_tied() -> None:
    one, two = Net(), Net()
    two.lin.weight = one.lin.weight
    with pytest.raises(TargetError, match=r"lin\.weight: tied: it shares its memory with te1\.lin\.weight"):
        inweave.Weaver({"unet": one, "te1": two}).apply([(LIN, 1.0)])


@pytest.mark.parametrize(("adapter", "name"), [(EMB, "emb"), (HEAD, "head")], ids=["emb", "head"])
@pytest.mark.parametrize("both", [True, False])
def test_a_tied_model_is_not_built_from_an_adapter_on_one_of_the_two(adapter: Any, name: str, both: bool) -> None:
    """Neither is changed with the other, nor is the change lost."""
    net = Net()
    net.head.weight = net.emb.weight
    state = {key: value.clone() for key, value in net.state_dict().items()}
    if not both:
        del state["head.weight" if name == "emb" else "emb.weight"]
    source = inweave.MergedSource(DictSource(state), [(adapter, 1.0)])
    with pytest.raises(TargetError, match=rf"{name}\.weight: tied to"):
        inweave.build(net, source)
    assert inweave.build(net, inweave.MergedSource(DictSource(state), [(LIN, 1.0)])) is net


def test_a_module_under_two_names_is_built_with_an_adapter_on_either() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8, bias=False)
            self.second = self.first

    state = {key: value.clone() for key, value in Twice().state_dict().items()}
    for name in ("first", "second"):
        net = Twice()
        inweave.build(net, inweave.MergedSource(DictSource(state), [(read(pair(name, 8, 8)), 1.0)]))
        assert not torch.equal(net.first.weight, state["first.weight"]) and net.first.weight is net.second.weight


@pytest.mark.parametrize("component", [None, "unet", "te1"])
def test_a_source_of_one_network_is_the_component_it_is_called(component: str | None) -> None:
    tensors = {key.replace("unet.", "text_encoder." if component == "te1" else "unet."): value
               for key, value in pair("lin", 8, 8).items()}  # fmt: skip
    base = {key: value.clone() for key, value in Net().state_dict().items()}
    source = inweave.MergedSource(DictSource(base), [(read(tensors), 1.0)], component=component)
    assert not torch.equal(source.get("lin.weight"), base["lin.weight"])
    with pytest.raises(ConfigError, match="component: 'te2' is not in the model, which has unet"):
        inweave.MergedSource(DictSource(base), [(LIN, 1.0)], component="te2", index=inweave.index_of(Net()))
