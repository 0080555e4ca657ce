"""Adapters of rows: every row as if its own adapters were merged, in one forward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from inweave.adapter import Adapter
from inweave.errors import InweaveError, TargetError
from inweave.formats.read import read
from inweave.ops.tensors.decode import encode
from inweave.weights import row_adapters
from inweave.weights.row_adapters import RowAdapters
from inweave.weights.weaver import Weaver


class Network(nn.Module):
    """Convolutions, one of them with a stride and a bias, and linear layers on tokens and on vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.time = nn.Linear(5, 12)
        self.qkv = nn.Linear(12, 36)
        self.out = nn.Conv2d(12, 4, 1)
        self.grouped = nn.Conv2d(4, 4, 1, groups=2)
        self.shared = nn.Linear(5, 4)  # of one row for all
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.down(torch.tanh(self.conv(x))) + self.time(time)[:, :, None, None]
        q, k, v = self.qkv(hidden.flatten(2).transpose(1, 2)).chunk(3, -1)
        mixed = (torch.softmax(q @ k.transpose(1, 2), -1) @ v).transpose(1, 2).reshape(hidden.shape)
        out: Tensor = self.grouped(self.out(mixed)) + self.shared(torch.ones(1, 5))[:, :, None, None]
        return out


SHAPES = {name: tuple(module.weight.shape) for name, module in Network().named_modules() if hasattr(module, "weight")}


def adapter(seed: int, rank: int, *names: str, scale: float = 0.3, more: dict[str, Tensor] | None = None) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {f"lora_unet_{key}": value for key, value in (more or {}).items()}
    for name in names:
        out, *into = SHAPES[name]
        tail = [1] * (len(into) - 1)
        tensors[f"lora_unet_{name}.lora_down.weight"] = torch.randn(rank, *into, generator=generator) * scale
        tensors[f"lora_unet_{name}.lora_up.weight"] = torch.randn(out, rank, *tail, generator=generator) * scale
        tensors[f"lora_unet_{name}.alpha"] = torch.tensor(rank * 0.7)
    return read({name: encode(value) for name, value in tensors.items()})


ALL = ("conv", "down", "time", "qkv", "out")
ONE, TWO, WIDE = adapter(1, 4, *ALL), adapter(5, 33, "qkv", "conv"), adapter(9, 128, "qkv", "out", "time", scale=0.05)
#: (adapter, strength) of every row; neighbors with one stack, as of guidance, and strengths that differ
ROWS: list[list[tuple[Adapter, float]]] = [
    [], [(ONE, 1.0)], [(ONE, 1.0)], [(TWO, -0.7), (WIDE, 1.2)], [(WIDE, 0.5), (ONE, 0.4), (TWO, 1.0)], [(ONE, 0.2)],
]  # fmt: skip


def inputs(rows: int = len(ROWS)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, 3, 8, 6, generator=generator), torch.randn(rows, 5, generator=generator)


def make() -> tuple[Network, Weaver, RowAdapters]:
    network = Network().requires_grad_(False).eval()
    weaver = Weaver({"unet": network})
    return network, weaver, RowAdapters(weaver)


@torch.no_grad()
def one_by_one(network: Network, weaver: Weaver, *, common: list[tuple[Adapter, float]] | None = None) -> Tensor:
    """Each row by itself, with its adapters merged."""
    x, time = inputs()
    results = []
    for number, stack in enumerate(ROWS):
        weaver.apply([*(common or []), *stack])
        results.append(network(x[number : number + 1], time[number : number + 1]))
    weaver.apply([])
    return torch.cat(results)


@torch.no_grad()
def together(network: Network, adapters: RowAdapters, x: Tensor, time: Tensor) -> Tensor:
    slots = dict(zip(map(id, (ONE, TWO, WIDE)), adapters.load([ONE, TWO, WIDE]), strict=True))
    with adapters.acting("unet", slots.values()) as rows:
        rows.fill([[(slots[id(each)], strength) for each, strength in stack] for stack in ROWS])
        result: Tensor = network(x, time)
    assert not adapters.refuse_uncalled("unet", slots.values())
    return result


