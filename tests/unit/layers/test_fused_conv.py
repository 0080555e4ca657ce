"""Convolutions fused with their LoRA, here on the CPU: the numbers of the general path, used only where allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from inweave import inject
from inweave.layers import fused, lora_layers
from inweave.layers.fused_conv import FusedConv
from inweave.layers.layer import LoraLayer
from inweave.ops.linear import Rounded

#: settings of nn.Conv2d, and the size of an image that they do not divide
WINDOWS: list[tuple[dict[str, Any], tuple[int, int]]] = [
    ({"kernel_size": 3, "padding": 1}, (6, 5)),
    ({"kernel_size": 3, "padding": 1, "stride": 2}, (7, 8)),
    ({"kernel_size": (2, 3), "padding": (0, 2), "stride": (2, 1), "dilation": (1, 2)}, (7, 9)),
    ({"kernel_size": 1}, (4, 5)),
    ({"kernel_size": 1, "stride": 2}, (5, 5)),
]


@pytest.fixture(autouse=True)
def fused_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(fused, "DTYPES", (*fused.DTYPES, torch.float64))


def layer_of(base: nn.Conv2d, dtype: torch.dtype = torch.float64, **options: Any) -> LoraLayer:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(base)
    model.to(dtype, memory_format=torch.channels_last).requires_grad_(False)  # type: ignore[call-overload]
    inject(model, 2, 3.0, ["0"], **options)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    return next(iter(lora_layers(model).values()))


def image(size: tuple[int, int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    x = torch.randn(2, 4, *size, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return x.contiguous(memory_format=torch.channels_last).requires_grad_()


def output(layer: LoraLayer, x: torch.Tensor) -> torch.Tensor | None:
    assert isinstance(layer.operation, FusedConv)
    return layer.operation.output(x, layer._acting, layer.training)


def results(layer: LoraLayer, x: torch.Tensor) -> list[torch.Tensor]:
    y = layer(x)
    leaves = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(2))
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("settings", "size"), WINDOWS, ids=str)
def test_numbers_and_gradients_are_those_of_the_general_path(
    settings: dict[str, Any], size: tuple[int, int], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = layer_of(nn.Conv2d(4, 6, bias=bias, **settings)), image(size)
    layer.set_strength("default", 0.3)
    y = output(layer, x)
    assert y is not None and y.is_contiguous(memory_format=torch.channels_last)
    ours = results(layer, x)
    with monkeypatch.context() as patch:
        patch.setattr(fused, "DEVICES", frozenset())
        theirs = results(layer, x)
    assert len(ours) == 4
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kernel", [1, 3])
def test_gradients_are_added_where_rounded_copies_have_them(kernel: int) -> None:
    layer, x = layer_of(nn.Conv2d(4, 6, kernel, padding=kernel // 2), torch.float32), image((5, 4), torch.bfloat16)
    layer.to(torch.bfloat16)
    branch: Any = layer.branch("default")
    for parameter in branch.parameters():
        parameter.data = parameter.data.float()
    _, of_x, *expected = results(layer, x)
    totals = {role: torch.ones_like(getattr(branch, role)) for role in ("down", "up")}
    branch.rounded = {role: Rounded(getattr(branch, role).bfloat16(), total) for role, total in totals.items()}
    y = layer(x)
    dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(2))
    y.backward(dy)
    assert x.grad is not None and torch.equal(x.grad, of_x) and branch.down.grad is None and branch.up.grad is None
    for total, gradient in zip(totals.values(), expected, strict=True):
        torch.testing.assert_close(total - 1, gradient, rtol=1e-2, atol=1e-2)


def test_frozen_factors_and_inputs_get_no_gradient() -> None:
    layer, x = layer_of(nn.Conv2d(4, 6, 3)), image((5, 5))
    branch: Any = layer.branch("default")
    whole = results(layer, x)
    branch.down.requires_grad_(False)
    y = layer(x.detach())
    dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(2))
    y.backward(dy)
    assert branch.down.grad is None and torch.allclose(branch.up.grad, whole[3])


def test_no_image_has_no_gradient() -> None:
    layer, x = layer_of(nn.Conv2d(4, 6, 3)), image((5, 5))[:0].detach().contiguous(memory_format=torch.channels_last)
    assert output(layer, x.requires_grad_()) is not None
    y, *gradients = results(layer, x)
    assert y.shape == (0, 6, 3, 3) and not any(gradient.any() for gradient in gradients)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_anything_else_takes_the_general_path() -> None:
    x = image((5, 5))
    layer = layer_of(nn.Conv2d(4, 6, 3))
    base_layer: Any = layer.base
    assert output(layer, x) is not None
    assert output(layer, x.detach().contiguous()) is None, "memory that is not channels-last"
    assert output(layer, x.detach()[0]) is None, "one image without a batch"
    with torch.no_grad():
        assert output(layer, x) is None
    with Watching():
        assert output(layer, x) is None, "selective checkpointing stores the convolution's output"
    with torch.autocast("cpu", torch.bfloat16):
        assert output(layer, x) is None
    handle = layer.base.register_forward_hook(lambda *_: None)
    assert output(layer, x) is None
    handle.remove()
    base_layer.padding_mode = "circular"
    assert output(layer, x) is None, "set on a live model, for images that tile"
    base_layer.padding_mode = "zeros"
    base_layer._conv_forward = lambda x, weight, bias: nn.functional.conv2d(x, weight, bias, padding=2)
    assert output(layer, x) is None, "replaced in this module alone, for images that tile along one side"
    del base_layer._conv_forward
    assert output(layer, x) is not None
    layer.weight.requires_grad_(True)
    assert output(layer, x) is None, "a weight that is trained"
    bases: list[Callable[[], nn.Conv2d]] = [
        lambda: nn.Conv2d(4, 6, 3, groups=2),
        lambda: nn.Conv2d(4, 6, 3, padding="same"),
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
    ]
    for base in bases:
        other = layer_of(base())
        assert other.operation is None and torch.isfinite(other(x)).all()
    dropping = layer_of(nn.Conv2d(4, 6, 3), dropout=0.5)
    dropping.train()
    assert output(dropping, x) is None
    assert output(layer_of(nn.Conv2d(4, 6, 3), dora=True), x) is None
    twice = layer_of(nn.Conv2d(4, 6, 3))
    twice.add("more", layer_of(nn.Conv2d(4, 6, 3)).branch("default"))
    assert output(twice, x) is None, "two adapters"
