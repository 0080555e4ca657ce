"""Blocks that are streamed from host memory compute the same bits as resident ones, whatever the timing of copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from inweave.errors import MemoryBudgetError
from inweave.layers import inject, lora_layers
from inweave.ops.quantized import FORMATS, joint_weight
from inweave.weights.streaming import arena
from inweave.weights.streaming.arena import REST, divide
from inweave.weights.streaming.copies import HostCopies
from inweave.weights.streaming.stream import BlockStream, listed_blocks

CPU, WIDTH = torch.device("cpu"), 64


class Block(nn.Module):
    """Two streams, one of which every second block passes on unchanged; a product that has no path to the inputs."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.modulation, self.shift = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.passes_on = number % 2 == 1
        self.register_buffer("offset", torch.randn(WIDTH))

    def forward(self, x: torch.Tensor, *, text: torch.Tensor, time: torch.Tensor) -> Any:
        shift = self.shift(torch.tanh(self.modulation(time)))
        x = x + self.second(torch.relu(self.first(x + shift))) + self.offset
        return x, text if self.passes_on else text + shift


class Network(nn.Module):
    def __init__(self, depth: int, recompute: bool) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(number) for number in range(depth))
        self.recompute = recompute
        self.skips: set[int] = set()

    def forward(self, x: torch.Tensor, text: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        x = early = self.enter(x)
        for number, block in enumerate(self.blocks):
            if number in self.skips:
                continue
            if self.recompute and torch.is_grad_enabled():
                x, text = checkpoint(block, x, text=text, time=time, use_reentrant=False)
            else:
                x, text = block(x, text=text, time=time)
            early = x if number == 0 else early
        out: torch.Tensor = self.leave(x * text + early)  # a skip connection
        return out


class Late(HostCopies):
    """Copies that happen at the last moment, into slots whose old contents are destroyed at the first."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []

    def send(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        target.fill_(255)  # as floats: NaN
        self.waiting.append((target, source))
        return self.waiting[-1]

    def wait(self, event: Any) -> None:
        """Do the copy, and those before it, as a stream would."""
        while any(each is event for each in self.waiting):
            target, source = self.waiting.pop(0)
            target.copy_(source)

    def join(self) -> None:
        for event in list(self.waiting):
            self.wait(event)


def network(depth: int = 5, *, recompute: bool = False, quantize: str = "off", first: int = 0) -> Network:
    """A network with adapters on its blocks from ``first`` on."""
    torch.manual_seed(0)
    model = Network(depth, recompute).requires_grad_(False)
    if quantize != "off":
        block: Any
        for block in model.blocks:
            FORMATS[quantize].quantize(block.first)
            FORMATS[quantize].quantize(block.modulation, block.shift)
    names = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and name.startswith("blocks.")]
    inject(model, 4, 4.0, [name for name in names if int(name.split(".")[1]) >= first], name="a")
    for number, layer in enumerate(lora_layers(model).values()):
        for parameter in layer.adapters.parameters():
            torch.manual_seed(number)
            parameter.data.normal_(std=0.1)
    return model


def broken(*arguments: Any) -> Any:
    return 1 / 0


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, WIDTH, generator=generator) for _ in range(3)]


def results(model: Network, passes: int = 2) -> list[torch.Tensor]:
    """Losses, gradients, and outputs without gradients in between."""
    trained = [parameter for layer in lora_layers(model).values() for parameter in layer.adapters.parameters()]
    tensors: list[torch.Tensor] = []
    for _ in range(passes):
        for parameter in trained:
            parameter.grad = None
        loss = model(*inputs()).square().mean()
        loss.backward()
        tensors += [loss.detach(), *(parameter.grad for parameter in trained if parameter.grad is not None)]
        with torch.no_grad():
            tensors.append(model(*inputs()))
    return tensors


def streamed(model: Network, slots: int, copies: HostCopies | None = None) -> BlockStream:
    fixed = [p for layer in lora_layers(model).values() for p in layer.adapters.parameters()]
    stream = BlockStream(model, listed_blocks(model), CPU, slots=slots, fixed=fixed, copies=copies)
    stream.start()
    return stream


def assert_equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> None:
    assert len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("copies", [HostCopies, Late])
@pytest.mark.parametrize("slots", [2, 3, 5, 9])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("quantize", ["off", "int8", "nf4"])
def test_streamed_blocks_have_the_bits_of_resident_ones(
    copies: Callable[[], HostCopies], slots: int, recompute: bool, quantize: str
) -> None:
    model = network(recompute=recompute, quantize=quantize)
    expected = results(deepcopy(model))
    assert not any(torch.isnan(each).any() for each in expected)
    stream = streamed(model, slots, copies())
    assert_equal(results(model), expected)
    stream.stop()
    assert_equal(results(model), expected)
    stream.start()
    assert_equal(results(model), expected)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_copies_each_block_once_each_way(recompute: bool) -> None:
    model = network(recompute=recompute)
    stream = streamed(model, 2, Late())
    size = stream.streamed_bytes // 5
    model(*inputs()).mean().backward()
    assert stream.copied_bytes == (5 + 3) * size, "two blocks are still there when the backward pass begins"
    with torch.no_grad():
        model(*inputs())
    assert stream.copied_bytes == (5 + 3 + 5) * size
    assert stream.slot_bytes == 2 * size


@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_before_the_first_trained_one_are_not_copied_again(recompute: bool) -> None:
    model, late = network(recompute=recompute, first=3), Late()
    expected = results(deepcopy(model), 1)
    stream = streamed(model, 2, late)
    assert_equal(results(model, 1), expected)
    assert not late.waiting and stream.copied_bytes == 2 * stream.streamed_bytes, "blocks 3 and 4 are there"


def test_another_order_of_blocks_is_not_wrong() -> None:
    model = network(recompute=True)
    model.skips = {1, 4}
    expected = results(deepcopy(model))
    late = Late()
    model_blocks = [model.blocks[at] for at in (2, 0, 4, 3, 1)]
    fixed = [p for layer in lora_layers(model).values() for p in layer.adapters.parameters()]
    BlockStream(model, model_blocks, CPU, fixed=fixed, copies=late).start()
    assert_equal(results(model), expected)
    assert not late.waiting, "no copy outlives a pass"


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    model = network()
    expected = results(deepcopy(model))
    streamed(model, 2, Late())
    handle = model.blocks[3].second.register_forward_hook(broken)
    with pytest.raises(ZeroDivisionError):
        model(*inputs())
    handle.remove()
    handle = model.blocks[2].register_full_backward_pre_hook(broken)
    with pytest.raises(ZeroDivisionError):
        model(*inputs()).mean().backward()
    handle.remove()
    assert_equal(results(model), expected)


def test_memory_that_is_shared_stays_shared() -> None:
    """Views of one matrix move together; what two blocks or the rest of the network read stays on the device."""
    model = network(quantize="int8")
    block: Any
    joint = torch.empty(2 * WIDTH, 2 * WIDTH)
    for block, part in zip(model.blocks, torch.split(joint, WIDTH), strict=False):
        block.second.weight.data = part.copy_(block.second.weight)
    model.blocks[2].second._parameters["weight"] = model.leave._parameters["weight"] = nn.Parameter(
        torch.randn(WIDTH, 2 * WIDTH), requires_grad=False
    )
    memories, rest = divide(model, listed_blocks(model), aliases=[joint])
    every: Any = model.blocks
    pairs = [(each.modulation.base, each.shift.base) for each in every]
    assert all(joint_weight(pair) is not None for pair in pairs)
    sizes = [memory.size for memory in memories]
    assert sizes[0] == sizes[1] == sizes[2] < sizes[3] == sizes[4] and rest.size > joint.nbytes
    before = [deepcopy(block.state_dict()) for block in model.blocks]
    for memory in (*memories, rest):
        memory.gather(torch.empty(memory.size + 512, dtype=torch.uint8)[256:-256])
    assert all(joint_weight(pair) is not None for pair in pairs)
    assert model.blocks[0].second.weight.untyped_storage().data_ptr() == joint.untyped_storage().data_ptr()
    for block, tensors in zip(model.blocks, before, strict=True):
        assert all(torch.equal(value, tensors[name]) for name, value in block.state_dict().items())
    assert REST < 0


def test_layouts_are_kept() -> None:
    model = nn.ModuleList([nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(3, 5))]).requires_grad_(False)
    weight = model[0][0].weight
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    model[0][1].weight.data = model[0][1].weight.data.T.contiguous().T
    values = [p.clone() for p in model.parameters()]
    (memory,), _ = divide(nn.Sequential(model), list(model))
    memory.gather(torch.empty(memory.size, dtype=torch.uint8))
    assert weight.is_contiguous(memory_format=torch.channels_last) and not model[0][1].weight.is_contiguous()
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))


def test_a_host_without_memory_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> torch.Tensor:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(arena, "host_buffer", refuse)
    with pytest.raises(MemoryBudgetError, match=r"not enough host memory for block 1 of 5 of Network .*12"):
        streamed(network(), 2)


def test_nothing_is_left_of_a_stopped_stream() -> None:
    model = network()
    hooks = [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()]
    with nullcontext(streamed(model, 2)) as stream:
        assert stream.copied_bytes == 0
        stream.start()
        stream.stop()
        stream.stop()
    assert [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()] == hooks