def test_every_row_is_as_if_its_adapters_were_merged() -> None:
    network, weaver, adapters = make()
    plain = network(*inputs())
    assert all(adapters.obstacle(weaver.plan(each)) == "" for each in (ONE, TWO, WIDE))
    actual, expected = together(network, adapters, *inputs()), one_by_one(network, weaver)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert float((expected[1:] - plain[1:]).abs().amax((1, 2, 3)).min()) > 0.02
    assert torch.equal(network(*inputs()), plain), "nothing is left on the layers"
    assert not any(module._forward_hooks for module in network.modules())


def test_what_is_merged_is_changed_too() -> None:
    network, weaver, adapters = make()
    common = [(adapter(21, 8, "qkv", "out"), 0.6)]
    expected = one_by_one(network, weaver, common=common)
    weaver.apply(common)
    torch.testing.assert_close(together(network, adapters, *inputs()), expected, rtol=1e-4, atol=1e-5)


def test_a_nan_stays_in_its_row() -> None:
    network, _, adapters = make()
    x, time = inputs()
    good = together(network, adapters, x, time)
    x[3] = float("nan")
    result = together(network, adapters, x, time)
    others = [0, 1, 2, 4, 5]
    assert torch.equal(result[others], good[others]) and bool(result[3].isnan().all())


def test_one_stack_for_any_number_of_rows() -> None:
    network, weaver, adapters = make()
    (slot,) = adapters.load([ONE])
    with torch.no_grad(), adapters.acting("unet", [slot]) as rows:
        rows.fill_all([(slot, 0.8)])
        actual = [network(*inputs(count)) for count in (1, 3)]
    weaver.apply([(ONE, 0.8)])
    for count, result in zip((1, 3), actual, strict=True):
        torch.testing.assert_close(result, network(*inputs(count)), rtol=1e-4, atol=1e-5)


def test_runs_of_rows_and_scales_that_differ() -> None:
    """Three adapters of one layer, each on other rows of the joint weight, as files of another naming have them."""
    from dataclasses import replace

    network, weaver, adapters = make()
    (placement,) = weaver.plan(adapter(2, 6, "qkv")).placements
    parts = []
    for number in range(3):
        cut = replace(placement.factors, alpha=float(6**number) if placement.factors.alpha is not None else None)
        parts.append(replace(placement, factors=cut, target=(12 * number, 12), source=(12 * number, 12)))
    plan = replace(weaver.plan(adapter(2, 6, "qkv")), placements=tuple(parts))
    (slot,) = adapters.load([plan])
    with torch.no_grad(), adapters.acting("unet", [slot]) as rows:
        rows.fill_all([(slot, 1.0)])
        actual = network(*inputs())
    weaver.apply([(plan, 1.0)])
    torch.testing.assert_close(actual, network(*inputs()), rtol=1e-4, atol=1e-5)


def test_slots_are_reused_and_the_oldest_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_adapters, "MOST_SLOTS", 2)
    network, weaver, adapters = make()
    one, two = adapters.load([ONE, TWO])
    assert adapters.load([TWO, ONE, TWO]) == [two, one, two]
    small = adapter(30, 2, "qkv")
    assert adapters.load([ONE, small]) == [one, two], "TWO was used before ONE"
    with torch.no_grad(), adapters.acting("unet", [one, two]) as rows:
        rows.fill_all([(two, 1.0)])
        actual = network(*inputs())
    weaver.apply([(small, 1.0)])
    torch.testing.assert_close(actual, network(*inputs()), rtol=1e-4, atol=1e-5)
    with pytest.raises(InweaveError, match="3 adapters; at most 2"):
        adapters.load([ONE, TWO, small])


