"""DoRA on layers with one output or one input, where a magnitude of one number could belong to either side."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import inweave
from inweave.errors import TargetError
from inweave.formats.read import read
from inweave.weights.source import DictSource
from tests.support import random, tensor

FACTORS = {
    "lora": {"lora_down.weight": (2, 0), "lora_up.weight": (-1, 2)},
    "loha": {"hada_w1_a": (-1, 2), "hada_w1_b": (2, 0), "hada_w2_a": (-1, 2), "hada_w2_b": (2, 0)},
    "lokr": {"lokr_w1": (1, 1), "lokr_w2": (-1, 0)},
}


SIDES = [(1, 7, (1,), 0), (1, 7, (1, 1), 0), (1, 7, (1, 7), 1), (7, 1, (7, 1), 0), (7, 1, (1, 1), 1), (1, 1, (1, 1), 0)]


@pytest.mark.parametrize("kind", FACTORS)
@pytest.mark.parametrize("kernel", [(), (3, 3)], ids=["linear", "convolution"])
@pytest.mark.parametrize(("out", "into", "magnitude", "side"), SIDES)
def test_a_magnitude_is_on_the_side_it_fits(
    kind: str, kernel: tuple[int, ...], out: int, into: int, magnitude: tuple[int, ...], side: int
) -> None:
    net = nn.Module()
    net.layer = layer = nn.Conv2d(into, out, 3) if kernel else nn.Linear(into, out)
    sizes = {-1: out, 0: into * 9 if kernel else into}
    tensors = {
        f"unet.layer.{role}": random(number, *(sizes.get(size, size) for size in shape))
        for number, (role, shape) in enumerate(FACTORS[kind].items())
    }
    base = DictSource({name: value.detach().clone() for name, value in net.state_dict().items()})
    changed = inweave.MergedSource(base, [(read(tensors), 1.0)]).get("layer.weight").double()
    numbers = np.linspace(0.5, 2, max(magnitude))
    shape = magnitude + (1,) * (changed.dim() - 2 if len(magnitude) > 1 else 0)
    dora = read(tensors | {"unet.layer.dora_scale": tensor(numbers.reshape(shape))})
    inweave.Weaver(net).apply([(dora, 1.0)])
    norms = changed.transpose(0, side).flatten(1).norm(dim=1)
    expected = changed.transpose(0, side) * (torch.from_numpy(numbers) / norms).reshape(-1, *[1] * (changed.dim() - 1))
    torch.testing.assert_close(layer.weight.double(), expected.transpose(0, side), rtol=1e-5, atol=1e-6)


def test_a_magnitude_that_fits_neither_side_is_the_reason() -> None:
    net = nn.Module()
    net.layer = nn.Linear(7, 1)
    pair = {"lora_down.weight": random(1, 2, 7), "lora_up.weight": random(2, 1, 2), "dora_scale": random(3, 5, 1)}
    with pytest.raises(TargetError, match=r"the base has \[1, 7\], the magnitude has 5 numbers, one per output"):
        inweave.Weaver(net).plan(read({f"unet.layer.{role}": value for role, value in pair.items()}))
