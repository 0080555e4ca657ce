"""Several named adapters: which act, how strongly, and what is refused when."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from inweave.errors import AlreadyMerged, ConfigError, MergeStateError, NotMerged, TargetError
from inweave.layers import (
    LoraLayer,
    activate,
    delete,
    disabled,
    eject,
    inject,
    lora_layers,
    merge,
    set_strength,
    unmerge,
)
from tests.unit.layers.zoo import KINDS, base_bits, bits, fill, injected, layer_of, reference

KIND = "conv2d-groups"
X = KINDS[KIND].input()


def stacked(**options: bool) -> nn.Module:
    """Two adapters of different rank and scale; the second only on request DoRA."""
    model = KINDS[KIND].module()
    inject(model, 3, 5.0, ["layer"], name="first")
    injected(model, 2, 3.0, ["layer"], name="second", **options)
    fill(model, 3, name="first")
    fill(model, 4, name="second")
    return model


def close(model: nn.Module, expected: torch.Tensor) -> None:
    torch.testing.assert_close(model["layer"](X).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("active", [["first"], ["second"], ["first", "second"], {"first": 0.25, "second": -1.5}, []])
def test_the_active_ones_add_up_at_their_weights(active: list[str] | dict[str, float], dora: bool) -> None:
    model = stacked(dora=dora)
    activate(model, active)
    expected = reference(model, X)
    close(model, expected)
    merge(model)
    close(model, expected)
    unmerge(model)
    close(model, expected)


def test_one_name_is_enough() -> None:
    model = stacked()
    activate(model, "first")
    assert layer_of(model).active == ("first",)


def test_a_new_adapter_is_active_beside_the_others() -> None:
    assert layer_of(stacked()).active == ("first", "second")


def test_weights_scale_and_zero_is_the_base_bit_for_bit() -> None:
    model = stacked()
    set_strength(model, "first", 2.5)
    set_strength(model, "second", -0.5)
    assert layer_of(model).strengths == {"first": 2.5, "second": -0.5}
    close(model, reference(model, X))
    plain = layer_of(model).base(X)
    activate(model, {"first": 0.0, "second": -0.0})
    assert bits(model["layer"](X)) == bits(plain)
    before = base_bits(model)
    merge(model)
    assert base_bits(model) == before


def test_at_weight_zero_an_adapter_is_not_read() -> None:
    """0 * NaN is NaN, and 0 * x + -0.0 is 0.0: a branch at strength zero must not be computed."""
    model = stacked()
    with torch.no_grad():
        layer_of(model).branch("first").up.fill_(math.nan)
    activate(model, {"first": 0.0})
    plain = layer_of(model).base(X)
    assert bits(model["layer"](X)) == bits(plain)
    merge(model)
    assert bits(model["layer"](X)) == bits(plain)


def test_dora_on_a_row_of_zeros_stays_zero() -> None:
    model = KINDS["linear"].module()
    with torch.no_grad():
        model["layer"].weight[1] = 0
    injected(model, 2, 3.0, ["layer"], dora=True)
    x = KINDS["linear"].input()
    before = layer_of(model).base(x)
    unmerged = model["layer"](x)
    torch.testing.assert_close(unmerged, before)
    merge(model)
    torch.testing.assert_close(model["layer"](x), before)


def test_disabled_is_the_base_and_puts_everything_back() -> None:
    model = stacked()
    plain, before = layer_of(model).base(X), model["layer"](X)
    with disabled(model):
        assert torch.equal(model["layer"](X), plain)
        with disabled(model):
            assert torch.equal(model["layer"](X), plain)
        assert torch.equal(model["layer"](X), plain)
        with pytest.raises(MergeStateError, match="disabled"):
            merge(model)
        activate(model, ["first"])
    activate(model, ["first", "second"])
    assert torch.equal(model["layer"](X), before)
    with pytest.raises(RuntimeError, match="stop"), disabled(model):
        raise RuntimeError("stop")
    assert torch.equal(model["layer"](X), before)


def test_delete_removes_the_parameters() -> None:
    model = stacked()
    delete(model, "first")
    assert not any("first" in name for name, _ in model.named_parameters())
    close(model, reference(model, X))
    delete(model, "second")
    assert torch.equal(model["layer"](X), layer_of(model).base(X))
    inject(model, 2, targets=["layer"], name="first")  # the name is free again


def test_merging_twice_and_unmerging_nothing_are_errors() -> None:
    model = stacked()
    with pytest.raises(NotMerged):
        unmerge(model)
    with pytest.raises(NotMerged, match="layer"):
        layer_of(model).unmerge()
    merge(model)
    before = base_bits(model)
    with pytest.raises(AlreadyMerged):
        merge(model)
    with pytest.raises(AlreadyMerged, match="layer"):
        layer_of(model).merge()
    assert base_bits(model) == before
    assert issubclass(AlreadyMerged, MergeStateError) and issubclass(NotMerged, MergeStateError)


@pytest.mark.parametrize(
    "act",
    [
        lambda model: activate(model, ["first"]),
        lambda model: set_strength(model, "first", 0.5),
        lambda model: delete(model, "first"),
        lambda model: disabled(model).__enter__(),
        lambda model: inject(model, 2, targets=["layer"], name="third"),
        lambda model: eject(model),
        lambda model: layer_of(model).activate(["first"]),
        lambda model: layer_of(model).set_strength("first", 0.5),
        lambda model: layer_of(model).delete("first"),
        lambda model: layer_of(model).enable(False),
    ],
)
def test_while_merged_nothing_may_be_switched(act: Callable[[nn.Module], object]) -> None:
    model = stacked()
    merge(model)
    before, out = base_bits(model), model["layer"](X)
    with pytest.raises(MergeStateError, match=r"unmerge (first|before)"):
        act(model)
    assert base_bits(model) == before
    assert torch.equal(model["layer"](X), out)
    unmerge(model)
    assert layer_of(model).active == ("first", "second")


def test_merging_nothing_is_a_merge_too() -> None:
    model = stacked()
    activate(model, [])
    before = base_bits(model)
    merge(model)
    assert base_bits(model) == before
    with pytest.raises(AlreadyMerged):
        merge(model)
    unmerge(model)
    assert base_bits(model) == before


def test_ejecting_merged_weights_keeps_them_only_on_request() -> None:
    model = stacked()
    expected = reference(model, X)
    merge(model)
    base = layer_of(model).base
    eject(model, keep_merged=True)
    assert model["layer"] is base
    assert not lora_layers(model)
    close(model, expected)


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_weights_must_be_finite(weight: float) -> None:
    model = stacked()
    with pytest.raises(ConfigError, match="finite"):
        set_strength(model, "first", weight)
    with pytest.raises(ConfigError, match="finite"):
        activate(model, {"second": 0.5, "first": weight})
    assert layer_of(model).strengths == {"first": 1.0, "second": 1.0}


@pytest.mark.parametrize("act", [activate, delete, lambda model, name: set_strength(model, name, 1.0)])
def test_unknown_names_say_what_there_is(act: Callable[[nn.Module, str], object]) -> None:
    with pytest.raises(ConfigError, match=r"'frist'.*first, second"):
        act(stacked(), "frist")
    with pytest.raises(ConfigError, match="no LoRA layers"):
        act(KINDS[KIND].module(), "first")


def test_adapters_on_different_layers() -> None:
    """A layer without the name is left unchanged; a name no layer has is an error."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inject(model, 2, targets=["0"], name="front")
    inject(model, 2, targets=["1"], name="back")
    inject(model, 2, targets=["0", "1"], name="both")
    for name in ("front", "back", "both"):
        for layer in lora_layers(model).values():
            if name in layer.adapters:
                with torch.no_grad():
                    layer.branch(name).up.normal_()
    activate(model, {"back": 0.5, "both": 2.0})
    assert [layer.active for layer in lora_layers(model).values()] == [("both",), ("back", "both")]
    assert model[1].strengths["back"] == 0.5
    merge(model)
    unmerge(model)
    delete(model, "front")
    assert list(lora_layers(model)["0"].adapters) == ["both"]


