"""Fresh LoRAs with a Tucker core, against lycoris-lora."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from inweave.errors import ConfigError
from inweave.layers import attach, collect, inject
from tests.unit.layers.zoo import layer_of


def model() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"layer": nn.Conv2d(6, 5, 3, padding=1), "point": nn.Conv2d(6, 5, 1)})


def test_a_core_is_that_of_lycoris() -> None:
    locon = pytest.importorskip("lycoris.modules.locon")
    ours = model()
    inject(ours, 4, 2.0, ["layer", "point"], tucker=True, seed=3)
    pair: Any = layer_of(ours).branch("default")
    assert (pair.down.shape, pair.mid.shape, pair.up.shape) == ((4, 6, 1, 1), (4, 4, 3, 3), (5, 4, 1, 1))
    assert ours["point"].branch("default").mid is None
    bound = (4 * 9) ** -0.5  # that of nn.Conv2d
    assert 0.9 * bound < pair.mid.abs().max() <= bound and not pair.up.any()
    with torch.no_grad():
        pair.up.normal_()
    base = model()["layer"]
    theirs = locon.LoConModule("layer", base, lora_dim=4, alpha=2.0, use_tucker=True)
    assert {name: each.shape for name, each in theirs.named_parameters()} == {
        "lora_down.weight": pair.down.shape, "lora_mid.weight": pair.mid.shape, "lora_up.weight": pair.up.shape,
    }  # fmt: skip
    for role in ("down", "mid", "up"):
        getattr(theirs, f"lora_{role}").weight.data = getattr(pair, role).data
    theirs.apply_to()
    x = torch.randn(2, 6, 7, 7)
    torch.testing.assert_close(ours["layer"](x), base(x), rtol=1e-4, atol=1e-5)


def test_it_is_collected_and_attached_with_its_core() -> None:
    ours = model()
    inject(ours, 4, 2.0, ["layer"], tucker=True)
    with torch.no_grad():
        layer_of(ours).branch("default").up.normal_()
    again = model()
    attach(again, collect(ours))
    x = torch.randn(2, 6, 7, 7)
    torch.testing.assert_close(again["layer"](x), ours["layer"](x))


@pytest.mark.parametrize(("network", "kind", "prefix"), [("loha", "Loha", "hada_"), ("lokr", "Lokr", "lokr_")])
@pytest.mark.parametrize("groups", [1, 2])
def test_cores_of_loha_and_lokr_are_those_of_lycoris(network: str, kind: str, prefix: str, groups: int) -> None:
    module = pytest.importorskip(f"lycoris.modules.{network}")
    convs = [nn.Conv2d(12, 20, 3, padding=1, groups=groups) for _ in range(2)]
    convs[1].load_state_dict(convs[0].state_dict())
    ours, base = nn.ModuleDict({"layer": convs[0], "point": nn.Conv2d(12, 20, 1)}), convs[1]
    inject(ours, 2, 3.0, ["layer", "point"], network=network, tucker=True, seed=3)
    x = torch.randn(2, 12, 7, 7)
    assert torch.equal(ours["layer"](x), base(x))
    branch: Any = layer_of(ours).branch("default")
    assert branch.t2.shape == (2, 2, 3, 3) and ours["point"].branch("default").t2 is None
    with torch.no_grad():
        for parameter in branch.parameters():
            parameter.normal_()
    theirs = getattr(module, f"{kind}Module")("layer", base, lora_dim=2, alpha=3.0, use_tucker=True)
    own = {f"{prefix}{role}": value for role, value in branch.roles().items()}
    assert {name: each.shape for name, each in theirs.named_parameters()} == {n: each.shape for n, each in own.items()}
    for name, value in own.items():
        getattr(theirs, name).data = value.detach().clone()
    expected, output = theirs(x), ours["layer"](x)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    weights = torch.randn_like(output)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    for name, value in own.items():
        torch.testing.assert_close(value.grad, getattr(theirs, name).grad, rtol=1e-3, atol=1e-3)
    again = nn.ModuleDict({"layer": nn.Conv2d(12, 20, 3, padding=1, groups=groups), "point": nn.Conv2d(12, 20, 1)})
    again.load_state_dict({name: value for name, value in ours.state_dict().items() if "adapters" not in name})
    attach(again, collect(ours))
    torch.testing.assert_close(again["layer"](x), output)


def test_other_options_belong_to_their_algorithms() -> None:
    with pytest.raises(ConfigError, match="decompose_both and factor belong to lokr; loha does not use them"):
        inject(model(), 4, 2.0, ["layer"], network="loha", factor=2, decompose_both=True, tucker=True)
