"""The same factors in LyCORIS' modules and in inweave's: the same outputs, gradients and initial values.

LyCORIS is compared where it is right: its forward scales once, while its `get_diff_weight` and `merge_to` scale a
LoHa or LoKr twice (4.1); it knows neither padding modes nor transformers' Conv1D.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from inweave.adapter import Form
from inweave.adapter.lokr import split_factors
from inweave.formats.read import read
from inweave.layers import attach, collect, merge
from inweave.ops.tensors.decode import decode, encode
from tests.unit.layers.zoo import fill, injected, layer_of

factorization = pytest.importorskip("lycoris.functional").factorization
MODULES = {
    "loha": pytest.importorskip("lycoris.modules.loha").LohaModule,
    "lokr": pytest.importorskip("lycoris.modules.lokr").LokrModule,
}
CASES: dict[str, dict[str, object]] = {
    "loha": {"network": "loha", "rank": 3},
    "loha-rslora": {"network": "loha", "rank": 4, "rslora": True},
    "lokr": {"network": "lokr", "rank": 2},
    "lokr-full": {"network": "lokr", "rank": 30},
    "lokr-factor": {"network": "lokr", "rank": 2, "factor": 2},
    "lokr-both": {"network": "lokr", "rank": 1, "factor": 6, "decompose_both": True},
}
LAYERS = {
    "linear": (lambda: nn.Linear(12, 30), (3, 4, 12)),
    "conv1d": (lambda: nn.Conv1d(12, 10, 3, padding=1, stride=2), (2, 12, 8)),
    "conv2d": (lambda: nn.Conv2d(12, 18, 3, padding=2, stride=2, dilation=2), (2, 12, 6, 7)),
    "conv2d-groups": (lambda: nn.Conv2d(24, 18, 3, padding=1, groups=2), (2, 24, 5, 5)),
    "conv2d-1x1": (lambda: nn.Conv2d(12, 24, 1), (2, 12, 3, 3)),
}


def twins(kind: str, case: str) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """(our model, LyCORIS' module on the same layer, input), each with its own initial values."""
    make, shape = LAYERS[kind]
    torch.manual_seed(0)
    base = nn.ModuleDict({"layer": make()})
    options = CASES[case]
    peer = MODULES[str(options["network"])](
        "layer",
        copy.deepcopy(base["layer"]),
        lora_dim=options["rank"],
        alpha=5.0,
        rs_lora=options.get("rslora", False),
        **{name: options[name] for name in ("factor", "decompose_both") if name in options},
    )
    return injected(base, alpha=5.0, targets=["layer"], **options), peer, torch.randn(shape)  # type: ignore[arg-type]


def stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors as LyCORIS stores them in a file."""
    tensors = collect(model).entries[0].factors.spelled(Form("kohya"), "weight")
    assert isinstance(tensors, dict)
    return {suffix: decode(value) for suffix, value in tensors.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", LAYERS)
def test_our_values_in_their_module(kind: str, case: str) -> None:
    model, peer, x = twins(kind, case)
    fill(model)
    state = stored(model)
    theirs = peer.state_dict()
    assert {name: value.shape for name, value in state.items()} == {name: value.shape for name, value in theirs.items()}
    assert float(state["alpha"]) == pytest.approx(float(theirs["alpha"]))
    peer.load_state_dict(state)
    ours, got = model["layer"](x), peer(x)
    assert (ours - layer_of(model).base(x)).abs().max() > 0.1
    torch.testing.assert_close(ours, got, rtol=1e-4, atol=1e-4)
    grad_output = torch.randn_like(ours)
    ours.backward(grad_output), got.backward(grad_output)
    branch = layer_of(model).branch("default")
    for suffix, parameter in peer.named_parameters():
        if parameter.grad is not None and suffix in theirs:
            mine = dict(branch.named_parameters())[suffix.removeprefix("hada_").removeprefix("lokr_")].grad
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-3, atol=1e-3)
    delta = peer.get_weight(peer.shape).detach()  # with its scale
    before = layer_of(model).weight.detach().clone()
    merge(model)
    torch.testing.assert_close(layer_of(model).weight - before, delta, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", LAYERS)
def test_their_values_in_our_layer(kind: str, case: str) -> None:
    model, peer, x = twins(kind, case)
    with torch.no_grad():
        for parameter in peer.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.4)
    state = {f"lora_unet_layer.{name}": encode(value.float()) for name, value in peer.state_dict().items()}
    twin = attach(nn.ModuleDict({"layer": copy.deepcopy(layer_of(model).base)}), read(state))
    torch.testing.assert_close(twin["layer"](x), peer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_initial_values_have_the_same_standard_deviation(case: str) -> None:
    options = CASES[case] | {"rank": 1000 if case == "lokr-full" else 4}
    torch.manual_seed(0)
    base = nn.ModuleDict({"layer": nn.Linear(400, 900)})
    peer = MODULES[str(options["network"])](
        "layer", base["layer"], lora_dim=options["rank"],
        **{name: options[name] for name in ("factor", "decompose_both") if name in options},
    )  # fmt: skip
    theirs = {name.split("_", 1)[1]: value for name, value in peer.state_dict().items() if name != "alpha"}
    model = injected(base, alpha=5.0, targets=["layer"], **options)  # type: ignore[arg-type]
    ours = layer_of(model).branch("default").roles()
    assert ours.keys() == theirs.keys()
    for role, value in ours.items():
        assert value.shape == theirs[role].shape
        if value.numel() > 100:  # too few for a standard deviation
            assert float(value.detach().std()) == pytest.approx(float(theirs[role].std()), rel=0.1), role
        assert bool(value.any()) == bool(theirs[role].any())


def test_sizes_are_cut_as_there() -> None:
    for size in range(1, 400):
        for factor in (-1, 1, 2, 3, 4, 5, 6, 8, 12, 16, 17, 64, 500):
            assert split_factors(size, factor) == factorization(size, factor), (size, factor)
