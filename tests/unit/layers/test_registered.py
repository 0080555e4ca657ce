"""A user's own layer kinds: subclasses that do more, other layouts, functions of their own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

import inweave
from inweave.errors import ConfigError, TargetError
from inweave.formats.read import read
from inweave.layers import (
    LayerKind,
    LinearKind,
    attach,
    collect,
    delete,
    eject,
    inject,
    lora_layers,
    merge,
    model_index,
    register_layer,
    trainable,
    unmerge,
)
from inweave.ops.kinds import registry
from inweave.targets.resolve import resolve
from inweave.weights.merged import MergedSource
from inweave.weights.source import DictSource
from tests.support import random
from tests.unit.layers.zoo import base_bits, fill, injected, layer_of


class Residual(nn.Linear):
    """More than a Linear: its own output has the input, normed by a child module, added to it."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, x: torch.Tensor, gain: float = 0.5) -> torch.Tensor:
        return super().forward(x) + gain * self.norm(x)


class Doubled(nn.Linear):
    """A multiple of a Linear: a change of the weight counts twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Clipped(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.mean()


class InOut(nn.Module):
    """No subclass of anything: its weight is stored as (in, out)."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(into, out))
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class Reversed(nn.Module):
    """An exotic function: the input is reversed before the product."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, into))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.flip(-1), self.weight)


@dataclass(frozen=True)
class ReversedKind(LayerKind):
    def apply(self, module: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.flip(-1), weight)


@dataclass(frozen=True)
class DoubledKind(LinearKind):
    def apply(self, module: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return 2 * functional.linear(x, weight)

    apply_low_rank = LayerKind.apply_low_rank


@pytest.fixture(autouse=True)
def empty_registry() -> Iterator[None]:
    before = dict(registry._REGISTERED)
    yield
    registry._REGISTERED.clear()
    registry._REGISTERED.update(before)


def register_all() -> None:
    register_layer(Residual, kind="linear")
    register_layer(Clipped, kind="conv2d")
    register_layer(InOut, kind=LinearKind(transposed=True))
    register_layer(Reversed, kind=ReversedKind())
    register_layer(Doubled, kind=DoubledKind())


LAYERS = {
    "residual": (lambda: Residual(6), (3, 6)),
    "conv": (lambda: Clipped(3, 4, 3, padding=1), (2, 3, 5, 5)),
    "in-out": (lambda: InOut(5, 7), (2, 3, 5)),
    "in-out-square": (lambda: InOut(5, 5), (2, 3, 5)),
    "reversed": (lambda: Reversed(5, 7), (2, 5)),
    "doubled": (lambda: Doubled(5, 7), (2, 5)),
}
NETWORKS: dict[str, dict[str, object]] = {
    "lora": {},
    "dora": {"dora": True},
    "loha": {"network": "loha"},
    "lokr": {"network": "lokr"},
}


def model_of(name: str) -> tuple[nn.ModuleDict, torch.Tensor]:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    return nn.ModuleDict({"layer": make()}), torch.randn(shape)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", LAYERS)
def test_the_change_is_added_to_the_layers_own_output(name: str, network: str) -> None:
    register_all()
    model, x = model_of(name)
    base, before = model["layer"], model["layer"](x)
    saved, names = base_bits(model), list(model.state_dict())
    injected(model, 3, 5.0, ["layer"], **NETWORKS[network])
    torch.testing.assert_close(model["layer"](x), before)
    fill(model)
    layer, branch = layer_of(model), layer_of(model).branch("default")
    got = model["layer"](x)
    if network != "dora":
        change = layer.kind.apply(base, x, branch.product().reshape(layer.out, *layer.into))
        torch.testing.assert_close(got, before + branch.scale * change, rtol=1e-4, atol=1e-4)
    merge(model)
    torch.testing.assert_close(model["layer"](x), got, rtol=1e-4, atol=1e-4)
    unmerge(model)
    assert base_bits(model) == saved and [n for n in model.state_dict() if ".adapters." not in n] == names
    twin = attach(model_of(name)[0], collect(model))
    torch.testing.assert_close(twin["layer"](x), got)
    eject(model)
    assert model["layer"] is base and torch.equal(model["layer"](x), before)


@pytest.mark.parametrize("name", ["in-out", "in-out-square"])
def test_a_transposed_weight_by_every_road(name: str) -> None:
    """A file does not know how a module stores its weight; a registered kind does, also where the shape is square."""
    register_all()
    base, x = model_of(name)
    into, out = base.get_parameter("layer.weight").shape
    adapter = read(
        {"lora_unet_layer.lora_down.weight": random(0, 3, into), "lora_unet_layer.lora_up.weight": random(1, out, 3)}
    )
    model = attach(copy.deepcopy(base), adapter)
    branch = layer_of(model).branch("default")
    expected = base["layer"](x) + functional.linear(
        functional.linear(x, branch.get_parameter("down")), branch.get_parameter("up")
    )
    torch.testing.assert_close(model["layer"](x), expected)
    attach(model, adapter, name="again")
    torch.testing.assert_close(model["layer"](x), 2 * expected - base["layer"](x))
    delete(model, "again")
    live = copy.deepcopy(base)
    weaver = inweave.Weaver({"unet": live})
    weaver.apply([(adapter, 1.0)])
    torch.testing.assert_close(live["layer"](x), expected)
    weaver.apply([])
    assert base_bits(live) == base_bits(base)
    weaver.apply([(collect(model, component="unet"), 1.0)])
    torch.testing.assert_close(live["layer"](x), expected)
    plan = resolve(collect(model), model_index(base))
    source = MergedSource(
        DictSource({key: value.detach().clone() for key, value in base.state_dict().items()}), [(plan, 1.0)]
    )
    merge(model)
    torch.testing.assert_close(source.get("layer.weight"), layer_of(model).weight)


def test_children_of_a_registered_module_stay_in_the_model() -> None:
    register_all()
    model, x = model_of("residual")
    inject(model, 2, targets=["layer"])
    fill(model)
    assert {"layer.norm.weight", "layer.norm.bias"} <= dict(model.named_parameters()).keys()
    before = model["layer"](x)
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model["layer"].norm.weight.zero_()
    assert not torch.equal(model["layer"](x), before)
    model.load_state_dict(state)
    assert torch.equal(model["layer"](x), before)
    assert model.double()["layer"](x.double()).dtype == torch.float64
    assert trainable(model, ["norm"]) == ["layer.norm.weight", "layer.norm.bias"]


def test_further_arguments_reach_the_module() -> None:
    register_all()
    model, x = model_of("residual")
    own = model["layer"](x, gain=2.0)
    inject(model, 2, targets=["layer"])
    assert torch.equal(model["layer"](x, gain=2.0), own)


def test_a_layer_and_its_inside_are_not_adapted_together() -> None:
    class Holder(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.inner(x)

    register_layer(Holder, kind="linear")
    model = nn.ModuleDict({"layer": Holder()})
    with pytest.raises(TargetError, match="modules inside it are targets too"):
        inject(model, 2, targets=["layer", "inner"])
    inject(model, 2, targets=["inner"])
    with pytest.raises(TargetError, match="already carry adapters"):
        inject(model, 2, targets=["layer"], name="other")


def test_all_linear_takes_registered_linear_layers() -> None:
    register_all()
    model = nn.ModuleDict(
        {"own": Residual(4), "in_out": InOut(3, 4), "exotic": Reversed(4, 4), "plain": nn.Linear(4, 4)}
    )
    assert set(lora_layers(inject(model, 2))) == {"own", "in_out", "plain"}


def test_unregistered_layers_are_refused_with_the_way_out() -> None:
    for name, reason in (
        ("residual", "computed from other"),
        ("doubled", r"register_layer\(Doubled, kind=\.\.\.\)"),
        ("in-out", r"register_layer\(InOut, kind=\.\.\.\)"),
        ("reversed", "register_layer"),
    ):
        model, _ = model_of(name)
        with pytest.raises(TargetError, match=reason):
            inject(model, 2, targets=["layer"])


def test_a_kind_that_promises_too_much_is_not_merged() -> None:
    """Registered as a plain linear layer, the change is added once to the output, but a merge would count it twice."""
    register_layer(Doubled, kind="linear")
    model, x = model_of("doubled")
    before = model["layer"](x)
    inject(model, 2, targets=["layer"])
    fill(model)
    branch = layer_of(model).branch("default")
    torch.testing.assert_close(model["layer"](x), before + branch.scale * functional.linear(x, branch.product()))
    with pytest.raises(TargetError, match="does more with its weight"):
        merge(model)
    assert not layer_of(model).merged


def test_a_registration_holds_for_subclasses_and_the_nearest_wins() -> None:
    class Child(Doubled):
        pass

    register_layer(nn.Linear, kind="linear")
    register_layer(Doubled, kind=DoubledKind())
    assert isinstance(registry.kind_of(Child(2, 2)), DoubledKind)
    assert type(registry.kind_of(nn.Linear(2, 2))) is LinearKind


def test_what_cannot_be_registered() -> None:
    with pytest.raises(ConfigError, match=r"derived from torch\.nn\.Module"):
        register_layer(Residual(4), kind="linear")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kind must be one of 'linear', 'conv1d'"):
        register_layer(Residual, kind="dense")
    with pytest.raises(ConfigError, match=r"not derived from torch\.nn\.Conv2d.*LayerKind"):
        register_layer(InOut, kind="conv2d")

    class Nameless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.ones(3, 3))

    register_layer(Nameless, kind="linear")
    with pytest.raises(TargetError, match="no parameter called weight"):
        inject(nn.ModuleDict({"layer": Nameless()}), 2, targets=["layer"])


def test_training_targets_include_registered_layers() -> None:
    from inweave.training.adapters.targets import select_modules
    from inweave.training.config.schema import TrainConfig

    config = TrainConfig(dataset="-", targets=["own", "plain", "table"])  # type: ignore[arg-type]
    network = nn.ModuleDict({"own": InOut(3, 4), "plain": nn.Linear(4, 4), "table": nn.Embedding(4, 4)})
    assert select_modules("unet", network, config) == ["plain"]
    register_all()
    assert select_modules("unet", network, config) == ["own", "plain"]
