"""Hot swap on a real GPU: equal to MergedSource, restored bit for bit, pointers and graphs stay valid."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from concurrent.futures import Future  # noqa: E402
from contextlib import suppress  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Literal, cast  # noqa: E402

from tests.support import random, tensor, write  # noqa: E402
from torch import nn  # noqa: E402

from inweave.errors import MemoryBudgetError, TargetError  # noqa: E402
from inweave.formats.read import read  # noqa: E402
from inweave.weights.build import build  # noqa: E402
from inweave.weights.merged import MergedSource  # noqa: E402
from inweave.weights.source import DictSource  # noqa: E402
from inweave.weights.weaver import Weaver  # noqa: E402

NAMES = [f"block{i}" for i in range(40)]


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        for i, name in enumerate(NAMES):
            self.add_module(name, nn.Linear(64 + 8 * (i % 3), 96))
        self.add_module("conv", nn.Conv2d(8, 16, 3, padding=1))
        self.to(device="cuda", dtype=dtype)


def lora(net: nn.Module, seed: int, rank: int = 8, dtype: str = "F16", kinds: str = "lora"):  # type: ignore[no-untyped-def]
    tensors = {}
    for number, (name, module) in enumerate(net.named_children()):
        shape = tuple(cast("torch.Tensor", module.weight).shape)
        tail = (1,) * (len(shape) - 2)
        tensors[f"unet.{name}.lora_down.weight"] = random(seed + number, rank, *shape[1:], dtype=dtype)
        tensors[f"unet.{name}.lora_up.weight"] = random(seed + 100 + number, shape[0], rank, *tail, dtype=dtype)
        tensors[f"unet.{name}.alpha"] = tensor(float(rank) / 2, dtype)
        if kinds == "mixed" and number % 5 == 0:
            tensors[f"unet.{name}.dora_scale"] = tensor(abs(random_numbers(shape[0])) + 0.5)
    return tensors


def random_numbers(count: int):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.random.default_rng(count).standard_normal((count, 1))


def copies(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("keep", ["device", "host"])
@pytest.mark.parametrize("kinds", ["lora", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equals_merged_source_and_comes_back(
    dtype: torch.dtype, kinds: str, keep: Literal["device", "host"], tmp_path: Path
) -> None:
    net = Net(dtype)
    before = copies(net)
    pointers = {name: value.data_ptr() for name, value in net.state_dict().items()}
    weaver = Weaver(net, keep=keep)
    one = write(tmp_path / "a.safetensors", lora(net, 1, kinds=kinds))
    two = write(tmp_path / "b.safetensors", lora(net, 500, rank=32, dtype="BF16"))
    base = DictSource({name: value.cpu() for name, value in before.items()})
    for stack in ([(one, 0.8)], [(two, -0.5)], [(one, 0.3), (two, 1.5)], [(one, 0.3), (two, 0.5)], [(two, 1.0)]):
        weaver.apply(stack)
        plans = [(weaver._cache.get(path).plan, strength) for path, strength in stack]
        want = MergedSource(base, plans)
        for name, value in net.state_dict().items():
            exact = want.get(name, dtype=torch.float32)
            bound = torch.finfo(dtype).eps * exact.abs().clamp_min(1e-3) + 2e-6
            assert bool(((value.cpu().float() - exact).abs() <= bound).all()), (stack, name)
        assert weaver.apply(stack) == 0
    weaver.apply([])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert {name: value.data_ptr() for name, value in net.state_dict().items()} == pointers


def test_a_captured_graph_sees_the_new_weights() -> None:
    net = Net(torch.float32)
    weaver = Weaver(net, keep="device")
    x = torch.randn(5, 64, device="cuda")
    net.block0(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = net.block0(x)
    graph.replay()
    plain = y.clone()
    weaver.apply([(read(lora(net, 1)), 1.0)])
    graph.replay()
    torch.testing.assert_close(y, net.block0(x))
    assert not torch.allclose(y, plain)
    weaver.apply([])
    graph.replay()
    assert torch.equal(y, plain)


def test_nan_is_detected_on_the_device_before_anything_is_written(tmp_path: Path) -> None:
    net = Net(torch.bfloat16)
    before = copies(net)
    tensors = lora(net, 1)
    tensors["unet.block3.lora_up.weight"] = tensor([[float("nan")] * 8] * 96, "F16")
    weaver = Weaver(net, keep="device")
    with pytest.raises(TargetError, match=r"block3\.lora_up"):
        weaver.apply([(write(tmp_path / "a.safetensors", tensors), 1.0)])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def all_free_memory() -> list[torch.Tensor]:
    """Everything that this process may still allocate, in tensors of 2 MiB."""
    filler = []
    with suppress(torch.OutOfMemoryError):
        while True:
            filler.append(torch.empty(2 * 1024**2, dtype=torch.uint8, device="cuda"))
    return filler


def test_out_of_memory_is_reported_and_nothing_is_left_half_merged() -> None:
    net = Net(torch.float32)
    before = copies(net)
    weaver = Weaver(net, keep="device")
    weaver.apply([(read(lora(net, 1)), 1.0)])
    torch.cuda.empty_cache()
    large = lora(net, 50, rank=2048)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 4 * 1024**2) / total)
    filler = all_free_memory()  # what other tests have left in the allocator's cache does not count as free
    del filler[-2:]
    try:
        with pytest.raises((MemoryBudgetError, torch.OutOfMemoryError)):
            weaver.apply([(read(large), 1.0)])
    finally:
        del filler
        torch.cuda.set_per_process_memory_fraction(1.0)
    weaver.apply([])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("kinds", ["lora", "mixed"])
def test_weights_read_while_the_stack_is_resolved_end_up_the_same(kinds: str) -> None:
    """Tensors that reached the device before the stack was known are merged there, or read again where they must be."""
    net = Net(torch.float16)
    stored = {name: value.cpu() for name, value in copies(net).items()}
    weaver = Weaver(net)
    plans = [(weaver.plan(read(lora(net, seed, kinds=kinds), {})), 0.7) for seed in (1, 500)]
    pending: Future[object] = Future()

    class Slow(DictSource):
        """Lets the stack arrive after the third tensor was read."""

        reads = 0

        def get(self, name: str, **options: object) -> torch.Tensor:  # type: ignore[override]
            Slow.reads += 1
            if Slow.reads == 3:
                pending.set_result(plans)
            return super().get(name, **options)  # type: ignore[arg-type]

    late, whole = Net(torch.float16), Net(torch.float16)
    build(late, MergedSource(Slow(stored), pending), device="cuda")  # type: ignore[arg-type]
    assert pending.done()
    build(whole, MergedSource(DictSource(stored), plans), device="cuda")
    for (name, one), two in zip(late.state_dict().items(), whole.state_dict().values(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize("keep", ["device", "host"])
@pytest.mark.parametrize("kinds", ["lora", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_beyond_the_dtype_are_refused_and_nothing_changes(
    dtype: torch.dtype, kinds: str, keep: Literal["device", "host"], tmp_path: Path
) -> None:
    net = Net(dtype)
    base = copies(net)
    weaver = Weaver(net, keep=keep)
    one = write(tmp_path / "one.safetensors", lora(net, 1, kinds=kinds))
    two = write(tmp_path / "two.safetensors", lora(net, 500, rank=32, dtype="BF16"))
    for before in ([], [(one, 0.5)], [(one, 0.5), (two, -0.3)]):
        weaver.apply(before)
        expected = copies(net)
        for stack in ([(two, 1e39)], [(two, -1e39), (one, 0.1)], [(one, 1e30 if dtype == torch.float16 else 1e39)]):
            with pytest.raises(TargetError, match=r"(one|two)\.safetensors at strength .*would overflow"):
                weaver.apply(stack)
            assert all(torch.equal(value, expected[name]) for name, value in net.state_dict().items()), stack
        assert weaver.apply(before) == 0
    weaver.apply([])
    assert all(torch.equal(value, base[name]) for name, value in net.state_dict().items())


def test_a_model_that_moves_to_the_gpu_and_back_is_followed(tmp_path: Path) -> None:
    net = Net(torch.float32).cpu()
    base = copies(net)
    weaver = Weaver(net)
    one = write(tmp_path / "one.safetensors", lora(net, 1))
    two = write(tmp_path / "two.safetensors", lora(net, 500))
    weaver.apply([(one, 0.5)])
    for device in ("cuda", "cpu", "cuda"):
        net.to(device)
        weaver.apply([(two, 1.0)])
        want = MergedSource(DictSource(base), [(weaver.plan(two), 1.0)])
        for name, value in net.state_dict().items():
            torch.testing.assert_close(value.cpu(), want.get(name), atol=1e-5, rtol=1e-5)
        net.to("cpu" if device == "cuda" else "cuda")
        weaver.apply([])
        assert all(torch.equal(value.cpu(), base[name]) for name, value in net.state_dict().items()), device
        weaver.apply([(one, 0.5)])
    net.half()
    weaver.apply([])
    assert all(torch.equal(value.cpu(), base[name].half()) for name, value in net.state_dict().items())


def test_a_foreign_write_on_the_gpu_is_refused() -> None:
    from inweave.errors import MergeStateError

    net = Net(torch.bfloat16)
    weaver = Weaver(net, keep="device")
    adapter = read(lora(net, 1))
    weaver.apply([(adapter, 1.0)])
    with torch.no_grad():
        net.block3.weight.mul_(2)
    with pytest.raises(MergeStateError, match=r"block3\.weight"):
        weaver.apply([])


def test_a_stack_is_a_set_on_the_gpu() -> None:
    results = []
    for order in ((0, 1, 2), (2, 0, 1), (1, 0, 2)):
        net = Net(torch.float32)
        stack = [(read(lora(net, seed)), strength) for seed, strength in ((1, 0.7), (200, -0.4), (500, 1.1))]
        Weaver(net, keep="device").apply([stack[number] for number in order])
        results.append(copies(net))
    assert all(torch.equal(value, results[0][name]) for each in results for name, value in each.items())
