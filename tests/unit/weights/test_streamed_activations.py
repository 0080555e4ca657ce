"""Inputs of checkpointed blocks in host memory: the same gradients, whatever the timing of copies, and less memory."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from inweave.errors import MemoryBudgetError
from inweave.ops.tensors.peak import peak_bytes
from inweave.weights.streaming import activations, arena
from inweave.weights.streaming.activations import HostActivations
from inweave.weights.streaming.copies import Copies, HostCopies

CPU, WIDTH, DEPTH = torch.device("cpu"), 64, 6
recomputed = partial(checkpoint, use_reentrant=False)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALLEST", 256)


class Network(nn.Module):
    """Blocks of two streams with an embedding that all of them get.

    ``trained``: from this block on; ``broken``: the number of blocks computed, or recomputed, before one fails.
    """

    def __init__(self, trained: int = 0, broken: int = 1 << 30) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.second = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.checkpoint: Any = recomputed
        self.broken = broken
        for number in range(trained):
            self.first[number].requires_grad_(False)
            self.second[number].requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        for number in range(DEPTH):
            x, y = self.checkpoint(partial(self.block, number), x, y, time)
        return x + y

    def block(self, number: int, x: torch.Tensor, y: torch.Tensor, time: torch.Tensor) -> Any:
        self.broken -= 1
        if self.broken == 0:
            raise RuntimeError("out of luck")
        mixed = torch.tanh(self.first[number](x + time) + y)
        return mixed, y * torch.sigmoid(self.second[number](mixed))


def gradients(network: Network, seed: int = 1) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(8, WIDTH, generator=generator).requires_grad_(number == 1) for number in range(3)]
    network.zero_grad()
    loss = network(*inputs).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), inputs[1].grad, *(p.grad.clone() for p in network.parameters() if p.grad is not None)]


class _View(NamedTuple):
    """A tensor whose memory may be freed."""

    storage: weakref.ref[torch.UntypedStorage]
    dtype: torch.dtype
    place: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _View:
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return cls(weakref.ref(tensor.untyped_storage()), tensor.dtype, place)

    def tensor(self) -> torch.Tensor:
        storage = self.storage()
        assert storage is not None, "freed while it was copied"
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.place)  # type: ignore[call-overload,no-any-return]


class Late(HostCopies):
    """Copies at the last moment, whose targets hold nothing before; both sides' memory has to exist until then."""

    def __init__(self) -> None:
        self.waiting: list[tuple[_View, _View]] = []

    def send(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        event = _View.of(target), _View.of(source)
        target.fill_(float("nan"))
        self.waiting.append(event)
        return event

    def wait(self, event: Any) -> None:
        while any(each is event for each in self.waiting):
            target, source = self.waiting.pop(0)
            target.tensor().copy_(source.tensor())

    def join(self) -> None:
        for event in list(self.waiting):
            self.wait(event)


def hold_inputs(network: Network, copies: Copies | None = None) -> HostActivations:
    owner = HostActivations(CPU, copies)
    network.checkpoint = owner.around(recomputed)
    owner.watch(network)
    return owner


@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize("late", [False, True])
def test_gradients_have_the_same_bits(trained: int, late: bool) -> None:
    network = Network(trained)
    expected = [gradients(network, seed) for seed in (1, 2)]
    copies = Late() if late else None
    owner = hold_inputs(network, copies)
    for seed in (1, 2):
        for one, two in zip(gradients(network, seed), expected[seed - 1], strict=True):
            assert torch.equal(one, two)
        with torch.no_grad():
            network(*(torch.randn(8, WIDTH) for _ in range(3)))
    size = 8 * WIDTH * 4
    assert owner.host_bytes == (2 * DEPTH + 1) * size, "two streams of each block, and the embedding once, at first"
    assert sum(map(len, owner._free.values())) * size == owner.host_bytes and not owner._leaving + owner._arriving
    assert copies is None or not copies.waiting, "no copy outlives the pass"


@pytest.mark.parametrize("broken", [1, 4, DEPTH + 1, DEPTH + 2, 2 * DEPTH])
def test_a_pass_that_fails_leaves_nothing_behind(broken: int) -> None:
    """In the forward pass, and where blocks are recomputed in the backward pass."""
    expected = gradients(Network())
    network = Network(broken=broken)
    copies = Late()
    owner = hold_inputs(network, copies)
    with pytest.raises(RuntimeError, match="out of luck"):
        gradients(network)
    gc.collect()
    assert all(torch.equal(*pair) for pair in zip(gradients(network), expected, strict=True))
    assert sum(map(len, owner._free.values())) * 8 * WIDTH * 4 == owner.host_bytes and not copies.waiting


def test_a_graph_that_is_kept_can_be_used_twice() -> None:
    network = Network()
    inputs = [torch.randn(8, WIDTH).requires_grad_() for _ in range(3)]
    once = torch.autograd.grad(network(*inputs).sum(), inputs)
    hold_inputs(network, Late())
    total = network(*inputs).sum()
    for keep in (True, False):
        again = torch.autograd.grad(total, inputs, retain_graph=keep)
        assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))


def test_memory_of_a_pass_does_not_grow_with_the_number_of_blocks() -> None:
    def peak(owner: HostActivations | None) -> int:
        network = Network().to("meta")
        if owner is not None:
            network.checkpoint = owner.around(recomputed)
        inputs = [torch.empty(1024, WIDTH, device="meta") for _ in range(3)]
        for parameter in network.parameters():
            parameter.grad = torch.empty_like(parameter)
        return peak_bytes(lambda: network(*(x * 1 for x in inputs)).sum().backward(), [network])

    size = 1024 * WIDTH * 4
    owner = HostActivations(torch.device("meta"))
    stored, moved = peak(None), peak(owner)
    assert owner.host_bytes == (2 * DEPTH + 1) * size
    assert stored - moved >= 2 * (DEPTH - 3) * size, (stored / size, moved / size)


def test_too_little_host_memory_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network()
    hold_inputs(network)

    def refuse(size: int) -> Any:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(arena, "host_buffer", refuse)
    with pytest.raises(MemoryBudgetError, match='set offload_activations = "off"'):
        gradients(network)
