"""The embedded model's UNet while its weights do not change: predictions as without, and nothing of other weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

import inweave
from inweave.generate.pipeline import Pipeline
from inweave.models.sd import steady as steadying
from inweave.models.sd.steady import is_faster, steady
from inweave.models.sd.unet import UNet2DConditionModel

CLOSE = 2e-5  # of the largest value: float32 rounds each of a hundred layers


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    own = inweave.pipeline("inweave/emoji", device="cpu")
    if not is_faster(own.model.denoiser):
        pytest.skip("this processor's kernels have no order of their own")
    yield own


@pytest.fixture
def unet(pipe: Pipeline) -> UNet2DConditionModel:
    network: UNet2DConditionModel = pipe.model.denoiser
    return network


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert float((actual - expected).abs().max()) <= CLOSE * float(expected.abs().max())


TEXT = noise(6, 32, 192, seed=5)
TWO_ALIKE = torch.cat([noise(1, 8, 8, 8)] * 2 + [noise(1, 8, 8, 8, seed=2)])
CASES: dict[str, tuple[Tensor, Tensor]] = {
    "guided": (noise(1, 8, 8, 8).repeat(2, 1, 1, 1), torch.tensor(500)),
    "two guided images": (noise(2, 8, 8, 8).repeat_interleave(2, 0), torch.tensor(20.0)),
    "two images with three prompts each": (noise(2, 8, 8, 8).repeat_interleave(3, 0), torch.tensor(700)),
    "rows of their own": (noise(3, 8, 8, 8), torch.tensor([300])),
    "copies that do not divide the rows": (TWO_ALIKE, torch.tensor(1)),
    "a time for each row": (noise(1, 8, 8, 8).repeat(2, 1, 1, 1), torch.tensor([10.0, 900.0])),
    "uneven sides": (noise(1, 8, 7, 9).repeat(2, 1, 1, 1), torch.tensor(500)),
    "one row": (noise(1, 8, 8, 8), torch.tensor(999)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_predictions_are_those_of_the_plain_network(unet: UNet2DConditionModel, case: str) -> None:
    rows, t = CASES[case]
    text, other = TEXT[: len(rows)].clone(), TEXT[6 - len(rows) :].flip(1)
    expected, another = unet(rows, t, text)[0], unet(rows, t + 3, other)[0]
    with steady(unet):
        for _ in range(2):
            assert_close(unet(rows, t, text)[0], expected)
            assert_close(unet(rows, t + 3, other)[0], another)
        text.copy_(other)
        assert_close(unet(rows, t + 3, text)[0], another)
    assert torch.equal(unet(rows, t + 3, other)[0], another)


@torch.no_grad()
def test_nothing_is_left_after_an_error(unet: UNet2DConditionModel) -> None:
    rows, t = CASES["guided"]
    kinds = [type(module) for module in unet.modules()]
    expected = unet(rows, t, TEXT[:2])[0]
    with pytest.raises(RuntimeError), steady(unet):
        unet(rows, t, TEXT[:2])
        unet(rows, t, TEXT[:2, :, :7])
    assert [type(module) for module in unet.modules()] == kinds
    names = {*steadying._KEPT, "has_hooks", "writes"}
    assert not any(names & vars(module).keys() for module in unet.modules())
    assert torch.equal(unet(rows, t, TEXT[:2])[0], expected)


@torch.no_grad()
def test_weights_that_are_written_are_the_ones_that_are_used(unet: UNet2DConditionModel) -> None:
    """Every block reads all weights anew, however they were written."""
    rows, t = CASES["guided"]
    plain = unet(rows, t, TEXT[:2])[0]
    block = unet.mid_block.attentions[0].transformer_blocks[0]
    layers = unet.down_blocks[0].resnets[0].conv1, block.attn2.to_k, block.attn2.to_v, block.attn1.to_q
    for layer in layers:
        with steady(unet):
            assert_close(unet(rows, t, TEXT[:2])[0], plain)
            layer.weight.mul_(3)
            written = unet(rows, t, TEXT[:2])[0]
        expected = unet(rows, t, TEXT[:2])[0]
        assert_close(written, expected)
        assert not torch.equal(expected, plain)
        with steady(unet):
            assert_close(unet(rows, t, TEXT[:2])[0], expected)
        layer.weight.data.div_(3)  # counted by no version
        with steady(unet):
            assert_close(unet(rows, t, TEXT[:2])[0], plain)
        own, layer.weight.data = layer.weight.data, layer.weight.data.clone()
        with steady(unet):
            assert_close(unet(rows, t, TEXT[:2])[0], plain)
        layer.weight.data = own


@torch.no_grad()
def test_a_layer_with_a_hook_is_called_with_all_rows(unet: UNet2DConditionModel) -> None:
    rows, t = CASES["guided"]
    first = unet.down_blocks[0].attentions[0]
    for layer in (unet.conv_in, first.proj_in, first.transformer_blocks[0].attn1.to_k, first.proj_out):
        seen: list[int] = []

        def change(layer: Any, into: Any, output: Tensor, seen: list[int] = seen) -> Tensor:
            seen.append(len(output))
            return output + torch.arange(len(output)).view(-1, *[1] * (output.dim() - 1))

        handle = layer.register_forward_hook(change)
        try:
            expected = unet(rows, t, TEXT[:2])[0]
            with steady(unet):
                assert_close(unet(rows, t, TEXT[:2])[0], expected)
        finally:
            handle.remove()
        assert seen == [2, 2]


def test_a_swap_between_two_steps_acts_from_the_next_one_on(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def image() -> np.ndarray[Any, Any]:
        def swap(at: Any) -> None:
            pipe.swap(["ink:1.0"] if at.step == 1 else [])

        try:
            return np.asarray(pipe("a cat", width=64, height=64, steps=3, seed=7, progress=swap).images[0], int)
        finally:
            pipe.swap([])

    mine = image()
    monkeypatch.setattr(steadying, "is_faster", lambda network: False)
    assert np.abs(mine - image()).max() <= 1
    assert np.abs(mine - np.asarray(pipe("a cat", width=64, height=64, steps=3, seed=7).images[0], int)).max() > 5


def test_an_image_may_be_made_in_inference_mode(pipe: Pipeline) -> None:
    settings: dict[str, Any] = {"width": 64, "height": 64, "steps": 2, "seed": 7}
    with torch.inference_mode():
        mine = np.asarray(pipe("a red pear", **settings).images[0], int)
    for _ in range(2):
        assert np.abs(mine - np.asarray(pipe("a red pear", **settings).images[0], int)).max() <= 1


def test_images_follow_the_loras_of_their_requests(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"width": 64, "height": 64, "steps": 3, "seed": 7}
    stacks: list[list[str]] = [[], ["pixel:0.9"], ["ink:1.0"], ["pixel:0.9"], []]

    def images() -> list[np.ndarray[Any, Any]]:
        return [np.asarray(pipe("a red apple", loras=each, **settings).images[0], int) for each in stacks]

    mine = images()
    monkeypatch.setattr(steadying, "is_faster", lambda network: False)
    for one, two in zip(mine, images(), strict=True):
        assert np.abs(one - two).max() <= 1 and (one != two).mean() < 0.01
    assert np.array_equal(mine[0], mine[4]) and np.array_equal(mine[1], mine[3])
    assert np.abs(mine[0] - mine[1]).max() > 20 and np.abs(mine[1] - mine[2]).max() > 20
