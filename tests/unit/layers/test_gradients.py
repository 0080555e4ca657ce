"""Every gradient against finite differences in float64: each kind of layer with each network.

    f(x, W, bias, factors...) -> y        all of them perturbed, along random directions

DoRA takes no gradient through its norms. The function that has exactly these gradients is the layer with its norms
held at their values, so that one is differentiated numerically, and the layer itself must give the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from inweave.adapter import Loha, Lokr, Lora
from inweave.layers.algorithms import to_branch
from inweave.layers.layer import LoraLayer
from inweave.ops.tensors.decode import encode
from tests.unit.layers.zoo import KINDS, NETWORKS, OPERATORS, fill, injected, layer_of

LORA: dict[str, dict[str, object]] = {
    "lora": {}, "rslora": {"rslora": True}, "dora": {"dora": True}, "no-alpha": {"alpha": None},
}  # fmt: skip
EXACT: dict[str, Any] = {"eps": 1e-6, "atol": 1e-6, "rtol": 1e-5, "fast_mode": True}
CASES = [(kind, name, options) for kind in KINDS if kind != "embedding-padding" for name, options in LORA.items()]
CASES += [(kind, name, options) for kind in OPERATORS for name, options in NETWORKS.items()]


def prepared(kind: str, options: dict[str, object]) -> nn.Module:
    model = KINDS[kind].module(dtype=torch.float64)
    injected(model, **{"rank": 2, "alpha": 3.0, "targets": ["layer"]} | options)  # type: ignore[arg-type]
    fill(model)
    return model


def as_function(model: nn.Module, x: torch.Tensor) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    """(a function of the input and all parameters, where to take it)."""
    names = [name for name, _ in model["layer"].named_parameters()]
    values = [value.detach().clone().requires_grad_() for _, value in model["layer"].named_parameters()]
    free = x.is_floating_point()

    def function(*inputs: torch.Tensor) -> torch.Tensor:
        input_, parameters = (inputs[0], inputs[1:]) if free else (x, inputs)
        return functional_call(model["layer"], dict(zip(names, parameters, strict=True)), (input_,))

    return function, [x.clone().requires_grad_(), *values] if free else values


def freeze_dora_norms(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the layer's current norms, whichever parameter is perturbed."""
    layer = layer_of(model)
    now = {name: layer.norms(layer.branch(name)) for name in layer.adapters}
    monkeypatch.setattr(LoraLayer, "norms", lambda self, branch: now["default"])


@pytest.mark.parametrize(
    ("kind", "network", "options"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_gradients(kind: str, network: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = prepared(kind, options), KINDS[kind].input(dtype=torch.float64)
    function, inputs = as_function(model, x)
    if not options.get("dora"):
        assert torch.autograd.gradcheck(function, inputs, **EXACT)
        return
    grad_output = torch.randn_like(function(*inputs))
    own = torch.autograd.grad(function(*inputs), inputs, grad_output)
    freeze_dora_norms(model, monkeypatch)
    assert torch.autograd.gradcheck(function, inputs, **EXACT)
    for mine, fixed in zip(own, torch.autograd.grad(function(*inputs), inputs, grad_output), strict=True):
        torch.testing.assert_close(mine, fixed, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("network", ["lora", "loha", "lokr"])
@pytest.mark.parametrize("kind", ["linear", "conv1D", "conv1d-groups", "conv2d-depthwise"])
def test_every_entry_of_the_jacobian(kind: str, network: str) -> None:
    """The random directions above miss nothing that this finds: number by number, on a few layers."""
    model = prepared(kind, {"network": network, "rank": 1})
    function, inputs = as_function(model, KINDS[kind].input(dtype=torch.float64)[:1])
    assert torch.autograd.gradcheck(function, inputs, **EXACT | {"fast_mode": False})


TUCKER = {
    "lora": Lora(
        down=encode(torch.randn(2, 3, 1, 1)), mid=encode(torch.randn(2, 2, 3, 3)), up=encode(torch.randn(5, 2, 1, 1))
    ),
    "loha": Loha(
        w1_a=encode(torch.randn(2, 5)),
        w1_b=encode(torch.randn(2, 3)),
        t1=encode(torch.randn(2, 2, 3, 3)),
        w2_a=encode(torch.randn(2, 5)),
        w2_b=encode(torch.randn(2, 3)),
        t2=encode(torch.randn(2, 2, 3, 3)),
    ),
    "lokr": Lokr(
        w1=encode(torch.randn(1, 1)),
        w2_a=encode(torch.randn(2, 5)),
        w2_b=encode(torch.randn(2, 3)),
        t2=encode(torch.randn(2, 2, 3, 3)),
    ),
}


@pytest.mark.parametrize("network", TUCKER)
def test_tucker_cores(network: str) -> None:
    model = prepared("conv2d", {})
    layer, cpu = layer_of(model), torch.device("cpu")
    layer.delete("default")
    layer.add("default", to_branch(TUCKER[network], layer.geometry, dtype=torch.float64, device=cpu))
    function, inputs = as_function(model, KINDS["conv2d"].input(dtype=torch.float64))
    assert torch.autograd.gradcheck(function, inputs, **EXACT)


def test_several_networks_on_one_layer() -> None:
    model = prepared("conv2d-groups", {"name": "default"})
    for name in ("loha", "lokr"):
        injected(model, 2, 3.0, ["layer"], name=name, network=name)  # type: ignore[arg-type]
        fill(model, name=name)
        layer_of(model).set_strength(name, -0.7)
    function, inputs = as_function(model, KINDS["conv2d-groups"].input(dtype=torch.float64))
    assert torch.autograd.gradcheck(function, inputs, **EXACT)


def test_second_derivatives_of_a_loha() -> None:
    """Its product has a gradient written by hand; that one can be differentiated again."""
    function, inputs = as_function(
        prepared("linear", {"network": "loha"}), KINDS["linear"].input(dtype=torch.float64)[:1, :1]
    )
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_transformers_own_conv1d() -> None:
    """The layers above have the zoo's Conv1D, which is a copy of its structure."""
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    for network in ("lora", "loha", "lokr"):
        model = nn.ModuleDict({"layer": pytorch_utils.Conv1D(6, 5)}).double()
        injected(model, 2, 3.0, ["layer"], network=network)  # type: ignore[arg-type]
        fill(model)
        function, inputs = as_function(model, torch.randn(2, 5, dtype=torch.float64))
        assert torch.autograd.gradcheck(function, inputs, **EXACT)


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from inweave.ops.delta import loha

    right = loha._Product.backward

    def wrong(ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, *others = right(ctx, *grads)
        return (first * 1.001, *others)

    monkeypatch.setattr(loha._Product, "backward", staticmethod(wrong))
    function, inputs = as_function(prepared("linear", {"network": "loha"}), KINDS["linear"].input(dtype=torch.float64))
    assert not torch.autograd.gradcheck(function, inputs, **EXACT, raise_exception=False)
