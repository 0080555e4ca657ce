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


def test_other_algorithms_have_no_such_option() -> None:
    with pytest.raises(ConfigError, match="tucker belong to lora; loha does not use them"):
        inject(model(), 4, 2.0, ["layer"], network="loha", tucker=True)