def test_a_merge_that_fails_is_rolled_back_everywhere() -> None:
    """Fault injection at every layer: the model is left fully unmerged."""
    for broken in range(4):
        model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
        inject(model, 2, targets="all-linear")
        fill(model)
        with torch.no_grad():
            model[broken].branch("default").up[0, 0] = math.nan
        before = base_bits(model)
        with pytest.raises(TargetError, match=rf"^{broken}: "):
            merge(model)
        assert base_bits(model) == before
        assert not any(layer.merged for layer in lora_layers(model).values())


def test_a_failure_in_the_middle_of_a_write_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)])
    inject(model, 2, targets="all-linear")
    fill(model)
    before, copy_, calls = base_bits(model), torch.Tensor.copy_, []

    def failing(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        calls.append(self)
        done = copy_(self, other)
        if len(calls) == 2:
            raise MemoryError
        return done

    monkeypatch.setattr(torch.Tensor, "copy_", failing)
    with pytest.raises(MemoryError):
        merge(model)
    assert base_bits(model) == before
    assert not any(layer.merged for layer in lora_layers(model).values())


def test_moving_a_merged_model_keeps_the_way_back() -> None:
    model = stacked()
    saved = layer_of(model).weight.detach().clone()
    merge(model)
    model.double()
    unmerge(model)
    assert torch.equal(layer_of(model).weight, saved.double())


def test_the_repr_of_a_layer_describes_it() -> None:
    model = stacked()
    text = repr(model)
    for part in ("Conv2d(6, 9", "active: first, second", "rank=3, alpha=5"):
        assert part in text
    merge(model)
    assert "merged" in repr(model)
    assert isinstance(layer_of(model), LoraLayer)
