"""Dropout between the factors of a LoRA, against the formula of kohya's LoRA modules in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from inweave.errors import ConfigError
from inweave.layers import attach, collect, inject, register_layer
from inweave.layers.dropout import HIDDEN, MODULE, OUTPUTS, RANKS, layer_number, output_dropout, row_mask
from inweave.ops.kinds import LayerKind, LinearKind, registry
from tests.unit.layers.zoo import KINDS, adapted, layer_of

P = 0.4
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _conv(x: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(x, down, padding=1)


#: kind -> down(x), up(hidden), the axis of ranks
FORMULAS: dict[str, tuple[Step, Step, int]] = {
    "linear": (functional.linear, functional.linear, -1),
    "linear-no-bias": (functional.linear, functional.linear, -1),
    "conv1D": (functional.linear, functional.linear, -1),
    "conv2d": (_conv, functional.conv2d, 1),
    "conv2d-1x1": (functional.conv2d, functional.conv2d, 1),
    "embedding": (lambda x, down: functional.embedding(x, down.T), functional.linear, -1),
}


def seeded(kind: str, **rates: Any) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A filled adapter in training mode, an input, and the seeds of its rows."""
    model, x = adapted(kind, **rates).train(), KINDS[kind].input()
    seeds = torch.randint(2**31, (len(x), 2), generator=torch.Generator().manual_seed(4))
    layer_of(model).branch("default").row_seeds = seeds
    return model, x, seeds


@pytest.mark.parametrize(
    "rates",
    [
        {"hidden_dropout": P},
        {"rank_dropout": P},
        {"module_dropout": 0.9},
        {"hidden_dropout": P, "rank_dropout": 0.3, "module_dropout": 0.2},
    ],
)
@pytest.mark.parametrize("kind", FORMULAS)
def test_output_and_gradients_are_those_of_the_formula(kind: str, rates: dict[str, float]) -> None:
    model, x, seeds = seeded(kind, **rates)
    layer = layer_of(model)
    pair: Any = layer.branch("default")
    into, out_of, axis = FORMULAS[kind]
    hidden = into(x, pair.down)
    if p := rates.get("hidden_dropout"):
        hidden = hidden * row_mask(seeds, hidden.shape, p, layer_number("layer") + HIDDEN) / (1 - p)
    if p := rates.get("rank_dropout"):
        shape = [len(x), *[1] * (hidden.dim() - 1)]
        shape[axis] = pair.rank
        hidden = hidden * row_mask(seeds, tuple(shape), p, layer_number("layer") + RANKS) / (1 - p)
    if p := rates.get("module_dropout"):  # not scaled
        hidden = hidden * row_mask(seeds, (len(x), *[1] * (hidden.dim() - 1)), p, layer_number("layer") + MODULE)
    expected = layer.base(x) + pair.scale * out_of(hidden, pair.up)
    actual = model["layer"](x)
    torch.testing.assert_close(actual, expected)
    assert not torch.allclose(actual, model.eval()["layer"](x)), "the comparison can fail"
    theirs = torch.autograd.grad(expected.square().sum(), [pair.down, pair.up])
    ours = torch.autograd.grad(actual.square().sum(), [pair.down, pair.up])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["linear", "conv1D", "conv2d", "conv2d-groups", "conv3d", "embedding"])
def test_it_acts_in_training_only_and_keeps_the_expectation(kind: str) -> None:
    rates = {"hidden_dropout": 0.3, "rank_dropout": 0.3}
    model, x, _ = seeded(kind, **rates)
    plain = adapted(kind)["layer"](x).detach()
    generator = torch.Generator().manual_seed(0)
    pair, total = layer_of(model).branch("default"), torch.zeros_like(plain)
    with torch.no_grad():
        for _ in range(2000):
            pair.row_seeds = torch.randint(2**31, (len(x), 2), generator=generator)
            total += model["layer"](x)
        base = layer_of(model).base(x)
    assert float((total / 2000 - plain).norm() / (plain - base).norm()) < 0.06
    assert torch.equal(model.eval()["layer"](x), plain)


