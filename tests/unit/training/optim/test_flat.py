"""Flat parameters: views of two buffers, aligned, one learning rate per block, saved and loaded by name."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load, save
from torch import nn

from inweave.errors import ConfigError, FormatError
from inweave.training.optim.flat import FlatParameters, collect_gradients

SHAPES = {"a": (3, 5), "b": (64,), "c": (7, 2, 3, 3), "d": (1,), "e": (40, 40)}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("groups", [{}, {"b": 16.0, "d": 16.0}, {"a": 0.0, "c": 2.0, "e": 0.5}])
def test_layout(groups: dict[str, float]) -> None:
    named_parameters = parameters()
    before = {name: parameter.detach().clone() for name, parameter in named_parameters.items()}
    flat = FlatParameters(named_parameters, groups)
    assert flat.values.numel() == flat.grads.numel() == 256 * flat.multipliers.numel()
    used = torch.zeros(flat.values.numel(), dtype=torch.bool)
    for name, (segment, shape) in flat.segments.items():
        assert segment.start % 64 == 0 and shape == SHAPES[name]
        assert not used[segment].any()
        used[segment] = True
        blocks = flat.multipliers[segment.start // 256 : (segment.stop - 1) // 256 + 1]
        assert (blocks == groups.get(name, 1.0)).all(), "a block has the multiplier of everything in it"
        assert torch.equal(named_parameters[name], before[name])
        assert named_parameters[name].data_ptr() == flat.values[segment].data_ptr()
        assert (
            named_parameters[name].grad is not None
            and named_parameters[name].grad.data_ptr() == flat.grads[segment].data_ptr()
        )
    assert set(flat.segments) == set(SHAPES)
    assert (flat.values[~used] == 0).all()
    assert flat.uniform == (not groups)


def test_backward_adds_into_the_buffer() -> None:
    named_parameters = parameters()
    flat = FlatParameters(named_parameters)
    for _ in range(2):
        sum((i + 1) * parameter.sum() for i, parameter in enumerate(named_parameters.values())).backward()
    for i, (segment, _) in enumerate(flat.segments.values()):
        assert (flat.grads[segment] == 2 * (i + 1)).all()
    named_parameters["a"].grad = None
    named_parameters["b"].grad = torch.ones(64)
    flat.zero_grads()
    assert (flat.grads == 0).all()
    (named_parameters["a"].sum() + named_parameters["b"].sum()).backward()
    assert (flat.grads[flat.segments["a"].place] == 1).all() and (flat.grads[flat.segments["b"].place] == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_master_weights_are_float32(dtype: torch.dtype) -> None:
    named_parameters = parameters(dtype)
    before = {name: parameter.detach().float() for name, parameter in named_parameters.items()}
    FlatParameters(named_parameters)
    assert all(p.dtype == torch.float32 and torch.equal(p, before[name]) for name, p in named_parameters.items())
    named_parameters["e"].square().sum().backward()
    gradient = named_parameters["e"].grad
    assert gradient is not None and torch.equal(gradient, 2 * before["e"])


def test_another_memory_format_keeps_its_values() -> None:
    weight = torch.randn(4, 6, 3, 3).contiguous(memory_format=torch.channels_last)
    named_parameters = {"w": nn.Parameter(weight.clone(memory_format=torch.preserve_format))}
    flat = FlatParameters(named_parameters)
    assert torch.equal(named_parameters["w"], weight) and torch.equal(flat.state()["w"], weight)


def test_state_round_trip_through_a_file() -> None:
    flat = FlatParameters(parameters(), {"a": 2.0})
    copy = flat.values.clone()
    state = load(save(flat.state()))
    flat.values.zero_()
    flat.load(state)
    assert torch.equal(flat.values, copy)
    with pytest.raises(FormatError, match="lacks 'a'"):
        flat.load({name: tensor for name, tensor in state.items() if name != "a"})
    with pytest.raises(FormatError, match="'z'"):
        flat.load({**state, "z": state["a"]})
    with pytest.raises(FormatError, match="shape"):
        flat.load({**state, "a": state["b"]})
    assert torch.equal(flat.values, copy)


def test_layout_digest_tells_orders_apart() -> None:
    one, two = FlatParameters(parameters()), FlatParameters(parameters(), {"a": 3.0})
    assert torch.equal(one.layout, FlatParameters(parameters()).layout)
    assert not torch.equal(one.layout, two.layout)


def test_problems_are_all_named() -> None:
    named_parameters = parameters()
    with pytest.raises(ConfigError, match="nothing to train"):
        FlatParameters({})
    named_parameters["same"] = named_parameters["a"]
    named_parameters["whole"] = nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)
    with pytest.raises(ConfigError) as caught:
        FlatParameters(named_parameters, {"x": 1.0, "b": -1.0, "c": float("nan")})
    assert len(caught.value.problems) == 5


def test_gradients_that_are_collect_gradients_have_the_bits_of_those_added_one_by_one() -> None:
    torch.manual_seed(0)
    parameters = {name: nn.Parameter(torch.randn(3, size)) for name, size in (("a", 4), ("b", 70), ("unused", 2))}
    flat = FlatParameters(parameters)
    x = torch.randn(5, 3)

    def backward() -> None:
        a, b = parameters["a"], parameters["b"]
        ((x @ a).square().sum() + (x @ b).sin().sum() + (x @ a).sum()).backward()

    flat.zero_grads()
    backward()
    backward()
    expected = flat.grads.clone()
    flat.zero_grads()
    leaves = list(parameters.values())
    before = [leaf.grad for leaf in leaves]
    for _ in range(2):
        with collect_gradients(leaves):
            backward()
    assert torch.equal(flat.grads, expected) and expected.abs().max() > 0
    assert all(leaf.grad is view for leaf, view in zip(leaves, before, strict=True))
    with pytest.raises(RuntimeError, match="stop"), collect_gradients(leaves):
        backward()
        raise RuntimeError("stop")
    assert torch.equal(flat.grads, expected), "a backward pass that failed adds nothing"
    assert all(leaf.grad is view for leaf, view in zip(leaves, before, strict=True))