def test_what_cannot_be_added() -> None:
    _, weaver, adapters = make()
    dora = adapter(1, 4, "qkv", more={"qkv.dora_scale": torch.ones(36, 1)})
    hada = {f"qkv.hada_{name}": torch.randn(*shape) for name, shape in
            {"w1_a": (36, 2), "w1_b": (2, 12), "w2_a": (36, 2), "w2_b": (2, 12)}.items()}  # fmt: skip
    bias = adapter(1, 4, "qkv", more={"qkv.diff_b": torch.ones(36)})
    for wrong, reason in (
        (dora, "qkv.weight: DoRA is not a product"), (adapter(1, 4, more=hada), "qkv.weight: loha is not a product"),
        (bias, "qkv.bias: full is not"), (adapter(1, 2, "grouped"), "grouped.weight: "),
    ):  # fmt: skip
        assert adapters.obstacle(weaver.plan(wrong)).startswith(reason), adapters.obstacle(weaver.plan(wrong))


def test_a_probe_finds_layers_that_are_not_called_by_rows() -> None:
    network, weaver, adapters = make()
    plans = {name: weaver.plan(adapter(1, 4, name)) for name in ("qkv", "shared", "unused")}
    assert not any(map(adapters.obstacle, plans.values()))
    calls: list[Tensor] = []
    for _ in range(2):
        adapters.probe("unet", 6, lambda: calls.append(network(*inputs())))
    assert len(calls) == 1
    assert adapters.obstacle(plans["qkv"]) == ""
    assert "does not have one entry per row" in adapters.obstacle(plans["shared"])
    assert "read without a call" in adapters.obstacle(plans["unused"])
    assert not any(module._forward_hooks for module in network.modules())


def test_a_layer_that_is_not_called_is_refused_afterwards() -> None:
    network, weaver, adapters = make()
    unused = adapter(1, 4, "unused")
    (slot,) = adapters.load([unused])
    with torch.no_grad(), adapters.acting("unet", [slot]) as rows:
        rows.fill_all([(slot, 1.0)])
        network(*inputs())
    assert adapters.refuse_uncalled("unet", [slot]) and "read without" in adapters.obstacle(weaver.plan(unused))


def test_another_number_of_rows_is_an_error() -> None:
    network, _, adapters = make()
    (slot,) = adapters.load([ONE])
    with adapters.acting("unet", [slot]) as rows, pytest.raises(InweaveError, match="conv: expected an input of 2"):
        rows.fill([[(slot, 1.0)], []])
        network(*inputs())
    assert not any(module._forward_hooks for module in network.modules())


def test_numbers_that_are_not_finite_are_refused() -> None:
    _, _, adapters = make()
    broken = adapter(1, 4, "qkv", more={"conv.diff": torch.full(SHAPES["conv"], float("nan"))})
    with pytest.raises(TargetError, match="holds NaN or infinity"):
        adapters.load([broken])


def test_a_layer_that_adds_again_has_the_same_hook_and_a_table_that_moved_another_layout() -> None:
    """A recorded call compares hooks and layouts: it is played again where both are the same, whatever rows get."""
    network, _, adapters = make()
    one, two = adapters.load([ONE, TWO])
    x, hooks, layouts = inputs(2)[0], [], []
    assert adapters.layout("unet", x) is None
    for rows in ([[(one, 1.0)], []], [[(two, 0.5)], [(one, 2.0)]], [[(two, 1.0), (one, 0.5)], []]):
        with adapters.acting("unet", [one, two]) as filled:
            filled.fill(rows)
            hooks.append(dict(network.qkv._forward_hooks))
            layouts.append(adapters.layout("unet", x))
        assert not network.qkv._forward_hooks and adapters.layout("unet", x) is None
    assert hooks[0] == hooks[1] == hooks[2] and len(hooks[0]) == 1
    assert layouts[0] == layouts[1] != layouts[2], "a second adapter of a row needs another table"