def test_without_seeds_of_rows_it_is_torchs_own() -> None:
    model, x = adapted("linear", hidden_dropout=P).train(), KINDS["linear"].input()
    layer = layer_of(model)
    pair: Any = layer.branch("default")
    torch.manual_seed(1)
    actual = model["layer"](x)
    torch.manual_seed(1)
    hidden = functional.dropout(functional.linear(x, pair.down), P)
    torch.testing.assert_close(actual, layer.base(x) + pair.scale * functional.linear(hidden, pair.up))


def test_skipped_modules_are_those_of_lycoris() -> None:
    """Without seeds there is one draw per call, as in lycoris-lora: every output is that of the module or of both."""
    locon = pytest.importorskip("lycoris.modules.locon")
    model, x = adapted("linear", module_dropout=P).train(), KINDS["linear"].input()
    layer = layer_of(model)
    pair: Any = layer.branch("default")
    base = nn.Linear(x.shape[-1], pair.up.shape[0])
    base.load_state_dict(layer.base.state_dict())
    theirs = locon.LoConModule("layer", base, lora_dim=pair.rank, alpha=pair.scale * pair.rank, module_dropout=P)
    theirs.lora_down.weight.data, theirs.lora_up.weight.data = pair.down.data, pair.up.data
    theirs.apply_to()
    choices = {"skipped": layer.base(x), "added": model.eval()["layer"](x)}

    def outcomes(module: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
        results = (module(x) for _ in range(300))
        return [next(name for name, each in choices.items() if torch.allclose(one, each, atol=1e-5)) for one in results]

    model.train(), theirs.train()
    with torch.no_grad():
        ours, lycoris = outcomes(model["layer"]), outcomes(base)
    assert abs(ours.count("skipped") - 300 * P) < 40 and abs(lycoris.count("skipped") - 300 * P) < 40


@pytest.mark.parametrize("kind", ["linear", "conv2d", "conv2d-groups"])
@pytest.mark.parametrize("network", ["loha", "lokr"])
def test_outputs_are_dropped_as_by_lycoris(network: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one example and the same mask: rows of the change, not scaled."""
    module = pytest.importorskip(f"lycoris.modules.{network}")
    model, x, _ = seeded(kind, network=network, rank_dropout=P)
    x, layer = x[:1], layer_of(model)
    branch: Any = layer.branch("default")
    branch.row_seeds = branch.row_seeds[:1]
    mask = row_mask(branch.row_seeds, (1, layer.out), P, layer_number("layer") + RANKS)[0]
    assert 0 < mask.sum() < layer.out
    base, prefix = KINDS[kind].module()["layer"], {"loha": "hada_", "lokr": "lokr_"}[network]
    base.load_state_dict(layer.base.state_dict())
    theirs = getattr(module, {"loha": "LohaModule", "lokr": "LokrModule"}[network])(
        "layer", base, lora_dim=branch.rank or 2, alpha=branch.scale * (branch.rank or 2), rank_dropout=P
    )
    theirs.use_w1, theirs.use_w2, theirs.scale = "w1" in branch.roles(), "w2" in branch.roles(), branch.scale
    for role, value in branch.roles().items():
        setattr(theirs, prefix + role, nn.Parameter(value.detach().clone()))
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.where(mask, 1.0, 0.0))
    actual, expected = model["layer"](x), theirs.train()(x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(actual, model.eval()["layer"](x))
    model.train()
    (model["layer"](x) ** 2).sum().backward()
    (expected**2).sum().backward()
    for role, value in branch.roles().items():
        torch.testing.assert_close(value.grad, getattr(theirs, prefix + role).grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_outputs_of_a_lora_are_dropped_as_by_lycoris(kind: str, dora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one example and the same mask: rows of the change; with DoRA they keep their magnitudes."""
    module = pytest.importorskip("lycoris.modules.locon")
    model, x, _ = seeded(kind, output_dropout=P, dora=dora)
    x, layer = x[:1], layer_of(model)
    branch: Any = layer.branch("default")
    branch.row_seeds = branch.row_seeds[:1]
    mask = row_mask(branch.row_seeds, (1, layer.out), P, layer_number("layer") + OUTPUTS)[0]
    assert 0 < mask.sum() < layer.out
    base = KINDS[kind].module()["layer"]
    base.load_state_dict(layer.base.state_dict())
    theirs = module.LoConModule(
        "layer", base, lora_dim=branch.rank, alpha=branch.scale * branch.rank, rank_dropout=P, weight_decompose=dora
    )
    theirs.lora_down.weight.data, theirs.lora_up.weight.data = branch.down.detach().clone(), branch.up.detach().clone()
    if dora:
        theirs.dora_scale = nn.Parameter(branch.magnitude.detach().clone().view(theirs.dora_scale.shape))
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.where(mask, 1.0, 0.0))
    actual, expected = model["layer"](x), theirs.train()(x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(actual, model.eval()["layer"](x))
    model.train()
    (model["layer"](x) ** 2).sum().backward()
    (expected**2).sum().backward()
    if dora:  # LyCORIS' other gradients also flow through the norm
        torch.testing.assert_close(branch.magnitude.grad, theirs.dora_scale.grad.flatten(), rtol=1e-3, atol=1e-3)
    else:
        torch.testing.assert_close(branch.down.grad, theirs.lora_down.weight.grad, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(branch.up.grad, theirs.lora_up.weight.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_dropped_outputs_of_a_lora_do_not_depend_on_the_batch(dora: bool) -> None:
    model, x, seeds = seeded("linear", output_dropout=P, module_dropout=0.2, dora=dora)
    branch, whole = layer_of(model).branch("default"), model["layer"](x)
    for row in range(len(x)):
        branch.row_seeds = seeds[row : row + 1]
        torch.testing.assert_close(model["layer"](x[row : row + 1]), whole[row : row + 1])


@pytest.mark.parametrize("kind", ["linear", "conv1D", "conv2d", "conv2d-groups"])
@pytest.mark.parametrize("options", [{"network": "loha"}, {"network": "lokr"}, {"dora": True}], ids=str)
def test_every_algorithm_leaves_modules_out_for_an_example(kind: str, options: dict[str, Any]) -> None:
    model, x, seeds = seeded(kind, module_dropout=0.5, **options)
    layer = layer_of(model)
    mask = row_mask(seeds, (len(x),), 0.5, layer_number("layer") + MODULE)
    if not 0 < mask.sum() < len(x):
        layer.branch("default").row_seeds = seeds = seeds + 3
        mask = row_mask(seeds, (len(x),), 0.5, layer_number("layer") + MODULE)
    assert 0 < mask.sum() < len(x)
    actual, skipped, added = model["layer"](x), layer.base(x), model.eval()["layer"](x)
    for row, remains in enumerate(mask.tolist()):
        torch.testing.assert_close(actual[row], (added if remains else skipped)[row])
    assert not torch.allclose(added, skipped)


@pytest.mark.parametrize("network", ["loha", "lokr"])
def test_dropped_outputs_do_not_depend_on_the_batch(network: str) -> None:
    model, x, seeds = seeded("linear", network=network, rank_dropout=P, module_dropout=P)
    branch, whole = layer_of(model).branch("default"), model["layer"](x)
    for row in range(len(x)):
        branch.row_seeds = seeds[row : row + 1]
        torch.testing.assert_close(model["layer"](x[row : row + 1]), whole[row : row + 1])


def test_all_tokens_of_an_example_lose_the_same_outputs() -> None:
    seeds, change = torch.tensor([[3, 4], [5, 6]]), torch.ones(2, 5, 16)
    whole = output_dropout(change, P, -1, seeds, 7)
    torch.testing.assert_close(output_dropout(change.flatten(0, 1), P, -1, seeds, 7), whole.flatten(0, 1))
    assert all(torch.equal(row, row[:1].expand_as(row)) for row in whole) and not torch.equal(whole[0], whole[1])
    shared = output_dropout(change.flatten(0, 1), P, -1, None, 7)
    assert torch.equal(shared, shared[:1].expand_as(shared)), "without seeds, a batch has one mask, as in LyCORIS"


def test_the_groups_of_a_convolution_lose_the_same_ranks() -> None:
    model, x, seeds = seeded("conv2d-groups", rank_dropout=P)
    layer = layer_of(model)
    pair: Any = layer.branch("default")
    mask = row_mask(seeds, (len(x), pair.rank), P, layer_number("layer") + RANKS)
    rows = [
        layer.kind.apply(
            layer.base, x[i : i + 1], torch.einsum("orhw,ricd->oicd", pair.up * mask[i][:, None, None], pair.down)
        )
        for i in range(len(x))
    ]
    torch.testing.assert_close(model["layer"](x), layer.base(x) + pair.scale / (1 - P) * torch.cat(rows))


def test_a_batch_has_the_masks_of_its_rows() -> None:
    model, x, seeds = seeded("linear", hidden_dropout=P, rank_dropout=P, module_dropout=P)
    pair, whole = layer_of(model).branch("default"), model["layer"](x)
    for row in range(len(x)):
        pair.row_seeds = seeds[row : row + 1]
        torch.testing.assert_close(model["layer"](x[row : row + 1]), whole[row : row + 1])
    pair.row_seeds = seeds.flip(0)
    assert not torch.allclose(model["layer"](x), whole)


@pytest.mark.parametrize(
    "rates", [{"dropout": P}, {"hidden_dropout": P}, {"rank_dropout": P}], ids=lambda rates: next(iter(rates))
)
def test_rows_of_no_example_have_the_same_mask_when_they_are_recomputed(rates: dict[str, float]) -> None:
    """Tokens routed to experts, for example: their number is not a multiple of the batch size."""
    model, x, seeds = seeded("linear", **rates)
    pair = layer_of(model).branch("default")
    pair.row_seeds = seeds[:2]
    tokens = torch.cat([x.flatten(0, -2)] * 3)[:5]
    state = torch.get_rng_state()
    first = model["layer"](tokens)
    assert torch.equal(torch.get_rng_state(), state), "torch's generator is not used: its state would not be restored"
    assert torch.equal(model["layer"](tokens), first)
    pair.row_seeds = seeds[:2] + 1
    assert not torch.allclose(model["layer"](tokens), first)


@dataclass(frozen=True)
class WholeKind(LinearKind):
    apply_low_rank = LayerKind.apply_low_rank


class Whole(nn.Linear):
    pass


def test_where_nothing_is_between_two_factors_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = KINDS["linear"].module()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"dora": True}, "hidden_dropout"), ({"dora": True}, "rank_dropout"), ({"network": "loha"}, "hidden_dropout"),
        ({"network": "lokr"}, "hidden_dropout"),
    ]  # fmt: skip
    for options, name in refused:
        with pytest.raises(ConfigError, match=f"{name}: .*use dropout"):
            inject(model, 2, targets=["layer"], **options, **{name: P})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rank_dropout must be at least 0 and below 1, got 1"):
        inject(model, 2, targets=["layer"], rank_dropout=1.0)
    for options in ({"dora": True}, {"network": "loha"}):
        adapter = collect(adapted("linear", **options))
        with pytest.raises(ConfigError, match=r"layer: .*use dropout"):
            attach(model, adapter, hidden_dropout=P)
    for network in ("loha", "lokr"):
        with pytest.raises(ConfigError, match=f"output_dropout: {network} has it under the name of rank_dropout"):
            inject(model, 2, targets=["layer"], network=network, output_dropout=P)
    attach(model, collect(adapted("linear")), hidden_dropout=P, rank_dropout=0.1)
    pair = layer_of(model).branch("default")
    assert (pair.hidden_dropout, pair.rank_dropout) == (P, 0.1)
    monkeypatch.setattr(registry, "_REGISTERED", {})
    register_layer(Whole, kind=WholeKind())
    with pytest.raises(ConfigError, match="layer: WholeKind applies the product of both factors at once"):
        inject(nn.ModuleDict({"layer": Whole(4, 4)}), 2, targets=["layer"], hidden_dropout=P)
